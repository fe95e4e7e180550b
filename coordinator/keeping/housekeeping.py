"""The daemon's housekeeping, in a process of its own: folds ended evaluations and, by `[retention]`, prunes.

Rule: one process at a time, and the loop never waits for it; killed at any step it is done again. It is started when an
evaluation has ended, at the daemon's start for what an earlier one left, and at most once an hour for `[retention]`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from coordinator.base.aside import Aside
from coordinator.base.throttle import Throttle
from coordinator.config.schema import Config
from coordinator.keeping.folding import fold_all
from coordinator.keeping.prune import prune_now
from coordinator.keeping.retention import Policy
from coordinator.report.render import size as in_words
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

RETENTION_SECONDS = 3600.0  # between two prunes by `[retention]`
NICE = 10  # of the process: evaluations go first


class Job(Record):
    """Input of the process. `ended`: ids of evaluations to fold, None: all; `code`: as of `retention.unused`."""

    work_dir: str
    ended: tuple[str, ...] | None
    retention: Policy | None = None
    code: str | None = None


def policy_of(config: Config) -> Policy | None:
    """What `[retention]` keeps; None where it is off."""
    section = config.retention
    if section.keep is None:
        return None
    return Policy(
        keep=section.keep,
        older_than_seconds=section.older_than_seconds,
        baselines=section.baselines,
    )


def code_of(config: Config, env: dict[str, str]) -> str | None:
    """Name of the code folder of a coordinator's jobs, by their environment; None where they need none."""
    first = env.get("PYTHONPATH", "").partition(os.pathsep)[0]
    cache = WorkPaths(config.work_dir).cache
    return Path(first).name if first and Path(first).parent == cache else None


class Housekeeper:
    """Starts housekeeping for the daemon and does not wait for it."""

    def __init__(self, config: Config, code: str | None) -> None:
        self._job = Job(work_dir=str(config.work_dir), ended=None, retention=policy_of(config), code=code)
        self._ended: set[str] | None = None  # to fold; None: all of them, as at the start
        self._throttle = Throttle()
        # File WORK_DIR/cache/housekeeping.log: output of folds and of retention | the coordinator | may be removed
        self._process = Aside(
            "coordinator.keeping.housekeeping", WorkPaths(config.work_dir).cache / "housekeeping.log"
        )

    def ended(self, evaluation_id: str) -> None:
        """Fold this evaluation, once its journal is closed."""
        if self._ended is not None:
            self._ended.add(evaluation_id)

    @property
    def busy(self) -> bool:
        return self._ended is None or bool(self._ended) or self._process.running

    def tick(self, now: float) -> None:
        """Start what is due, where nothing runs. `now`: unix seconds. Never raises."""
        if self._process.ended():
            log.warning(
                "housekeeping has failed: see %s; tried again at the next evaluation's end", self._process.log
            )
        if self._process.running:
            return
        prunes = self._job.retention is not None and self._throttle.due("retention", RETENTION_SECONDS, now)
        if self._ended == set() and not prunes:
            return
        changes: dict[str, object] = {"ended": None if self._ended is None else tuple(sorted(self._ended))}
        if not prunes:
            changes["retention"] = None
        self._ended = set()
        try:
            self._process.begin(self._job.model_copy(update=changes).model_dump_json().encode())
        except OSError as error:  # no memory, no process, a full disk
            log.warning("housekeeping: %s; tried again at the next evaluation's end", error)

    def stop(self) -> None:
        """End what runs: the next daemon does it again."""
        self._process.stop()


def keep_house(job: Job, now: float) -> None:
    """Fold, then prune where no other prune of this work folder was within the last hour."""
    work = WorkPaths(job.work_dir)
    folded = fold_all(work.root, job.ended)
    if folded:
        log.info("folded %d evaluations", folded)
    mark = work.cache / "retention"  # its mtime: of the last prune, also by an earlier daemon
    with contextlib.suppress(FileNotFoundError):
        if now - mark.stat().st_mtime < RETENTION_SECONDS / 2:
            return
    if job.retention is not None:
        write_atomic(mark, b"")
        made = prune_now(work, job.retention, now, code=job.code)
        if made.size.files:
            log.info(
                "pruned %d evaluations and %d shared files or folders: %s in %d files",
                len(made.removals),
                len(made.shared),
                in_words(made.size.bytes),
                made.size.files,
            )


def main() -> int:
    """The housekeeping process. Its output is the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(NICE)
    keep_house(Job.model_validate_json(sys.stdin.buffer.read()), time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
