"""What folding an ended evaluation saves, and what a work folder of many such costs to look at.

Prints JSON: files and bytes of an evaluation's folder before and after its fold, seconds of the fold; seconds in which
what `status --disk` shows is read of a work folder of `--evaluations` folded ones (hard links to the first, so the disk
holds one). The folder is that of a simulated evaluation: real names and records, and no job was run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.ended import leave_ended

from bench.harness import Options, command, option, row, targets
from coordinator.keeping.folding import MOST_FILES, fold
from coordinator.keeping.inventory import read_work_folder
from coordinator.keeping.prune import plan
from coordinator.keeping.retention import Policy
from coordinator.runtime.status_file import Ended, read_status
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.storage import write_record

ANSWER = "Question 17 has four parts, of which the second one decides; so the answer is (B). " * 5
MONTH = Policy(keep="scores", older_than_seconds=30 * 86_400)


def _size(folder: Path) -> dict[str, int]:
    """Files, their bytes, and the bytes that they take on the disk."""
    found = [(Path(at) / name).lstat() for at, _, names in os.walk(folder) for name in names]
    return {
        "files": len(found),
        "bytes": sum(f.st_size for f in found),
        "bytes_on_disk": sum(f.st_blocks * 512 for f in found),
    }


def _spent(act: Any) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def _many(one: EvaluationPaths, work: WorkPaths, count: int) -> None:
    """A work folder of so many evaluations like this one."""
    status = read_status(one)
    assert isinstance(status, Ended)
    for number in range(count):
        paths = work.evaluation(f"ckpt{number}-suite-{number:08d}")
        paths.root.mkdir(parents=True)
        for file in one.root.iterdir():
            if file.name != one.status.name:
                (paths.root / file.name).hardlink_to(file)
        renamed = status.model_copy(update={"evaluation_id": paths.root.name})
        write_record(paths.status, renamed)


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        _, paths = leave_ended(
            root / "one", options.nodes, options.gpus, options.tasks, shards=4, answer=ANSWER
        )
        before = _size(paths.root)
        folding = _spent(lambda: fold(paths))
        after = _size(paths.root)
        work = WorkPaths(root / "many")
        _many(paths, work, options.evaluations)
        looking = _spent(lambda: plan(read_work_folder(work), MONTH, time.time(), code=None))
    shape = {name: getattr(options, name) for name in ("nodes", "gpus", "tasks", "evaluations")}
    rows = [
        row("files of an ended evaluation", after["files"], MOST_FILES),
        row("CPU seconds to look at the work folder", looking["cpu_seconds"], 5.0),
    ]
    return targets(rows, **shape, before=before, after=after, fold=folding, status_disk=looking)


if __name__ == "__main__":
    sys.exit(
        command(
            "bench_folding",
            __doc__,
            measure,
            option("--nodes", 64),
            option("--gpus", 8, "of a node"),
            option("--tasks", 60),
            option("--evaluations", 3000),
            option("--folder", None, "make the folders here (default: a temporary folder)", type=Path),
        )
    )
