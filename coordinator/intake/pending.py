"""Pending checkpoints: announced but not yet accepted, each with its reason.

Rule: `pending.json` in the work folder is written on changes, for `evalspan status`; no decision depends on it.
`coordinator.runtime.service` decides what is accepted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from coordinator.base.words import one_line
from coordinator.errors import RetryError
from coordinator.intake.inbox import InboxFile, Notice, RefusedCheckpoint, read_refusals
from coordinator.site.cluster import ClusterError
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import find_record, write_record

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # pending checkpoints in the file: the oldest ones

# errors of a path that does not exist or cannot; any other OSError is a storage error that may pass
_NO_SUCH_PLACE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


class WaitingCheckpoint(StateRecord):
    """A checkpoint that is not yet accepted, and why. `since`: unix seconds of its first notice.

    `evaluation_id`: printed by `submit`, "" if announced otherwise.
    """

    checkpoint: str
    suite: str
    since: float
    why: str
    evaluation_id: str = ""


class PendingCheckpoints(StateRecord):
    """Contents of `pending.json`: checkpoints not yet accepted. As returned by `read_pending`, also those refused within a week."""

    schema_version: int = 1
    waiting: tuple[WaitingCheckpoint, ...] = ()
    refused: tuple[RefusedCheckpoint, ...] = Field(default=(), exclude=True)


def read_pending(paths: WorkPaths, now: float) -> PendingCheckpoints:
    """Read the checkpoints as the last daemon left them. `now`: unix seconds."""
    found = find_record(paths.pending, PendingCheckpoints) or PendingCheckpoints()
    return found.model_copy(update={"refused": read_refusals(paths, now)})


def waits_for_daemon(holder: str, daemon: str = "evalspan daemon") -> str:
    """Return what a submission waits for. `holder`: holds the work folder; "": none. `daemon`: the command to start one."""
    if not holder:
        return f"no daemon runs for this work folder; to start one: `{daemon}`"
    return (
        f"no daemon runs for this work folder, and none can start before {holder}, ends; "
        f"to start one then: `{daemon} --wait`"
    )


def with_unread(
    known: PendingCheckpoints, unread: Iterable[InboxFile], why: str, now: float
) -> PendingCheckpoints:
    """Return `known` with the inbox files that it does not name. `why`: what they wait for; `now`: unix seconds."""
    waiting = {(w.checkpoint, w.suite): w for w in known.waiting}
    for file in unread:
        at = file.notice.noticed_at  # a notice may contain any number
        each = PendingCheckpoint(since=at if 0 < at < now else now, why=file.wrong or why, files=[file])
        waiting.setdefault((file.notice.checkpoint, file.notice.suite), each.shown())
    return known.model_copy(update={"waiting": tuple(waiting.values())})


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was announced and is neither accepted nor refused yet."""

    since: float  # unix seconds
    files: list[InboxFile]  # its notices, oldest first
    why: str = ""  # why it is not accepted yet
    looked_at: float = float("-inf")  # unix seconds
    signature: str = ""  # digest of its files at the last look
    stable_since: float = 0.0  # unix seconds

    @property
    def notice(self) -> Notice:
        """The first notice of the highest priority."""
        return max((file.notice for file in self.files), key=lambda notice: notice.priority)

    @property
    def announced(self) -> bool:
        """Whether a process announced it as saved. False: it was only found in a watched folder."""
        return not all(file.notice.seen for file in self.files)

    @property
    def member(self) -> str:
        """Return FILE of USER if only members of the group left it; "" if this user did."""
        last = self.files[-1]
        return one_line(f"{last.path} of {last.member}") if all(file.member for file in self.files) else ""

    def wait(self, why: str) -> None:
        """Keep its files; log the reason if it is new."""
        if why != self.why:
            self.why = why
            log.info("%s is not accepted yet: %s", self.notice.checkpoint, why)

    def shown(self) -> WaitingCheckpoint:
        named = [file.notice.evaluation_id for file in self.files if file.notice.evaluation_id]
        return WaitingCheckpoint(
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
        self._last = find_record(path, PendingCheckpoints)

    def write(self, pending: Iterable[PendingCheckpoint]) -> None:
        """Write the file if it has changed. Raise OSError if the disk refuses; the next look tries again."""
        waiting = tuple(p.shown() for p in sorted(pending, key=lambda p: p.since) if p.why)
        current = PendingCheckpoints(waiting=waiting[:MOST_WAITING])
        if current != self._last:
            write_record(self._path, current)
            self._last = current


def may_pass(error: Exception) -> bool:
    """Return whether storage or the site is temporarily unavailable. False: the checkpoint or the settings are wrong."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in _NO_SUCH_PLACE
    return isinstance(error, (RetryError, ClusterError))
