"""Reads notices of checkpoints from the hook's stream, spool folder, submissions and watched folders.

Rule: delivery is at least once, and every source gives the same `Notice`. An evaluation's id is a
function of its content, so a checkpoint announced a hundred times is evaluated once. A notice is
acknowledged only after it was accepted or refused for good. Other users may write to the stream and
the spool folder: only the user's submissions folder and watched folders give `own` notices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.isolate import LoopGuard
from coordinator.base.listing import Listing
from coordinator.errors import OperatorError
from coordinator.hook import PIN_PREFIX, STREAM
from coordinator.intake.checkpoint import step_of
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, read_plain, write_atomic

log = logging.getLogger(__name__)

AGAIN = 10  # reported checkpoints that one look checks for new contents
MOST_NOTICE_BYTES = 1 << 16
MOST_ERRORS = 3  # errors shown of a malformed notice
MOST_SHOWN = 500  # characters shown of a malformed notice
GROUP = "daemon"
CONSUMER = "coordinator"
COUNT_SECONDS = 2.0  # longest wait for Redis where notices are only counted


class Notice(Record):
    """A checkpoint was announced or seen. The hook writes exactly these fields."""

    checkpoint: str
    step: int | None = None
    suite: str = "default"
    priority: int = 0
    noticed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notice and its acknowledgement. `key`: the same at each delivery until acknowledged.

    `announced`: by hook or `submit`; False: seen in a watched folder, perhaps half-written. `own`:
    named by the daemon's user or the settings. `wrong`: why it is no notice; `notice` then holds
    its claims. `evaluation_id`: what `submit` printed; "" of a notice by another way.
    """

    key: str
    notice: Notice
    acknowledge: Callable[[], object]
    announced: bool = True
    own: bool = False
    wrong: str = ""
    evaluation_id: str = ""


def spool(paths: WorkPaths, notice: Notice) -> None:
    """Leave a notice in the spool folder; needs neither Redis nor a running daemon."""
    _leave(paths.spool, notice)


def submit(paths: WorkPaths, notice: Notice, evaluation_id: str = "") -> Path:
    """Leave a submission for the daemon, and return its file. OperatorError where the work folder is another user's.

    `evaluation_id`: is in the file's name, so that `withdraw` finds it.
    """
    with _own_folder(paths) as folder:
        return _leave(folder, notice, evaluation_id)


def withdraw(paths: WorkPaths, evaluation_id: str) -> None:
    """Remove the submissions of this evaluation: no daemon begins it by them."""
    with _own_folder(paths):
        for each in from_submissions(paths):
            if each.evaluation_id == evaluation_id:
                each.acknowledge()


def keep_suite(paths: WorkPaths, name: str, text: str) -> Path:
    """Write a suite file that submissions name, beside them: other users may not change it. OperatorError as of `submit`."""
    with _own_folder(paths) as folder:
        (folder / "suites").mkdir(mode=0o700, exist_ok=True)
        file = folder / "suites" / name
        if not file.exists():  # its content decides its name
            write_atomic(file, text.encode())
        return file.resolve()


@contextlib.contextmanager
def _own_folder(paths: WorkPaths) -> Iterator[Path]:
    try:
        paths.submissions.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield paths.submissions
    except PermissionError as error:
        raise OperatorError(
            f"{paths.submissions} cannot be written: a work folder takes submissions of its own user alone; "
            "announce the checkpoint with coordinator.hook.notify"
        ) from error


def _leave(folder: Path, notice: Notice, evaluation_id: str = "") -> Path:
    file = folder / f"{time.time_ns()}-{evaluation_id or os.getpid()}.json"
    write_atomic(file, notice.model_dump_json().encode())
    return file


def from_submissions(paths: WorkPaths) -> Iterator[Delivery]:
    """Submissions, oldest first. From a folder that other users own or may write they are not `own`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        stat = paths.submissions.lstat()
        own = stat.st_uid == os.geteuid() and stat.st_mode & 0o022 == 0
        yield from _from_folder(paths.submissions, own=own)


def from_spool(paths: WorkPaths) -> Iterator[Delivery]:
    """Notices in the spool folder, oldest first. Files stay until their notices are acknowledged."""
    yield from _from_folder(paths.spool, own=False)


def _from_folder(folder: Path, *, own: bool) -> Iterator[Delivery]:
    """Deliveries of a folder; acknowledging a malformed one renames its file to `*.bad`."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        unlink = partial(path.unlink, missing_ok=True)
        set_aside = partial(path.rename, path.with_suffix(".bad"))
        try:
            text = read_plain(path, MOST_NOTICE_BYTES)
        except (OSError, FrameError) as error:
            if isinstance(error, OSError) or isinstance(error.__cause__, PermissionError):
                log.warning("%s cannot be read yet: %s", path, error)  # storage may be away for a moment
                continue
            yield Delivery(str(path), Notice(checkpoint=str(path)), set_aside, own=own, wrong=str(error))
            continue
        notice, wrong = parse(text, claimed=str(path))
        named = path.stem.partition("-")[2]
        yield Delivery(
            str(path),
            notice,
            set_aside if wrong else unlink,
            own=own,
            wrong=wrong,
            evaluation_id="" if named.isdecimal() else named,  # the process that left it
        )


