"""Pending checkpoints: announced and not accepted yet, each with its reason.

Rule: `pending.json` in the work folder is written when this changes, for `evalspan status`. Nothing is decided by it.
`coordinator.runtime.service` decides what is accepted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from coordinator.base.words import one_line
from coordinator.cluster import ClusterError
from coordinator.errors import RetryError
from coordinator.intake.inbox import InboxFile, Notice, Refused, refusals
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_record

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # pending checkpoints in the file: the oldest ones

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


class Checkpoints(Kept):
    """`pending.json`: checkpoints that are not accepted yet. As `read`, also those that were refused within a week."""

    schema_version: int = 1
    waiting: tuple[Waiting, ...] = ()
    refused: tuple[Refused, ...] = Field(default=(), exclude=True)


def read(paths: WorkPaths, now: float) -> Checkpoints:
    """As the last daemon left them. `now`: unix seconds."""
    return _written(paths.pending).model_copy(update={"refused": refusals(paths, now)})


def _written(path: Path) -> Checkpoints:
    """Empty where there is no file, or storage is away."""
    try:
        return Checkpoints.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Checkpoints()


def waits_for_daemon(holder: str, daemon: str = "evalspan daemon") -> str:
    """What a submission waits for. `holder`: the command that has the work folder; "": none. `daemon`: as it is typed."""
    if not holder:
        return f"no daemon runs for this work folder; to start one: `{daemon}`"
    return (
        f"no daemon runs for this work folder, and none can start before {holder}, ends; "
        f"to start one then: `{daemon} --wait`"
    )


def with_unread(known: Checkpoints, unread: Iterable[InboxFile], why: str, now: float) -> Checkpoints:
    """`known` and the files of the inbox that it does not name. `why`: what they wait for; `now`: unix seconds."""
    waiting = {(w.checkpoint, w.suite): w for w in known.waiting}
    for file in unread:
        at = file.notice.noticed_at  # a notice may hold any number
        each = PendingCheckpoint(since=at if 0 < at < now else now, why=file.wrong or why, files=[file])
        waiting.setdefault((file.notice.checkpoint, file.notice.suite), each.shown())
    return known.model_copy(update={"waiting": tuple(waiting.values())})


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was announced and is neither accepted nor refused yet."""

    since: float  # unix seconds
    files: list[InboxFile]  # that announce it, oldest first
    why: str = ""  # it is not accepted yet
    looked_at: float = float("-inf")  # unix seconds
    signature: str = ""  # digest of its files at the last look
    stable_since: float = 0.0  # unix seconds

    @property
    def notice(self) -> Notice:
        """The first one of the highest priority."""
        return max((file.notice for file in self.files), key=lambda notice: notice.priority)

    @property
    def announced(self) -> bool:
        """Did a process say that it is saved? False: it was only seen in a watched folder."""
        return not all(file.notice.seen for file in self.files)

    @property
    def member(self) -> str:
        """FILE of USER, where members of the group alone left it; "" where this user did."""
        last = self.files[-1]
        return one_line(f"{last.path} of {last.member}") if all(file.member for file in self.files) else ""

    def wait(self, why: str) -> None:
        """Keep its files; log the reason where it is a new one."""
        if why != self.why:
            self.why = why
            log.info("%s is not taken yet: %s", self.notice.checkpoint, why)

    def shown(self) -> Waiting:
        named = [file.notice.evaluation_id for file in self.files if file.notice.evaluation_id]
        return Waiting(
            checkpoint=self.notice.checkpoint,
            suite=self.notice.suite,
            since=self.since,
            why=self.why,
            evaluation_id=named[-1] if named else "",
        )


class PendingWriter:
    """Writes `pending.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = _written(path)

    def write(self, pending: Iterable[PendingCheckpoint]) -> None:
        """Write the file where it has changed. OSError where the disk refuses: the next look tries again."""
        waiting = tuple(p.shown() for p in sorted(pending, key=lambda p: p.since) if p.why)
        current = Checkpoints(waiting=waiting[:MOST_WAITING])
        if current != self._last:
            write_record(self._path, current)
            self._last = current


def may_pass(error: Exception) -> bool:
    """Is storage or the site away or closed for now? False: the checkpoint or the settings are wrong."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in _NO_SUCH_PLACE
    return isinstance(error, (RetryError, ClusterError))
