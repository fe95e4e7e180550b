"""Checkpoints that were announced and are no evaluations yet: what each waits for, and which were refused lately.

Rule: `gate.json` in the work folder is written when that changes, for whoever asks (`evalspan status`). Refusals
outlive the daemon in it; nothing is decided by what it says.
It does not know: who is let through.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from coordinator.cluster import ClusterError
from coordinator.errors import RetryError
from coordinator.intake.sources import Delivery, Notice
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

MOST_REFUSED = 20  # that are shown
REFUSED_SECONDS = 7 * 86400.0  # and for so long

# of an OSError: not storage's trouble but the name's
_NO_SUCH_PLACE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


class Waits(Record):
    """A checkpoint that is not taken yet, and what for. `since`: unix seconds of its first notice."""

    checkpoint: str
    suite: str
    since: float
    why: str


class Refused(Record):
    """A checkpoint that was not taken. `at`: unix seconds."""

    checkpoint: str
    suite: str
    at: float
    why: str


class Shown(Record):
    """What `gate.json` holds."""

    schema_version: int = 1
    waiting: tuple[Waits, ...] = ()
    refused: tuple[Refused, ...] = ()


def read(path: Path) -> Shown:
    """What the last daemon said of its gate; nothing where none has said anything, or storage is away."""
    try:
        return Shown.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Shown()


def with_left(shown: Shown, left: Iterable[Delivery], why: str, now: float) -> Shown:
    """`shown` and, of the notices that no daemon has dealt with, those that it does not name. `why`: what they wait for;
    `now`: unix seconds.
    """
    waiting = {(w.checkpoint, w.suite): w for w in shown.waiting}
    for each in left:
        checkpoint, suite, at = each.notice.checkpoint, each.notice.suite, each.notice.noticed_at
        since = at if 0 < at < now else now  # a notice may hold any number
        entry = Waits(checkpoint=checkpoint, suite=suite, since=since, why=each.wrong or why)
        waiting.setdefault((checkpoint, suite), entry)
    return shown.model_copy(update={"waiting": tuple(waiting.values())})


@dataclass(slots=True)
class Gate:
    """A checkpoint that is announced and not dealt with yet."""

    notice: Notice
    since: float
    # of each delivery that told of it
    acknowledge: dict[str, Callable[[], object]] = field(default_factory=dict)
    signature: str = ""
    stable_since: float = 0.0
    why: str = ""  # it is not taken yet
    announced: bool = False  # by whoever saved it, and not merely seen in a watched folder
    own: bool = False  # the user of the daemon, or the settings, named it: it may be any suite and folder

    def add(self, delivery: Delivery) -> None:
        self.announced |= delivery.announced
        self.own |= delivery.own
        self.acknowledge[delivery.key] = delivery.acknowledge
        if delivery.notice.priority > self.notice.priority:
            self.notice = delivery.notice

    def wait(self, why: str) -> None:
        """Its notices are kept; a new reason is said."""
        if why != self.why:
            self.why = why
            log.info("%s is not taken yet: %s", self.notice.checkpoint, why)

    def done(self) -> None:
        """Every delivery of it is dealt with; one that cannot be told so now comes again, to no effect."""
        for acknowledge in self.acknowledge.values():
            with contextlib.suppress(OSError):
                acknowledge()


class Book:
    """Keeps `gate.json` true."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = read(path)
        self._refused = {(r.checkpoint, r.suite): r for r in self._written.refused}

    def refuse(self, notice: Notice, why: str, now: float) -> None:
        key = (notice.checkpoint, notice.suite)
        self._refused.pop(key, None)  # the newest stands last
        self._refused[key] = Refused(checkpoint=notice.checkpoint, suite=notice.suite, at=now, why=why)

    def forgive(self, notice: Notice) -> None:
        """It was taken after all."""
        self._refused.pop((notice.checkpoint, notice.suite), None)

    def write(self, gates: Iterable[Gate], now: float) -> None:
        """Where it has changed. OSError where the disk refuses: the next look tries again."""
        waiting = tuple(
            Waits(checkpoint=g.notice.checkpoint, suite=g.notice.suite, since=g.since, why=g.why)
            for g in gates
            if g.why
        )
        refused = tuple(r for r in self._refused.values() if now - r.at < REFUSED_SECONDS)[-MOST_REFUSED:]
        shown = Shown(waiting=waiting, refused=refused)
        if shown != self._written:
            write_atomic(self._path, shown.model_dump_json(indent=1).encode())
            self._written = shown
            self._refused = {(r.checkpoint, r.suite): r for r in refused}


def may_pass(error: Exception) -> bool:
    """Is it something that is away or not allowed for now, and not the checkpoint's or the settings' own fault?"""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in _NO_SUCH_PLACE
    return isinstance(error, (RetryError, ClusterError))