def parse(text: bytes, claimed: str) -> tuple[Notice, str]:
    """(notice, ""), or (its claims, why it is none). `claimed`: checkpoint where `text` has none."""
    try:
        return Notice.model_validate_json(text), ""
    except ValidationError as error:
        why = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'all of it'}: {e['msg']}" for e in error.errors()[:MOST_ERRORS]
        )
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        named = None
    fields = named if isinstance(named, dict) else {}
    notice = Notice(
        checkpoint=_printable(fields.get("checkpoint", claimed)),
        suite=_printable(fields.get("suite", "default")),
    )
    return notice, _printable(f"it is no notice of this version ({why})")


def _printable(value: object) -> str:
    """Untrusted text as one line that is safe for any file or terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:MOST_SHOWN])


def from_stream(paths: WorkPaths) -> Iterator[Delivery]:
    """Notices of the Redis stream, first an earlier daemon's unacknowledged ones. None if away."""
    # `submit` runs once a checkpoint and never reads the stream: importing redis takes a third of a second
    import redis  # noqa: PLC0415

    from evaljobs.queue.redis_client import QueueUnavailable, connect  # noqa: PLC0415

    try:
        client = connect(paths.redis_address)
        with contextlib.suppress(redis.ResponseError):  # BUSYGROUP: the group exists
            client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        entries: list[tuple[Any, dict[Any, Any]]] = []
        for start in ("0", ">"):
            answer: Any = client.xreadgroup(GROUP, CONSUMER, {STREAM: start}, count=100)
            for _, rows in answer or ():
                entries += rows
    except (redis.RedisError, OSError, QueueUnavailable):
        return

    def acknowledge(entry_id: Any) -> None:
        with contextlib.suppress(redis.RedisError):
            client.xack(STREAM, GROUP, entry_id)
            client.xdel(STREAM, entry_id)

    for entry_id, fields in entries:
        key = f"stream/{entry_id!r}"
        notice, wrong = parse(fields.get(b"notice", fields.get("notice", b"")), claimed=key)
        yield Delivery(key, notice, partial(acknowledge, entry_id), wrong=wrong)


def count_in_stream(paths: WorkPaths) -> int:
    """Notices in the Redis stream that no daemon has acknowledged; 0 where Redis does not answer in a moment."""
    import redis  # noqa: PLC0415 (as above)

    from evaljobs.queue.redis_client import QueueUnavailable, connect  # noqa: PLC0415

    try:
        with connect(paths.redis_address, seconds=COUNT_SECONDS) as client:
            return int(client.xlen(STREAM))
    except (redis.RedisError, OSError, QueueUnavailable):
        return 0


