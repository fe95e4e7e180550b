"""The evaluations of one work folder: taken up, told of what happens, let go of.

Rule: `_guarded` is the one boundary: whatever goes wrong in an evaluation's turn sets that one aside (`coordinator.runtime.parked`)
and nothing else. What is set aside is read back from its journal; one whose folder was removed is forgotten, and
its jobs end. What has ended is not read again (`coordinator.runtime.summary`).
It does not know: nodes, when to look at what.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from coordinator.base import clock
from coordinator.cluster import ClusterError, JobState
from coordinator.errors import EvalspanError
from coordinator.evaluation.events import AnyEvent, CancelAsked, PriorityAsked, RetryAsked
from coordinator.evaluation.records import EvaluationRecord, job_prefix
from coordinator.evaluation.state import State
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.journal import CopiedJournalError, Journal, WorkLock
from coordinator.runtime.parked import Aside, Asides, read_fault
from coordinator.runtime.runner import Running
from coordinator.runtime.summary import read_ended, write_ended
from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)


class Evaluations:
    """Those that run here, and those that are set aside."""

    def __init__(self, performer: Performer, grace: Grace) -> None:
        self.performer = performer
        self.grace = grace
        self.running: dict[str, Running] = {}
        self.trouble: str = ""  # the last thing that was away; shown to whoever watches
        self._asides = Asides()
        self._lock = WorkLock(performer.site.paths.lock)

    @property
    def busy(self) -> bool:
        """Is there an evaluation that has not ended, also one that is set aside (but for what a person must change), or
        given up and has jobs?
        """
        waiting = any(not aside.for_person for aside in self._waiting_asides())
        return waiting or any(r.state.ended_at is None for r in self.running.values())

    def records(self) -> list[EvaluationRecord]:
        """Of all evaluations that have not ended and are not given up: their checkpoints are needed."""
        open_ones = [r.state.record for r in self.running.values() if r.state.ended_at is None]
        return open_ones + [
            aside.record
            for aside in self._asides.by_id.values()
            if aside.standing in ("refused", "faulty") and aside.record is not None
        ]

    def lost(self, evaluation_id: str) -> str | None:
        """Why an evaluation is not gone on with, once its jobs have ended, too; None where it is."""
        aside = self._asides.by_id.get(evaluation_id)
        return None if aside is None or aside.open else aside.why

    # --- birth and return ----------------------------------------------------------------------------------------

    def accept(self, record: EvaluationRecord) -> Running:
        """Take an evaluation on, or go on with it where an earlier coordinator left it."""
        known = self.running.get(record.evaluation_id)
        if known is not None:
            return known
        root = self.performer.site.paths.evaluation(record.evaluation_id).root
        running = None
        if (root / "journal.jsonl").exists():
            running = Running.resume(root, self.performer, self.grace)
        if running is None:
            running = Running.accept(record, self.performer, self.grace)
        self.running[record.evaluation_id] = running
        return running

    def accept_or_wait(self, record: EvaluationRecord) -> None:
        """`accept`; one that has begun and cannot be gone on with just now is taken up by a later tick."""
        paths = self.performer.site.paths.evaluation(record.evaluation_id)
        aside = self._asides.by_id.get(record.evaluation_id)
        if aside is not None and aside.standing in ("refused", "faulty"):
            return
        if aside is not None:  # given up, and somebody asks for it again
            self._asides.forget(record.evaluation_id, faults=True)
        try:
            self.accept(record)
        except Exception as error:
            if not Journal.begun(paths.journal):
                raise
            self._set_aside(paths.root, error)

    def resume_all(self) -> None:
        """Every evaluation of the work folder that has not ended. Of those that have no journal is read."""
        converted: set[str] = set()
        for journal in sorted(Path(self.performer.site.work_dir).glob("*/journal.jsonl")):
            ended = read_ended(EvaluationPaths(journal.parent))
            if ended is None:
                self._take_up(journal.parent)
            elif ended.converted_digest is not None:
                converted.add(ended.converted_digest)
        for digest in converted:
            self._clear_digest(digest)

    def _resumed(self, root: Path) -> Running | None:
        if root.name in self._asides.by_id and not Journal.begun(EvaluationPaths(root).journal):
            raise FileNotFoundError(errno.ENOENT, "its journal is not there", str(root))
        return Running.resume(root, self.performer, self.grace)

    def _take_up(self, root: Path) -> None:
        """Go on with what an earlier coordinator, or this one, left; whatever is wrong with it is its own fault."""
        started = time.monotonic()
        try:
            running = self._resumed(root)
        except CopiedJournalError as error:  # its jobs, if it has any, are another's
            log.warning("%s", error)
            return
        except Exception as error:  # noqa: BLE001 (told, with its traceback where it is no error of ours)
            self._set_aside(root, error, time.monotonic() - started)
            return
        if running is None:
            return
        fault, known = read_fault(running.paths), root.name in self._asides.by_id
        self._asides.forget(root.name, faults=False)
        with suppress(OSError):
            running.paths.fault.unlink(missing_ok=True)
        if running.state.ended_at is not None:
            write_ended(running.state, running.paths)
        if running.state.ended_at is not None and not known:  # nobody waits for it
            running.journal.close()
            self._clear_converted(running)
            return
        self.running[root.name] = running
        if fault is not None and fault.cancelled:
            self._tell(root.name, CancelAsked(at=clock.now(), reason=fault.cancelled))

    # --- what people ask -----------------------------------------------------------------------------------------

    def cancel(self, evaluation_id: str, reason: str) -> None:
        """End it. OSError where it cannot be told so now: it shall be asked again. KeyError where there is none."""
        aside = self._asides.by_id.get(evaluation_id)
        if aside is not None and aside.standing == "faulty":
            self._take_up(aside.root)
            aside = self._asides.by_id.get(evaluation_id)
        if aside is not None and aside.standing in ("faulty", "given-up"):
            self._asides.give_up(aside, clock.now(), reason)
        if aside is not None and aside.standing != "refused":
            return  # its jobs end
        self._told(evaluation_id, CancelAsked(at=clock.now(), reason=reason))

    def retry(self, evaluation_id: str) -> None:
        """Try again what failed in it. OSError and KeyError as of `cancel`; KeyError, too, where `revive` found a fault."""
        aside = self._asides.by_id.get(evaluation_id)
        if aside is not None and aside.standing != "refused":
            raise KeyError(f"{evaluation_id}: {aside.why}")
        if aside is not None:
            raise OSError(errno.EAGAIN, f"{evaluation_id} is set aside: {aside.why}")
        running = self.running[evaluation_id]
        for note in running.paths.verdicts.glob(
            "*.hand"
        ):  # what died with an item: somebody has mended something
            note.unlink(missing_ok=True)
        self._told(evaluation_id, RetryAsked(at=clock.now()))

    def prioritize(self, evaluation_id: str, priority: int) -> None:
        """Serve it in another order. OSError and KeyError as of `cancel`."""
        self._told(evaluation_id, PriorityAsked(at=clock.now(), priority=priority))

    def _told(self, evaluation_id: str, event: AnyEvent) -> None:
        """What a person asked for. OSError where the evaluation is set aside (meanwhile): half of it may have been done,
        and the other half is done when it is back, or told again.
        """
        if evaluation_id not in self._asides.by_id and evaluation_id not in self.running:
            raise KeyError(evaluation_id)
        self._tell(evaluation_id, event)
        if evaluation_id not in self.running:
            raise OSError(errno.EAGAIN, f"{evaluation_id} is set aside: it is told later")

    def revive(self, evaluation_id: str) -> None:
        """Take up an evaluation of this folder again, also one that has ended or was given up. KeyError where there is
        none.
        """
        if evaluation_id in self.running:
            return
        root = self.performer.site.paths.evaluation(evaluation_id).root
        aside = self._asides.by_id.get(evaluation_id)
        if aside is not None:
            if aside.standing != "refused":
                self._asides.forget(evaluation_id, faults=True)
                self._take_up(root)
            return
        try:
            running = self._resumed(root) if (root / "journal.jsonl").exists() else None
        except OSError:
            raise
        except Exception as error:
            log.exception("%s cannot be taken up", evaluation_id)
            raise KeyError(f"{evaluation_id}: {error}") from error
        if running is None:
            raise KeyError(evaluation_id)
        self.running[evaluation_id] = running

    def _states(self) -> list[State]:
        return [running.state for running in self.running.values()]

    # --- the end -------------------------------------------------------------------------------------------------

    def forget_ended(self) -> None:
        """Let go of evaluations that are over: a daemon lives for months."""
        for evaluation_id, running in list(self.running.items()):
            if running.state.ended_at is not None:
                running.journal.close()
                del self.running[evaluation_id]
                self.performer.forget(evaluation_id)
        for evaluation_id, aside in list(self._asides.by_id.items()):
            if aside.standing == "gone" and not aside.open:
                self._asides.forget(evaluation_id, faults=True)

    def _clear_converted(self, ended: Running) -> None:
        """What was converted for an evaluation that is over, unless another one of the same checkpoint needs it."""
        if ended.state.conversion.announced is not None:
            self._clear_digest(ended.state.conversion.announced.digest)

    def _clear_digest(self, digest: str) -> None:
        others = (r.state for r in self.running.values() if r.state.ended_at is None)
        if any(
            s.conversion.announced is not None and s.conversion.announced.digest == digest for s in others
        ):
            return
        if any(aside.open for aside in self._asides.by_id.values()):
            return  # it may be one of these that needs it
        folder = self.performer.site.paths.converted
        with suppress(OSError):
            for left in folder.glob(f"{digest}*") if folder.is_dir() else ():
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)

    # --- the boundary --------------------------------------------------------------------------------------------

    def _guarded(self, evaluation_id: str, what: Callable[[Running], None]) -> None:
        """Do it. Whatever goes wrong is this evaluation's fault alone: its state is half-known now, so it is forgotten, and
        read back from the journal later.
        """
        running = self.running.get(evaluation_id)
        if running is None:
            return  # set aside meanwhile
        try:
            what(running)
        except ClusterError as error:
            self.trouble = str(error)
            log.warning("%s", self.trouble)
        except Exception as error:  # noqa: BLE001 (one boundary, told with its traceback)
            running.journal.close()
            del self.running[evaluation_id]
            self._set_aside(running.paths.root, error)

    def _tell(self, evaluation_id: str, event: AnyEvent) -> None:
        """One event; an evaluation that the disk has refused meanwhile hears it, or its like, when it is back."""
        self._guarded(evaluation_id, lambda r: r.take([event]))

    def _set_aside(self, root: Path, error: Exception, seconds: float = 0.0) -> None:
        """This evaluation cannot be gone on with: `_mend` tries again, unless it is given up."""
        before = self._asides.by_id.get(root.name)
        aside = self._asides.put(root, error, clock.now(), seconds=seconds, gone=self._is_gone(root))
        then = {
            "refused": "trying again",
            "faulty": f"set aside; trying again in {aside.due_at - clock.now():.0f} s",
            "given-up": f"given up, and its jobs end: `evalspan retry {root.name}` once it is mended",
            "gone": "forgotten, and its jobs end",
        }[aside.standing]
        self.trouble = f"{root.name}: {aside.why}; {then}"
        if before is None or (before.standing, before.why) != (aside.standing, aside.why):
            ours = isinstance(error, (OSError, EvalspanError))
            log.warning("%s", self.trouble, exc_info=None if ours else error)

    def _is_gone(self, root: Path) -> bool:
        """Has somebody removed it, and not the storage gone with all that is on it?"""
        try:
            return not Journal.begun(EvaluationPaths(root).journal) and self._lock.there
        except OSError:
            return False

    def _mend(self, now: float) -> None:
        for aside in list(self._asides.by_id.values()):
            if aside.standing in ("refused", "faulty") and now >= aside.due_at:
                self._take_up(aside.root)

    def _end_jobs(self, listing: Sequence[JobState]) -> None:
        """Cancel whatever jobs there are of evaluations that nobody goes on with; forget what was removed when none is."""
        for evaluation_id, aside in list(self._asides.by_id.items()):
            if not aside.ending:
                continue
            prefix = job_prefix(evaluation_id)
            left = {j.job_id for j in listing if j.name.startswith(prefix) and j.phase != "ended"}
            aside.clean = 0 if left else aside.clean + 1
            self.performer.end(evaluation_id, sorted(left))

    def _waiting_asides(self) -> list[Aside]:
        return [aside for aside in self._asides.by_id.values() if aside.open]
