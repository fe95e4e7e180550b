"""The evaluations of one work folder: accepts, resumes, parks and forgets them, and passes events to them.

Rule: `guarded` is the boundary between evaluations: an error in one evaluation's turn parks that evaluation alone. Its jobs
keep running, its summary says why, and it is read back from its journal after PARKED_SECONDS, for as long as disk or site
refuse. A defect (a damaged journal, an error of our code) is retried MOST_TRIES times. Then the evaluation is given up and
its jobs are cancelled, until `evalspan retry` or a new coordinator. An evaluation whose folder was removed is forgotten.
Journals of ended evaluations are not read again. `coordinator.runtime.loop` decides when each is looked at.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordinator.base import clock
from coordinator.base.disk_space import disk_shortage
from coordinator.base.isolate import isolate_errors, traceback_of
from coordinator.decide.evaluation.events import (
    AnyEvent,
    CancelAsked,
    PauseAsked,
    PriorityAsked,
    ResumeAsked,
    RetryAsked,
)
from coordinator.decide.evaluation.records import EvaluationRecord, job_prefix
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError
from coordinator.intake import places
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.journal import (
    CopiedJournalError,
    Journal,
    JournalError,
    OtherFormatError,
)
from coordinator.runtime.runner import Running
from coordinator.runtime.summary import (
    Parked,
    Summary,
    read_ended_summary,
    read_evaluation,
    read_summary,
    summary_of_record,
    write_summary,
)
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.cluster import ClusterError, JobState
from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)
QUIET_SECONDS = 300.0  # a problem that recurs within this time is not logged again
PARKED_SECONDS = 60.0  # pause of a parked evaluation before its journal is read again
MOST_TRIES = 4  # defects of an evaluation after which it is given up
EMPTY_LISTINGS = 2  # consecutive job listings without any of its jobs, after which all its jobs have ended


@dataclass(slots=True, kw_only=True)
class ParkedEvaluation:
    """An evaluation that cannot continue now. `until`: unix seconds of the next attempt; None: no further attempt by itself."""

    root: Path
    record: EvaluationRecord | None
    error: str = ""
    until: float | None = None
    defect: bool = False  # the fault of its journal or our code, not of disk or site
    for_person: bool = False  # a person must repair something: `--until-idle` does not wait for it
    removed: bool = False  # its folder is gone
    ran: bool = False  # ran in this process
    clean: int = 0  # consecutive listings without any of its jobs

    @property
    def ending(self) -> bool:
        """Whether it is not retried but may still have jobs."""
        return self.until is None and self.clean < EMPTY_LISTINGS

    def write(self, cancelled: str = "") -> None:
        """Record this in its summary. `cancelled`: why a person ended it, or ""."""
        paths, now = EvaluationPaths(self.root), clock.now()
        known = read_summary(paths) or summary_of_record(paths, "")
        parked = Parked(at=now, error=self.error, until=self.until, cancelled=cancelled)
        write_summary(paths, known.model_copy(update={"parked": parked, "written_at": now}))


class Evaluations:
    """The evaluations running in this process, and the parked ones."""

    def __init__(self, performer: Performer, grace: Grace) -> None:
        self.performer = performer
        self.grace = grace
        self.running: dict[str, Running] = {}
        self.trouble: str = ""  # the last error of storage, site or evaluation, for the live screen
        self._seen_at: dict[str, float] = {}  # problem -> when it was last seen, in monotonic seconds
        self.parked: dict[str, ParkedEvaluation] = {}  # by id
        self._defects: Counter[str] = Counter()  # evaluation id -> its number of defects
        self.lock = WorkLock(performer.site.paths.lock)
        performer.fence = self.lock.check

    @property
    def busy(self) -> bool:
        """Whether an evaluation runs, or a parked one will resume by itself or still has jobs. A paused one without jobs waits
        for a person.
        """
        waiting = any(p.ending or not (p.until is None or p.for_person) for p in self.parked.values())
        states = [r.state for r in self.running.values() if r.state.ended_at is None]
        return waiting or any(s.nodes.paused_at is None or s.jobs.live for s in states)

    def records(self) -> list[EvaluationRecord]:
        """Records of all evaluations that have neither ended nor been given up: their checkpoints are needed."""
        parked = [p.record for p in self.parked.values() if p.until is not None and p.record is not None]
        return [r.state.record for r in self.running.values() if r.state.ended_at is None] + parked

    def lost(self, evaluation_id: str) -> str | None:
        """Return why an evaluation was given up, once its jobs have ended too; None while it continues."""
        parked = self.parked.get(evaluation_id)
        return None if parked is None or parked.until is not None or parked.ending else parked.error

    def show_trouble(self, what: str, error: Exception, then: str = "", *, fault: bool = False) -> None:
        """Show a problem and what follows; log it unless it was seen within the last QUIET_SECONDS.

        A full disk is one problem, whatever hits it. `fault`: log the traceback of a bug.
        """
        full = disk_shortage(error, Path(self.performer.site.work_dir))
        self.trouble = f"{full}: free some space, and evaluations continue" if full else what + then
        now, what = time.monotonic(), full.partition(" (")[0] or what
        self._seen_at = {k: at for k, at in self._seen_at.items() if now - at < QUIET_SECONDS}
        if what not in self._seen_at:
            log.warning("%s", self.trouble, exc_info=traceback_of(error) if fault else None)
        self._seen_at[what] = now

    # --- birth and return ----------------------------------------------------------------------------------------

    def accept(self, record: EvaluationRecord) -> Running:
        """Begin an evaluation, or resume it where an earlier coordinator left off."""
        running = self.running.get(record.evaluation_id)
        if running is None:
            paths = self.performer.site.paths.evaluation(record.evaluation_id)
            if paths.journal.exists():
                running = Running.resume(paths.root, self.performer, self.grace)
            running = running or Running.accept(record, self.performer, self.grace)
            self.running[record.evaluation_id] = running
            running.write_summary()  # one that was given up no longer is
        # `record` is as requested now, perhaps with a copy of the checkpoint
        places.record_place(
            running.paths, running.state.record.checkpoint.announced, record.checkpoint.announced
        )
        return running

    def accept_or_wait(self, record: EvaluationRecord) -> Running | None:
        """Accept a record; None if the evaluation has begun and cannot be resumed now, so that it is parked."""
        paths = self.performer.site.paths.evaluation(record.evaluation_id)
        parked = self.parked.get(record.evaluation_id)
        if parked is not None and parked.until is not None:
            return None
        self._unpark(record.evaluation_id)  # if it was given up, a person asks for it again
        try:
            return self.accept(record)
        except Exception as error:
            if not Journal.begun(paths.journal):
                raise
            self._park(paths.root, error)
            return None

    def resume_all(self) -> None:
        """Resume every evaluation of the work folder that has not ended; journals of ended ones are not read."""
        converted: set[str] = set()
        began = time.time()
        for journal in sorted(Path(self.performer.site.work_dir).glob("*/journal.jsonl")):
            paths = EvaluationPaths(journal.parent)
            if (found := read_ended_summary(paths)) is None:
                self.resume(journal.parent)
                continue
            if found.written_at >= began:  # derived from a journal of another format
                write_summary(paths, found)
            if found.converted_digest is not None:
                converted.add(found.converted_digest)
        for digest in converted:
            self.clear_converted(digest)

    def resume(self, root: Path) -> None:
        """Resume from the journal of an earlier coordinator or of this one; an error parks the evaluation."""
        parked = self.parked.get(root.name)
        with isolate_errors(partial(self._park, root)):
            if parked is not None and not Journal.begun(EvaluationPaths(root).journal):
                raise FileNotFoundError(errno.ENOENT, "its journal is missing", str(root))
            try:
                ran_here = parked is not None and parked.ran
                running = Running.resume(root, self.performer, self.grace, ran_here=ran_here)
            except CopiedJournalError as error:  # jobs of this name belong to the evaluation that was copied
                log.warning("%s", error)
                return
            if running is None:
                return
            before = read_summary(running.paths)
            running.write_summary()
            self.parked.pop(root.name, None)
            if running.state.ended_at is not None and parked is None:  # no command waits for its end
                running.journal.close()
                self.clear_converted(running.state.converted_digest)
                return
            self.running[root.name] = running
            if before is not None and before.parked is not None and before.parked.cancelled:
                self.tell(root.name, CancelAsked(at=clock.now(), reason=before.parked.cancelled))

    def _unpark(self, evaluation_id: str) -> None:
        """Unpark an evaluation and forget its defects."""
        self.parked.pop(evaluation_id, None)
        self._defects.pop(evaluation_id, None)

    # --- requests of users ------------------------------------------------------------------------------------------

    def cancel(self, evaluation_id: str, reason: str) -> None:
        """Cancel an evaluation. Raise OSError if that cannot be journalled now (retry later), KeyError if it is unknown."""
        parked = self.parked.get(evaluation_id)
        if parked is not None and parked.defect:
            self.resume(parked.root)
            parked = self.parked.get(evaluation_id)
        if parked is not None and (parked.defect or parked.removed):  # `end_jobs` cancels its jobs
            self._give_up(parked, reason)
            return
        self._ask(evaluation_id, CancelAsked(at=clock.now(), reason=reason))

    def retry(self, evaluation_id: str) -> None:
        """Retry what failed in an evaluation. Raise OSError and KeyError like `cancel`, or KeyError for a defect."""
        parked = self.parked.get(evaluation_id)
        if parked is not None and (parked.defect or parked.removed):
            raise KeyError(f"{evaluation_id}: {parked.error}")
        if parked is not None:
            raise OSError(errno.EAGAIN, f"{evaluation_id} is parked: {parked.error}")
        running = self.running[evaluation_id]
        running.make_folders()
        for note in running.paths.verdicts.glob("*.hand"):  # items that killed their process may run again
            note.unlink(missing_ok=True)
        self._ask(evaluation_id, RetryAsked(at=clock.now(), gone=running.gone()))

    def pause(self, evaluation_id: str, reason: str) -> None:
        """Take its nodes from it until `unpause`. OSError and KeyError as of `cancel`."""
        self._ask(evaluation_id, PauseAsked(at=clock.now(), reason=reason))

    def unpause(self, evaluation_id: str) -> None:
        """Let it use nodes again. OSError and KeyError as of `cancel`."""
        self._ask(evaluation_id, ResumeAsked(at=clock.now()))

    def prioritize(self, evaluation_id: str, priority: int) -> None:
        """Change an evaluation's priority. Raise OSError and KeyError like `cancel`."""
        self._ask(evaluation_id, PriorityAsked(at=clock.now(), priority=priority))

    def _ask(self, evaluation_id: str, event: AnyEvent) -> None:
        """Pass on a user's request. Raise OSError if the evaluation is parked, also by this event: it may be in the journal
        already, and repeating it is harmless.
        """
        if evaluation_id not in self.parked and evaluation_id not in self.running:
            raise KeyError(evaluation_id)
        self.tell(evaluation_id, event)
        if evaluation_id not in self.running:
            raise OSError(errno.EAGAIN, f"{evaluation_id} is parked: it is asked again later")

    def revive(self, evaluation_id: str) -> None:
        """Resume an evaluation, even one that has ended or was given up. Raise KeyError if unknown, OSError, or JournalError."""
        if evaluation_id in self.running:
            return
        root = self.performer.site.paths.evaluation(evaluation_id).root
        if (parked := self.parked.get(evaluation_id)) is not None:
            if parked.defect or parked.removed:
                self._unpark(evaluation_id)
                self.resume(root)
            return
        there = (root / "journal.jsonl").exists()
        running = Running.resume(root, self.performer, self.grace) if there else None
        if running is None:
            raise KeyError(evaluation_id)
        self.running[evaluation_id] = running

    def summaries(self) -> list[Summary]:
        """Summaries of running evaluations, and of those that ended since the last turn."""
        now = clock.now()
        found: list[Summary] = []
        for name in tuple(self.running):
            self.guarded(name, lambda r: found.append(r.summary(now)))
        return found

    def write_summaries(self) -> None:
        """Write summaries as this process leaves the evaluations."""
        for name in tuple(self.running):
            self.guarded(name, Running.write_summary)

    def states(self) -> list[State]:
        return [running.state for running in self.running.values()]

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files of all evaluations. The process may live on, but this coordinator is not used again."""
        for evaluation_id, running in self.running.items():
            running.journal.close()
            self.performer.forget(evaluation_id)
        self.running.clear()

    def forget_ended(self) -> None:
        """Free the memory and files of ended evaluations, since a daemon lives for months."""
        for evaluation_id, running in list(self.running.items()):
            if running.state.ended_at is not None:
                # otherwise readers would replay its journal
                self.guarded(evaluation_id, Running.write_summary)
                running.journal.close()
                self.running.pop(evaluation_id, None)
                # again: what its last trials wrote after the results would stay in Redis
                self.performer.remove_queues(evaluation_id, logging.DEBUG)
                self.performer.forget(evaluation_id)
                self._unpark(evaluation_id)
        for evaluation_id, parked in list(self.parked.items()):
            if parked.removed and not parked.ending:
                self._unpark(evaluation_id)

    def clear_converted(self, digest: str | None) -> None:
        """Remove the converted checkpoint of an ended evaluation, unless another evaluation needs it or may resume."""
        needed = any(s.converted_digest == digest for s in self.states() if s.ended_at is None)
        if digest is None or needed or any(p.until or p.ending for p in self.parked.values()):
            return
        folder = self.performer.site.paths.converted
        with suppress(OSError):
            for left in folder.glob(f"{digest}*") if folder.is_dir() else ():
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)

    # --- the boundary --------------------------------------------------------------------------------------------

    def guarded(self, evaluation_id: str, what: Callable[[Running], object]) -> None:
        """Call `what` with a running evaluation. After an error its state may be half-changed, so it is dropped, and the
        evaluation is parked until it is read back from its journal. An unreachable cluster does not park it.
        """
        running = self.running.get(evaluation_id)
        if running is not None:
            with isolate_errors(partial(self._failed, running)):
                what(running)

    def _failed(self, running: Running, error: Exception) -> None:
        if isinstance(error, ClusterError):
            self.show_trouble(str(error), error)
            return
        running.journal.close()
        del self.running[running.state.evaluation_id]
        self._park(running.paths.root, error, ran=True)

    def tell(self, evaluation_id: str, event: AnyEvent) -> None:
        """Pass an event on, except to a parked evaluation: a later look finds the cause again."""
        self.guarded(evaluation_id, lambda r: r.take([event]))

    def _park(self, root: Path, error: Exception, *, ran: bool = False) -> None:
        """Park an evaluation after `error`, or give it up."""
        name = root.name
        parked = self.parked.get(name) or ParkedEvaluation(
            root=root, record=read_evaluation(EvaluationPaths(root))
        )
        self.parked[name] = parked
        parked.ran |= ran
        parked.error, parked.clean = _one_line(error), 0
        parked.removed = self._is_removed(root)
        other = isinstance(error, OtherFormatError)
        site = isinstance(error, (OSError, EvalspanError)) and not isinstance(error, JournalError)
        parked.defect = not (other or site or parked.removed)
        parked.for_person = isinstance(error, EvalspanError)
        parked.until = clock.now() + PARKED_SECONDS
        self._defects[name] += parked.defect
        then = f"parked; trying again every {PARKED_SECONDS:.0f} s"
        if parked.removed:
            parked.error, parked.until = "its folder has been removed", None
            then = "forgotten, and its jobs end"
        elif parked.defect and self._defects[name] >= MOST_TRIES:
            self._give_up(parked)
            then = f"given up, and its jobs end: `evalspan retry {name}` once it is repaired"
        elif not other:  # nothing is written beside such a journal
            parked.write()
        self.show_trouble(f"{name}: {parked.error}; {then}", error, fault=True)

    def _give_up(self, parked: ParkedEvaluation, cancelled: str = "") -> None:
        """Stop retrying it: `end_jobs` cancels its jobs. `cancelled`: why a person ended it, or ""."""
        parked.until, parked.clean = None, 0
        if not parked.removed:
            parked.write(cancelled)

    def _is_removed(self, root: Path) -> bool:
        """Return whether its folder was removed while the work folder's storage answers."""
        try:
            return not Journal.begun(EvaluationPaths(root).journal) and self.lock.there
        except OSError:
            return False

    def return_parked(self, now: float) -> None:
        for parked in list(self.parked.values()):
            if parked.until is not None and now >= parked.until:
                self.resume(parked.root)

    def end_jobs(self, listing: Sequence[JobState]) -> None:
        """Cancel all jobs of evaluations that were given up or removed."""
        for evaluation_id, parked in list(self.parked.items()):
            if not parked.ending:
                continue
            prefix = job_prefix(evaluation_id)
            left = {j.job_id for j in listing if j.name.startswith(prefix) and j.phase != "ended"}
            parked.clean = 0 if left else parked.clean + 1
            if left:
                self.performer.cancel(sorted(left))
            else:
                self.performer.remove_queues(evaluation_id)
                self.performer.forget(evaluation_id)


def _one_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:500]
    if text and isinstance(error, (OSError, EvalspanError)):
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")