class FolderWatch:
    """Finds checkpoint folders below watched folders, also those of lost notices.

    Remembers reported folders with their contents: a restarted training may write other checkpoints
    into folders of the same names. Those that a training has removed are forgotten.
    """

    def __init__(self, memory: Path, folders: Sequence[tuple[str, str]], *, any_format: bool = False) -> None:
        """`folders`: (folder of checkpoints or a glob, suite). `memory`: file of reported folders.

        `any_format`: a folder with a training step in its name counts as a checkpoint, too.
        """
        self.any_format = any_format
        self.memory = memory
        self.folders = folders
        self._places = [_Place(pattern, suite) for pattern, suite in folders]
        self._seen: dict[str, str] = {}  # reported folder -> digest of its contents then
        self._due: deque[str] = deque()  # reported folders, the next to be checked again first
        self._unwritten = False  # has `memory` to be written?
        self._write_at = float("-inf")  # not before, in monotonic seconds
        self._guard = LoopGuard(log)  # an error in one place skips that place alone
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(memory.read_text()))

    def look(self) -> Iterator[Delivery]:
        """A delivery for each checkpoint folder not acknowledged yet; checks AGAIN acknowledged ones."""
        again = self._in_turn()
        for place in self._places:
            listed = self._guard(f"watching {place.pattern!r}", place.unreported, self._seen) or ()
            for key in sorted({*listed, *(again & place.keys)}):
                folder = Path(key.partition("\0")[2])
                delivery = self._guard(f"watching {str(folder)!r}", self._news, folder, place.suite, key)
                if delivery is not None:
                    yield delivery
        for key in again:
            if _is_gone(Path(key.partition("\0")[2])):
                self._seen.pop(key, None)
                self._unwritten = True
        self._write()

    def _in_turn(self) -> set[str]:
        if not self._due:
            self._due.extend(self._seen)
        return {self._due.popleft() for _ in range(min(AGAIN, len(self._due)))}

    def _news(self, folder: Path, suite: str, key: str) -> Delivery | None:
        if not self._is_checkpoint(folder):
            return None
        held = _held(folder)
        if self._seen.get(key) == held:
            return None
        str(folder).encode()  # raises for a name that is no UTF-8: no notice can hold it
        notice = Notice(
            checkpoint=str(folder), step=step_of(folder.name), suite=suite, noticed_at=time.time()
        )
        return Delivery(f"watch/{key}", notice, lambda: self._remember(key, held), announced=False, own=True)

    def _is_checkpoint(self, folder: Path) -> bool:
        # `Path.exists` raises in a folder that this user may not enter
        return os.path.exists(folder / "config.json") or (  # noqa: PTH110
            self.any_format and step_of(folder.name) is not None
        )

    def _remember(self, key: str, held: str) -> None:
        self._seen[key] = held
        self._unwritten = True
        self._write()

    def _write(self) -> None:
        """Write the memory where it has changed; it takes at most a thousandth of the time, however long it is.

        What is not in it, also on a full disk, is reported again after a restart, without effect.
        """
        began = time.monotonic()
        if self._unwritten and began >= self._write_at:
            with contextlib.suppress(OSError):
                write_atomic(self.memory, json.dumps(self._seen, sort_keys=True).encode())
                self._unwritten = False
            ended = time.monotonic()
            self._write_at = ended + 1000 * (ended - began)


class _Place:
    """A watched folder or glob, with the folders that its last listing showed."""

    def __init__(self, pattern: str, suite: str) -> None:
        self.pattern, self.suite = pattern, suite
        self.keys: frozenset[str] = frozenset()
        self._new: frozenset[str] = frozenset()  # of `keys`, those that were not reported
        plain = not any(char in pattern for char in "*?[")
        self._listing = Listing(pattern) if plain else None

    def unreported(self, seen: Mapping[str, str]) -> frozenset[str]:
        """Keys of folders that are not reported yet. OSError."""
        found = self._listed()
        if found is not None:
            self.keys = frozenset(f"{self.suite}\0{folder}" for folder in found)
            self._new = self.keys
        self._new = frozenset(key for key in self._new if key not in seen)
        return self._new

    def _listed(self) -> list[str] | None:
        """Folders of the place; None where they are those of the last time."""
        if self._listing is None:
            root = Path(self.pattern)
            anchor = Path(root.anchor or ".")
            relative = str(root.relative_to(anchor)) if root.anchor else self.pattern
            return [str(p) for p in anchor.glob(relative) if not _is_unfinished(p.name)]
        try:
            with self._listing.news(time.monotonic()) as entries:
                if entries is None:
                    return None
                within = [e.name for e in entries if not _is_unfinished(e.name) and _is_folder(e)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # the folder may be a checkpoint itself
        return [str(Path(self.pattern)), *(os.path.join(self.pattern, name) for name in within)]  # noqa: PTH118


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """False also for a link into a folder that this user may not enter, where `is_dir` raises."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_gone(folder: Path) -> bool:
    """Was it removed? An empty folder above it may be a mount point whose storage is away."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            above = next(p for p in folder.parents if p.is_dir())
            with os.scandir(above) as entries:
                return any(True for _ in entries)
    return False


def _held(folder: Path) -> str:
    """Digest of a folder's entries (names, sizes, times) without evalspan's pins. OSError."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PIN_PREFIX):
                with contextlib.suppress(OSError):  # deleted meanwhile, or a dangling link
                    stat = entry.stat()
                    rows.append((entry.name, stat.st_size, stat.st_mtime_ns))
    rows.sort()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _is_unfinished(name: str) -> bool:
    """Is it the name of a folder that a copy or a training is still writing, by custom?"""
    return name.startswith((".", "tmp-")) or name.endswith((".tmp", ".partial"))
