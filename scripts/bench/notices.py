"""Announces checkpoints of a daemon's open evaluations again and again, and times until the daemon has picked each notice up.

    python -m bench.notices FOLDER

Picked up: the notice's file is gone, or `pending.json` shows the checkpoint with its reason. FOLDER/notices.json has
(unix seconds of the notice, unix seconds at which it was picked up) of each; null where it was not picked up yet. Those that
lay there at the start come first. Runs until it is terminated.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from coordinator.intake import inbox, pending, work_folder
from coordinator.runtime.summary import read_evaluation
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.storage import write_atomic

LOOK_SECONDS = 0.05
EVERY_SECONDS = 2.0  # between two notices


def open_ones(paths: WorkPaths, suite: str) -> list[inbox.Notice]:
    """A notice of each evaluation without results."""
    folders = [EvaluationPaths(file.parent) for file in sorted(paths.root.glob("*/evaluation.json"))]
    records = [read_evaluation(folder) for folder in folders if not folder.results.exists()]
    found = [record.checkpoint for record in records if record is not None]
    told = {"suite": suite, "noticed_at": time.time()}
    return [inbox.Notice(checkpoint=each.announced, step=each.step, **told) for each in found]


def main(root: Path) -> None:
    paths = WorkPaths(work_folder.load(root / "evalspan.toml").work_dir)
    rows: list[tuple[float, float | None]] = []
    waiting: dict[Path, tuple[int, str]] = {}  # file -> its row, its checkpoint

    def add(file: Path, checkpoint: str, at: float) -> None:
        waiting[file] = (len(rows), checkpoint)
        rows.append((at, None))

    for file in sorted(paths.inbox.glob("*.json")):
        add(file, json.loads(file.read_bytes())["checkpoint"], file.stat().st_mtime)
    count, due = 0, 0.0
    while True:
        shown, now = {each.checkpoint for each in pending.read(paths, time.time()).waiting}, time.time()
        for file, (row, checkpoint) in list(waiting.items()):
            if checkpoint in shown or not file.exists():
                rows[row] = (rows[row][0], now)
                del waiting[file]
        write_atomic(root / "notices.json", json.dumps(rows).encode())
        if time.monotonic() >= due:
            due = time.monotonic() + EVERY_SECONDS
            every = open_ones(paths, str(root / "suite.toml"))
            if fresh := [notice for notice in every if notice.checkpoint not in shown]:
                notice, at = fresh[count % len(fresh)], time.time()
                add(inbox.leave(paths, notice), notice.checkpoint, at)
                count += 1
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
