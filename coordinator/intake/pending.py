"""Pending checkpoints: announced and not accepted yet, each with its reason; and those refused lately.

Rule: `pending.json` in the work folder is written when this changes, for `evalspan status`. Nothing is decided by it;
refusals in it outlive the daemon. `coordinator.runtime.service` decides what is accepted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from coordinator.cluster import ClusterError
from coordinator.errors import RetryError
from coordinator.intake.sources import Delivery, Notice
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_record

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # pending checkpoints in the file: the oldest ones, those of submissions first
MOST_COPIES = 100  # notices of one checkpoint that are kept until it is accepted
MOST_REFUSED = 20  # refused checkpoints in the file: the last ones
REFUSED_SECONDS = 7 * 86400.0  # a refusal stays in the file for so long

# errors of a path that does not exist or cannot; every other OSError is storage's and may pass
_NO_SUCH_PLACE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


class Waiting(Kept):
    """A checkpoint that is not accepted yet, and why. `since`: unix seconds of its first notice.

    `evaluation_id`: what `submit` printed, "" where another way announced it.
    """

    checkpoint: str
    suite: str
    since: float
    why: str
    evaluation_id: str = ""


class Refused(Kept):
    """A checkpoint that was refused. `at`: unix seconds."""

    checkpoint: str
    suite: str
    at: float
    why: str


class PendingFile(Kept):
    """`pending.json`. `unsigned`: notices without a signature that were refused; `unsigned_at`: the last one, unix seconds."""

    schema_version: int = 1
    waiting: tuple[Waiting, ...] = ()
    refused: tuple[Refused, ...] = ()
    unsigned: int = 0
    unsigned_at: float = 0.0


def read(path: Path) -> PendingFile:
    """What the last daemon wrote; empty where there is no file, or storage is away."""
    try:
        return PendingFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return PendingFile()


def waits_for_daemon(holder: str, daemon: str = "evalspan daemon") -> str:
    """What a submission waits for. `holder`: the command that has the work folder; "": none. `daemon`: as it is typed."""
    if not holder:
        return f"no daemon runs for this work folder; to start one: `{daemon}`"
    return (
        f"no daemon runs for this work folder, and none can start before {holder}, ends; "
        f"to start one then: `{daemon} --wait`"
    )


def with_unread(known: PendingFile, unread: Iterable[Delivery], why: str, now: float) -> PendingFile:
    """`known` and the notices in the work folder that it does not name. `why`: what they wait for; `now`: unix seconds."""
    waiting = {(w.checkpoint, w.suite): w for w in known.waiting}
    for each in unread:
        checkpoint, suite, at = each.notice.checkpoint, each.notice.suite, each.notice.noticed_at
        since = at if 0 < at < now else now  # a notice may hold any number
        entry = Waiting(
            checkpoint=checkpoint,
            suite=suite,
            since=since,
            why=each.wrong or why,
            evaluation_id=each.evaluation_id,
        )
        waiting.setdefault((checkpoint, suite), entry)
    return known.model_copy(update={"waiting": tuple(waiting.values())})


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was announced and is neither accepted nor refused yet."""

    notice: Notice
    since: float  # unix seconds
    acknowledge: dict[str, Callable[[], object]] = field(default_factory=dict)  # by the key of each delivery
    signature: str = ""  # digest of its files at the last look
    stable_since: float = 0.0  # unix seconds
    why: str = ""  # it is not accepted yet
    announced: bool = False  # by the process that saved it; False: only seen in a watched folder
    own: bool = False  # named by the daemon's own user or its settings: any suite and folder is allowed
    evaluation_id: str = ""  # what `submit` printed
    member: str = ""  # "FILE of USER", where a member of the group left it

    @property
    def withdrawn(self) -> bool:
        """Were all its notices files, and is none of them left? Storage that is away brings it again."""
        return bool(self.acknowledge) and not any(
            not Path(key).is_absolute() or os.path.exists(key)  # noqa: PTH110 (a stale handle raises)
            for key in self.acknowledge
        )

    def add(self, delivery: Delivery) -> None:
        self.announced |= delivery.announced
        self.own |= delivery.own
        self.evaluation_id = delivery.evaluation_id or self.evaluation_id
        if len(self.acknowledge) < MOST_COPIES:
            self.acknowledge[delivery.key] = delivery.acknowledge
        elif delivery.key not in self.acknowledge:  # the others bring it again
            delivery.acknowledge()
        if delivery.member:
            self.member = f"{delivery.key} of {delivery.member}"
        if delivery.notice.priority > self.notice.priority:
            self.notice = delivery.notice

    def wait(self, why: str) -> None:
        """Keep its notices; log the reason where it is a new one."""
        if why != self.why:
            self.why = why
            log.info("%s is not taken yet: %s", self.notice.checkpoint, why)

    def done(self) -> None:
        """Acknowledge every delivery of it; one that cannot be acknowledged now comes again, to no effect."""
        for acknowledge in self.acknowledge.values():
            with contextlib.suppress(OSError):
                acknowledge()


class PendingWriter:
    """Writes `pending.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = read(path)
        self._refused = {(r.checkpoint, r.suite): r for r in self._written.refused}
        self._unsigned, self._unsigned_at = self._written.unsigned, self._written.unsigned_at

    def refuse_unsigned(self, now: float) -> int:
        """Count a notice whose words nothing vouches for, and keep none of them; the count so far."""
        self._unsigned, self._unsigned_at = self._unsigned + 1, now
        return self._unsigned

    def refuse(self, notice: Notice, why: str, now: float) -> None:
        key = (notice.checkpoint, notice.suite)
        self._refused.pop(key, None)  # the newest is the last one
        self._refused[key] = Refused(checkpoint=notice.checkpoint, suite=notice.suite, at=now, why=why)

    def accept(self, notice: Notice) -> None:
        """Drop an earlier refusal of it."""
        self._refused.pop((notice.checkpoint, notice.suite), None)

    def write(self, pending: Iterable[PendingCheckpoint], now: float) -> None:
        """Write the file where it has changed. OSError where the disk refuses: the next look tries again."""
        waiting = tuple(
            Waiting(
                checkpoint=p.notice.checkpoint,
                suite=p.notice.suite,
                since=p.since,
                why=p.why,
                evaluation_id=p.evaluation_id,
            )
            for p in sorted(pending, key=lambda p: (not p.own, p.since))
            if p.why
        )[:MOST_WAITING]
        refused = tuple(r for r in self._refused.values() if now - r.at < REFUSED_SECONDS)[-MOST_REFUSED:]
        if now - self._unsigned_at >= REFUSED_SECONDS:
            self._unsigned, self._unsigned_at = 0, 0.0
        current = PendingFile(
            waiting=waiting,
            refused=refused,
            unsigned=self._unsigned,
            unsigned_at=self._unsigned_at,
        )
        if current != self._written:
            write_record(self._path, current)
            self._written = current
            self._refused = {(r.checkpoint, r.suite): r for r in refused}


def may_pass(error: Exception) -> bool:
    """Is storage or the site away or closed for now? False: the checkpoint or the settings are wrong."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in _NO_SUCH_PLACE
    return isinstance(error, (RetryError, ClusterError))
