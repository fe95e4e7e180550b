"""The journal of an evaluation: append-only, fsynced, one writer, replayed on start.

Rule: an event is on disk before its actions begin. A torn last line (a crash during a write) is truncated before the next
write. Any other unreadable line is a JournalError, since without it the state would be wrong. A journal of an
earlier format (`JOURNAL_FORMAT`) is read through `UPCASTS`; one out of their reach is an OtherFormatError: it is left
unchanged, and its evaluation is not resumed. A coordinator that resumes a journal copies it to a new file of the present
format first (`renew`), and acts on what it wrote only if the work folder is still its own.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.events import EVENT, Accepted, AnyEvent
from coordinator.decide.evaluation.records import JOURNAL_FORMAT, job_prefix
from coordinator.decide.evaluation.state import IllegalEventError, State
from coordinator.errors import OperatorError
from coordinator.runtime.upcasts import UPCASTS
from coordinator.runtime.work_lock import take_lock
from evaljobs.contract.storage import make_file, write_atomic

log = logging.getLogger(__name__)


class JournalError(OperatorError):
    """A journal with a line that this version cannot read: left unchanged until a person acts."""


class OtherFormatError(JournalError):
    """A journal of another format: the evaluation and its jobs are left alone."""


class UnreadableEventError(ValueError):
    """An event that could not be read back from a journal."""


class CopiedJournalError(JournalError):
    """A journal copied from another folder: two copies of one evaluation would do everything twice."""


class Journal:
    """Events of one evaluation in `journal.jsonl`, one JSON object per line. While open it holds the lock of `exclude_coordinators`."""

    def __init__(self, path: Path, fence: Callable[[], None] = lambda: None) -> None:
        """Take a `fence` that raises once another coordinator has taken over (`WorkLock.check`)."""
        self.path = path
        self._fence = fence
        self.last_at = 0.0  # latest time of an event read by `replay`, in unix seconds
        # checked before the first write: a journal of another format stays unchanged
        self._may_be_torn = True
        self._fd = _opened(path)

    def renew(self) -> None:
        """Continue in a new file, so that late writes of an earlier coordinator to the old one are not part of the journal. The
        complete lines of a journal of an earlier format are converted to the present one. Raise OSError if that fails.
        """
        check_format(self.path)
        number = _format_of(self.path)
        whole = self.path.read_bytes()
        if number != JOURNAL_FORMAT:
            lines = enumerate(_whole_lines(self.path), start=1)
            whole = b"".join(line_of(_event(line, f"{self.path}:{at}", number)) for at, line in lines)
        write_atomic(self.path, whole)
        old, self._fd = self._fd, _opened(self.path)
        os.close(old)

    @staticmethod
    def begun(path: Path) -> bool:
        """Return whether the journal has a complete line. A torn first line is nothing to resume."""
        with suppress(FileNotFoundError), path.open("rb") as file:
            return file.readline().endswith(b"\n")
        return False

    def append(self, events: Iterable[AnyEvent]) -> None:
        """Write all `events` and fsync once, then sign. On OSError (a full disk) none of them remains; on
        UnreadableEventError nothing is written; on TakenOverError none of them may be acted upon.
        """
        events = list(events)
        data = b"".join(map(line_of, events))
        if not data:
            return
        self._fence()
        if self._may_be_torn:
            self._cut_torn_tail()
            self._may_be_torn = False
        end = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, end)
            error.filename = str(self.path)
            raise
        self._fence()  # this process may have been suspended between the first look and the write
        self.sign(max(event.at for event in events))  # a write sets the mtime by the file server's clock

    def replay(self) -> Iterator[AnyEvent]:
        """Yield all events so far. Raise JournalError, which names the line, if one cannot be read."""
        for event in read_events(self.path):
            self.last_at = max(self.last_at, event.at)
            yield event

    def sign(self, at: float) -> None:
        """Record that a coordinator runs the evaluation at `at` (unix seconds) as the file's mtime. Disk errors are ignored."""
        with suppress(OSError):
            os.utime(self._fd, (at, at))

    def close(self) -> None:
        os.close(self._fd)

    def _cut_torn_tail(self) -> None:
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            chunk = os.pread(self._fd, end - start, start)
            newline = chunk.rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)


def _opened(path: Path) -> int:
    fd = make_file(path, os.O_RDWR | os.O_APPEND)
    if not take_lock(fd, shared=True):
        os.close(fd)
        raise BlockingIOError(errno.EAGAIN, "its files are being archived or pruned: try again", str(path))
    return fd


