"""Parked evaluations of a work folder: why each cannot go on now, when it is tried again, when it is given up.

Rule: an error in one evaluation's turn parks that evaluation alone. It is read back from its journal after a pause, for
as long as it takes where the disk or the site refuses; at most three times an hour where its journal cannot be read or
our code is at fault. One whose journal is of another format is left alone. Its jobs go on meanwhile, since trials pull shards and dump responses without the coordinator. Then
it is given up: its jobs are cancelled, and its summary says why until `evalspan retry` or a new coordinator.
Called by `coordinator.runtime.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coordinator.errors import EvalspanError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.runtime.journal import JournalError, OtherFormatError
from coordinator.runtime.summary import Parked, of_record, read_evaluation, read_summary, write_summary
from evaljobs.contract.paths import EvaluationPaths

DISK_SECONDS = 2.0  # pause after the disk refused; 10 times the time to read the journal, if that is longer
SITE_SECONDS = 30.0  # pause after an error that a person must repair, or while a service is away
FAULT_SECONDS = (15.0, 60.0, 240.0)  # pauses after the 1st, 2nd and 3rd fault within QUIET_SECONDS
QUIET_SECONDS = 3600.0  # faults older than this do not count
LOOKS = 2  # consecutive job listings without one of its jobs, after which all its jobs have ended

Reason = Literal["refused", "fault", "given-up", "removed"]


@dataclass(slots=True, kw_only=True)
class ParkedEvaluation:
    """One parked evaluation. `until`: unix seconds of the next try; `clean`: listings in a row without its jobs."""

    root: Path
    reason: Reason
    error: str
    until: float
    record: EvaluationRecord | None
    clean: int = 0
    for_person: bool = False  # a person must repair something: `--until-idle` does not wait for it

    @property
    def returns(self) -> bool:
        """Is it tried again without a command?"""
        return self.reason in ("refused", "fault")

    @property
    def ending(self) -> bool:
        """Is it not tried again, and may it still have jobs?"""
        return not self.returns and self.clean < LOOKS

    @property
    def open(self) -> bool:
        """Is it tried again, or may it still have jobs?"""
        return self.returns or self.ending

    def write(self, now: float, cancelled: str = "") -> None:
        """Say so in its summary."""
        until = self.until if self.returns else None
        parked = Parked(at=now, error=self.error, until=until, cancelled=cancelled)
        paths = EvaluationPaths(self.root)
        known = read_summary(paths) or of_record(paths, "")
        write_summary(paths, known.model_copy(update={"parked": parked, "written_at": now}))


@dataclass(slots=True)
class ParkedEvaluations:
    """All parked evaluations of a work folder, by id."""

    by_id: dict[str, ParkedEvaluation] = field(default_factory=dict)
    _faults: dict[str, list[float]] = field(default_factory=dict)  # id -> unix seconds of its faults

    def park(
        self, root: Path, error: Exception, now: float, *, seconds: float, removed: bool
    ) -> ParkedEvaluation:
        """Park an evaluation after `error`. `seconds`: time to read its journal; `removed`: its folder is gone."""
        before = self.by_id.get(root.name)
        record = (before.record if before is not None else None) or read_evaluation(EvaluationPaths(root))
        parked = ParkedEvaluation(
            root=root, reason="refused", error=_one_line(error), until=now, record=record
        )
        self.by_id[root.name] = parked
        if removed:
            parked.reason, parked.error = "removed", "its folder has been removed"
            self._faults.pop(root.name, None)
        elif isinstance(error, OtherFormatError) or (
            isinstance(error, (OSError, EvalspanError)) and not isinstance(error, JournalError)
        ):
            parked.for_person = not isinstance(error, OSError)
            first = SITE_SECONDS if parked.for_person else DISK_SECONDS
            parked.until = now + max(first, min(60.0, 10 * seconds))
            if not isinstance(error, OtherFormatError):  # nothing is written beside such a journal
                parked.write(now)
        else:
            parked.for_person = isinstance(error, JournalError)
            self._fault(parked, now)
        return parked

    def _fault(self, parked: ParkedEvaluation, now: float) -> None:
        recent = [at for at in self._faults.get(parked.root.name, []) if now - at < QUIET_SECONDS]
        self._faults[parked.root.name] = [*recent, now]
        if len(recent) < len(FAULT_SECONDS):
            parked.reason, parked.until = "fault", now + FAULT_SECONDS[len(recent)]
            parked.write(now)
        else:
            self.give_up(parked, now)

    def give_up(self, parked: ParkedEvaluation, now: float, cancelled: str = "") -> None:
        """Try it no more by itself; its jobs are cancelled. `cancelled`: why a person ended it, or ""."""
        parked.reason, parked.clean, parked.for_person = "given-up", 0, False
        parked.write(now, cancelled)

    def forget(self, evaluation_id: str, *, faults: bool) -> None:
        """It is no longer parked. With `faults`, its faults so far no longer count: a person asked for it again."""
        self.by_id.pop(evaluation_id, None)
        if faults:
            self._faults.pop(evaluation_id, None)


def _one_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:500]
    if text and isinstance(error, (OSError, EvalspanError)):
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")
