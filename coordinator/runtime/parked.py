"""Evaluations that cannot be gone on with just now: why, until when, and when they are given up.

Rule: what goes wrong with one evaluation is that one's fault alone. It is let go of and read back from its journal after
a pause: as long as it takes where the disk or the site refuses what it needs, three times where its journal cannot be read
or the fault is ours. Its jobs go on meanwhile,
since trials pull shards and dump them without us. After that it is given up: its jobs end (they would live for as
long as our lease does), and its folder says why (`fault.json`) until a person asks for it again or another coordinator
starts.
It does not know: how an evaluation is taken up, or its jobs ended.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from coordinator.errors import EvalspanError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.runtime.journal import JournalError
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_record

REFUSED_SECONDS = 2.0  # after which a full disk is tried again; ten times what it takes to read the journal, if that is more
SITE_SECONDS = 30.0  # after which is tried again what a person must change, or what is away
FAULT_SECONDS = (15.0, 60.0, 240.0)
QUIET_SECONDS = 3600.0  # without a fault, after which earlier ones do not count
LOOKS = 2  # at the cluster that show no job of it, after which it has none

Standing = Literal["refused", "faulty", "given-up", "gone"]


class Fault(Record):
    """What `fault.json` says of an evaluation that is set aside. `cancelled`: why somebody wanted it to end."""

    schema_version: int = 1
    evaluation_id: str
    at: float  # unix seconds
    error: str
    given_up: bool
    cancelled: str = ""


@dataclass(slots=True, kw_only=True)
class Aside:
    """One that was set aside. `due_at`: unix seconds of the next try; `clean`: looks that showed none of its jobs."""

    root: Path
    standing: Standing
    why: str
    due_at: float
    record: EvaluationRecord | None
    clean: int = 0
    for_person: bool = False  # what it waits for is a person's to change: nobody is kept up for it

    @property
    def ending(self) -> bool:
        """Nobody goes on with it, and it may have jobs."""
        return self.standing in ("given-up", "gone") and self.clean < LOOKS

    @property
    def open(self) -> bool:
        """Will it be gone on with, or has it jobs to end?"""
        return self.standing in ("refused", "faulty") or self.ending


@dataclass(slots=True)
class Asides:
    """All of a work folder's, by id."""

    by_id: dict[str, Aside] = field(default_factory=dict)
    _faults: dict[str, list[float]] = field(default_factory=dict)

    def put(self, root: Path, error: Exception, now: float, *, seconds: float, gone: bool) -> Aside:
        """Set aside what `error` came of. `seconds`: what reading it back takes; `gone`: its folder has been removed."""
        name, why = root.name, _one_line(error)
        known = self.by_id.get(name)
        record = known.record if known is not None else None
        put = Aside(root=root, standing="refused", why=why, due_at=now, record=record or _record(root))
        self.by_id[name] = put
        if gone:
            put.standing, put.why = "gone", "its folder has been removed"
            self._faults.pop(name, None)
        elif isinstance(error, OSError) or (
            isinstance(error, EvalspanError) and not isinstance(error, JournalError)
        ):
            put.for_person = not isinstance(error, OSError)
            first = SITE_SECONDS if put.for_person else REFUSED_SECONDS
            put.due_at = now + max(first, min(60.0, 10 * seconds))
        else:
            put.for_person = isinstance(error, JournalError)
            self._fault(put, now)
        return put

    def _fault(self, put: Aside, now: float) -> None:
        recent = [at for at in self._faults.get(put.root.name, []) if now - at < QUIET_SECONDS]
        self._faults[put.root.name] = [*recent, now]
        if len(recent) < len(FAULT_SECONDS):
            put.standing, put.due_at = "faulty", now + FAULT_SECONDS[len(recent)]
            note(put, now)
        else:
            self.give_up(put, now)

    def give_up(self, put: Aside, now: float, cancelled: str = "") -> None:
        """Go on with it no more."""
        put.standing, put.clean, put.for_person = "given-up", 0, False
        note(put, now, cancelled)

    def forget(self, evaluation_id: str, *, faults: bool) -> None:
        """It is set aside no more; with `faults`, for a person asked for it: as if it had never been."""
        self.by_id.pop(evaluation_id, None)
        if faults:
            self._faults.pop(evaluation_id, None)


def note(put: Aside, now: float, cancelled: str = "") -> None:
    """Say it in the evaluation's folder, where there is room."""
    fault = Fault(
        evaluation_id=put.root.name,
        at=now,
        error=put.why,
        given_up=put.standing == "given-up",
        cancelled=cancelled,
    )
    with contextlib.suppress(OSError):
        if put.root.is_dir():
            write_record(EvaluationPaths(put.root).fault, fault)


def read_fault(paths: EvaluationPaths) -> Fault | None:
    """Why this evaluation is set aside, if it is."""
    try:
        return Fault.model_validate_json(paths.fault.read_bytes())
    except (OSError, ValidationError):
        return None


def _record(root: Path) -> EvaluationRecord | None:
    try:
        return EvaluationRecord.model_validate_json(EvaluationPaths(root).evaluation.read_bytes())
    except (OSError, ValidationError):
        return None


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    said = text[0][:500] if text else ""
    return (
        said
        if isinstance(error, (OSError, EvalspanError)) and said
        else f"{type(error).__name__}: {said}".rstrip(": ")
    )