@contextmanager
def exclude_coordinators(path: Path) -> Iterator[None]:
    """Lock an ended evaluation with the journal `path`, so that no coordinator resumes it while its files are changed.

    Raise BlockingIOError if a coordinator has it or another process works on its files; OSError.
    """
    fd = os.open(path, os.O_RDWR)  # NFS only grants an exclusive lock on a file open for writing
    try:
        if not (take_lock(fd, wait=0.0) and os.path.samestat(os.fstat(fd), path.stat())):
            raise BlockingIOError(errno.EAGAIN, "a coordinator goes on with it", str(path))
        yield
    finally:
        os.close(fd)


def line_of(event: AnyEvent) -> bytes:
    """Return an event as a line of the journal. Raise UnreadableEventError if that line could not be read back."""
    try:
        line = EVENT.dump_json(event)
        EVENT.validate_json(line)
    except ValueError as error:
        what = str(error).replace("\n", " ")[:200]
        raise UnreadableEventError(f"{event.kind} cannot be kept in a journal: {what}") from error
    return line + b"\n"


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield all complete events of a journal, also while another process is writing it. Raise JournalError for a bad line."""
    check_format(path)
    written_in = _format_of(path)
    for number, line in enumerate(_whole_lines(path), start=1):
        yield _event(line, f"{path}:{number}", written_in)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), lines)


def _event(line: bytes, where: str, written_in: int) -> AnyEvent:
    try:
        return EVENT.validate_json(line if written_in == JOURNAL_FORMAT else _upcast(line, written_in))
    except (ValueError, KeyError, TypeError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        what = what.partition(" does not match")[0][:200]
        raise JournalError(
            f"{where} is not an event of this version ({what}); move the folder away to start over"
        ) from error


def _upcast(line: bytes, written_in: int) -> bytes:
    """A line of an earlier format as one of the present format."""
    event = json.loads(line)
    for number in range(written_in, JOURNAL_FORMAT):
        event = UPCASTS[number](event)
    if event["kind"] == "accepted":
        event["journal_format"] = JOURNAL_FORMAT
    return json.dumps(event).encode()


def has_other_format(path: Path) -> bool:
    """Return whether the journal's format cannot be read; False if it has no first event."""
    number = _format_of(path)
    return number > JOURNAL_FORMAT or any(n not in UPCASTS for n in range(number, JOURNAL_FORMAT))


def _format_of(path: Path) -> int:
    return int(_first(path).get("journal_format", 0))


def _first(path: Path) -> dict[str, Any]:
    """Return the first event of a journal of any format; an empty one of this format if it has none."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        event = json.loads(file.readline())
        if isinstance(event, dict) and event.get("kind") == "accepted":
            return event
    return {"journal_format": JOURNAL_FORMAT}


def check_format(path: Path) -> None:
    """Raise OtherFormatError, with the commands to type, if the journal has another format."""
    if not has_other_format(path):
        return
    first, name = _first(path), path.parent.name
    record = first.get("record", {})
    source = record.get("checkpoint", {}).get("source", "CHECKPOINT")
    suite = record.get("suite", {}).get("name", "SUITE")
    raise OtherFormatError(
        f"{name} was begun by {first.get('code') or 'another version of evalspan'} (journal format "
        f"{first.get('journal_format', 0)}, here {JOURNAL_FORMAT}), and nothing of it is changed here: to end its jobs, type "
        f"`scancel $(squeue --me --noheader -o '%A %j' | grep ' {job_prefix(name)}' | cut -d' ' -f1)`; to evaluate again, "
        f"move {path.parent} away and type `evalspan submit {shlex.quote(source)} --suite {shlex.quote(suite)}`"
    )


def replayed_state(events: Iterable[AnyEvent]) -> State | None:
    """Return the state that a journal's events lead to; None if the first is not `Accepted`."""
    left = iter(events)
    first = next(left, None)
    if not isinstance(first, Accepted):
        return None
    state, _ = machine.start_evaluation(first)
    replay_on(state, left)
    return state


def replay_on(state: State, events: Iterable[AnyEvent]) -> None:
    """Apply further events of a journal. Illegal ones are skipped, as by the coordinator that wrote them."""
    with _collector_paused():
        for event in events:
            try:
                machine.apply_event(state, event)
            except IllegalEventError as error:
                log.warning("%s: skipped an illegal %s: %s", state.evaluation_id, event.kind, error)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection: a replay creates a million lasting objects, and scanning them would take a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
