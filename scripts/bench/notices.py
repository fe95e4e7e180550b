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
from collections.abc import Iterator
from pathlib import Path

from coordinator.intake import inbox, pending, work_folder
from coordinator.runtime.summary import read_evaluation
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.storage import write_atomic

LOOK_SECONDS = 0.05
EVERY_SECONDS = 2.0  # between two notices


class Notices:
    """The notices that were left in a work folder."""

    def __init__(self, paths: WorkPaths, kept: Path) -> None:
        self._paths, self._kept = paths, kept
        self._rows: list[tuple[float, float | None]] = []
        self._waiting: dict[Path, tuple[int, str]] = {}  # file -> its row, its checkpoint
        for file in sorted(paths.inbox.glob("*.json")):
            self._add(file, json.loads(file.read_bytes())["checkpoint"], file.stat().st_mtime)

    def _add(self, file: Path, checkpoint: str, at: float) -> None:
        self._waiting[file] = (len(self._rows), checkpoint)
        self._rows.append((at, None))

    def shown(self) -> set[str]:
        return {each.checkpoint for each in pending.read(self._paths, time.time()).waiting}

    def announce(self, notice: inbox.Notice) -> None:
        at = time.time()
        self._add(inbox.leave(self._paths, notice), notice.checkpoint, at)

    def look(self) -> None:
        shown, now = self.shown(), time.time()
        for file, (row, checkpoint) in list(self._waiting.items()):
            if checkpoint in shown or not file.exists():
                self._rows[row] = (self._rows[row][0], now)
                del self._waiting[file]
        write_atomic(self._kept, json.dumps(self._rows).encode())


def open_ones(paths: WorkPaths, suite: str) -> Iterator[inbox.Notice]:
    """A notice of each evaluation without results."""
    for file in sorted(paths.root.glob("*/evaluation.json")):
        record = read_evaluation(EvaluationPaths(file.parent))
        if record is not None and not EvaluationPaths(file.parent).results.exists():
            checkpoint = record.checkpoint
            yield inbox.Notice(
                checkpoint=checkpoint.announced, step=checkpoint.step, suite=suite, noticed_at=time.time()
            )


def main(root: Path) -> None:
    paths = WorkPaths(work_folder.load(root / "evalspan.toml").work_dir)
    notices, count, due = Notices(paths, root / "notices.json"), 0, 0.0
    while True:
        if time.monotonic() >= due:
            due = time.monotonic() + EVERY_SECONDS
            shown = notices.shown()
            fresh = [n for n in open_ones(paths, str(root / "suite.toml")) if n.checkpoint not in shown]
            if fresh:
                notices.announce(fresh[count % len(fresh)])
                count += 1
        notices.look()
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
