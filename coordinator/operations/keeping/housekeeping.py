"""The daemon's child process that archives ended evaluations, judges their trainings, and prunes by `[retention]`.

Rule: one process at a time, and the loop never waits for it; killed at any step, its work is repeated. It is started when an
evaluation has ended, at the daemon's start for leftovers of an earlier one, and once a day for `[retention]`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

from coordinator.base.clock import Throttle
from coordinator.base.isolate import isolate_errors
from coordinator.base.side_process import SideProcess
from coordinator.intake.from_settings import code_of
from coordinator.operations.keeping.archive import archive_all
from coordinator.operations.keeping.prune import prune_now
from coordinator.results.report import training_files
from coordinator.results.report.render import format_bytes as in_words
from coordinator.site.config.schema import Config, RetentionConfig
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

RETENTION_SECONDS = 86400.0  # between two prunes by `[retention]`
LOOK_SECONDS = 600.0  # between two checks whether one is due
NICENESS = 10  # of the process: evaluations take precedence


class HousekeepingJob(Record):
    """Input of the process. `ended`: ids of evaluations to archive, None: all; `code`: as in `retention.removable_parts`."""

    work_dir: str
    horizon: int  # of verdicts along a training
    ended: tuple[str, ...] | None
    retention: RetentionConfig | None = None
    code: str | None = None


def prune_due(work: WorkPaths, now: float) -> bool:
    """Return whether neither this nor an earlier daemon has pruned by `[retention]` within a day. `now`: unix seconds."""
    try:
        return now - _mark(work).stat().st_mtime >= RETENTION_SECONDS
    except FileNotFoundError:
        return True


def _mark(work: WorkPaths) -> Path:
    return work.cache / "retention"  # its mtime is the time of the last prune


class Housekeeper:
    """Starts the process for the daemon and does not wait for it."""

    def __init__(self, config: Config) -> None:
        self._work = WorkPaths(config.work_dir)
        self._policy = config.retention if config.retention.keep else None
        self._code, self._horizon = code_of(config), config.horizon
        self._ended: set[str] | None = None  # to archive; None: all, as at the start
        self._throttle = Throttle()
        # File WORK_DIR/cache/housekeeping.log: output of archiving and of retention | the coordinator | may be removed
        self._process = SideProcess(
            "coordinator.operations.keeping.housekeeping", self._work.cache / "housekeeping.log"
        )

    def ended(self, evaluation_id: str) -> None:
        """Archive this evaluation, once its journal is closed."""
        if self._ended is not None:
            self._ended.add(evaluation_id)

    @property
    def busy(self) -> bool:
        return self._ended is None or bool(self._ended) or self._process.running

    def tick(self, now: float) -> None:
        """Start what is due, if nothing runs. `now`: unix seconds. Raise OSError if that fails; the next daemon repeats it."""
        if self._process.ended():
            log.warning("housekeeping failed: see %s; the next daemon repeats it", self._process.log)
        if self._process.running:
            return
        looks = self._policy is not None and self._throttle.due("retention", LOOK_SECONDS, now)
        prunes = looks and prune_due(self._work, now)
        if self._ended == set() and not prunes:
            return
        job = HousekeepingJob(
            work_dir=str(self._work.root),
            horizon=self._horizon,
            ended=None if self._ended is None else tuple(sorted(self._ended)),
            retention=self._policy if prunes else None,
            code=self._code,
        )
        self._ended = set()
        self._process.begin(job.model_dump_json().encode())

    def stop(self) -> None:
        """End what runs: the next daemon repeats it."""
        self._process.stop()


def keep_house(job: HousekeepingJob, now: float) -> None:
    """Archive, judge the trainings of ended evaluations, then prune if the job says so."""
    work = WorkPaths(job.work_dir)
    if archived := archive_all(work.root, job.ended):
        log.info("archived %d evaluations", archived)
    settings = Config(work_dir=work.root, horizon=job.horizon)
    for name in job.ended or ():
        with isolate_errors(partial(log.error, "%s: its training is not judged: %r", name)):
            training_files.training_of_evaluation(settings, name)
    if job.retention is None:
        return
    write_atomic(_mark(work), b"")
    made = prune_now(work, job.retention, now, code=job.code)
    if made.evaluations or made.shared:
        log.info(
            "pruned %d evaluations and %d shared files or folders: %s in %d files",
            len(made.evaluations),
            len(made.shared),
            in_words(made.size.bytes),
            made.size.files,
        )


def main() -> int:
    """Run the child process. Its output is the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(NICENESS)
    keep_house(HousekeepingJob.model_validate_json(sys.stdin.buffer.read()), time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
