"""Reads notices of checkpoints from the hook's stream, spool folder, submissions and watched folders.

Rule: delivery is at least once, and every source gives the same `Notice`. An evaluation's id is a
function of its content, so a checkpoint announced a hundred times is evaluated once. A notice is
acknowledged only after it was accepted or refused for good. Other users may write to the stream and
the spool folder: only watched folders, and the submissions of the user and of the group that shares
the work folder, give `own` notices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.isolate import LoopGuard
from coordinator.errors import OperatorError
from coordinator.hook import PIN_PREFIX, STREAM
from coordinator.intake.checkpoint import step_of
from coordinator.intake.people import NotAMemberError, People
from coordinator.intake.work_folder import DROP, SHARED
from coordinator.services.notice_key import is_signed, notice_key
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, make_folder, read_with_status, write_atomic

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

    `unsigned`: it came by a Redis of the site's without the signature of this work folder's key.
    `announced`: by hook or `submit`; False: seen in a watched folder, perhaps half-written. `own`:
    named by the daemon's user, a member or the settings. `wrong`: why it is no notice; `notice` then
    holds its claims. `evaluation_id`: what `submit` printed; "" of a notice by another way. `user`: who
    asked, by the file; "" of a notice by another way, or where the work folder has one user.
    """

    key: str
    notice: Notice
    acknowledge: Callable[[], object]
    announced: bool = True
    own: bool = False
    wrong: str = ""
    evaluation_id: str = ""
    user: str = ""
    unsigned: bool = False


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
    """Remove the submissions of this evaluation, in a shared work folder this user's: no daemon begins it by them."""
    with _own_folder(paths):
        for each in from_submissions(paths):
            if each.evaluation_id == evaluation_id and may_withdraw(paths, each):
                each.acknowledge()


def may_withdraw(paths: WorkPaths, submission: Delivery) -> bool:
    """Is it this user's, or the work folder?"""
    with contextlib.suppress(OSError):
        return os.geteuid() in (Path(submission.key).stat().st_uid, paths.submissions.stat().st_uid)
    return False


def keep_suite(paths: WorkPaths, name: str, text: str) -> Path:
    """Write a suite file that submissions name, beside them: other users may not change it. OperatorError as of `submit`."""
    with _own_folder(paths) as folder:
        make_folder(folder / "suites")
        file = folder / "suites" / name  # its content decides its name
        if file.exists() and file.lstat().st_uid != os.geteuid():  # its owner could change it
            file = file.with_stem(f"{file.stem}u{os.geteuid()}")
        write_atomic(file, text.encode())
        return file.resolve()


@contextlib.contextmanager
def _own_folder(paths: WorkPaths) -> Iterator[Path]:
    try:
        paths.submissions.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield paths.submissions
    except PermissionError as error:
        raise OperatorError(
            f"{paths.submissions} cannot be written: a work folder takes submissions of its own user and of its shared_group; "
            "announce the checkpoint with coordinator.hook.notify"
        ) from error


def _leave(folder: Path, notice: Notice, evaluation_id: str = "") -> Path:
    file = folder / f"{time.time_ns()}-{evaluation_id or os.getpid()}.json"
    write_atomic(file, notice.model_dump_json().encode())
    return file


def from_submissions(paths: WorkPaths, people: People | None = None) -> Iterator[Delivery]:
    """Submissions, oldest first. From a folder that other users own or may write they are not `own`; members of the group
    that shares the work folder may write there. `people`: of a shared one; a file that is no member's is `wrong`.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from _from_folder(paths.submissions, people, own=_is_trusted(paths))


def _is_trusted(paths: WorkPaths) -> bool:
    """Is the submissions folder this user's, and open to no others but the group that shares the work folder?"""
    drop, root = paths.submissions.lstat(), paths.root.stat()
    shared = stat.S_IMODE(root.st_mode) == SHARED and stat.S_IMODE(drop.st_mode) == DROP
    by_members = shared and (root.st_uid, root.st_gid) == (drop.st_uid, drop.st_gid)
    return drop.st_uid == os.geteuid() and (by_members or drop.st_mode & 0o022 == 0)


def from_spool(paths: WorkPaths, people: People | None = None) -> Iterator[Delivery]:
    """Notices in the spool folder, oldest first. Files stay until their notices are acknowledged.

    `people`: of a shared work folder; a file that is no member's for certain, as of an older hook, has no `user`.
    """
    yield from _from_folder(paths.spool, people, own=False)


def _from_folder(folder: Path, people: People | None, *, own: bool) -> Iterator[Delivery]:
    """Deliveries of a folder; acknowledging a malformed one renames its file to `*.bad`."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        unlink = partial(path.unlink, missing_ok=True)
        set_aside = partial(path.rename, path.with_suffix(".bad"))
        try:
            text, status = read_with_status(path, MOST_NOTICE_BYTES)
        except (OSError, FrameError) as error:
            denied = isinstance(error.__cause__, PermissionError)
            if isinstance(error, OSError) or (denied and people is None):  # a member's stays closed
                log.warning("%s cannot be read yet: %s", path, error)  # storage may be away for a moment
                continue
            yield Delivery(str(path), Notice(checkpoint=str(path)), set_aside, own=own, wrong=str(error))
            continue
        notice, wrong = parse(text, claimed=str(path))
        user = ""
        if people is not None:
            try:
                user = people.author(status)
            except NotAMemberError as error:
                wrong = str(error) if own else wrong  # what the spool may name is limited, whoever asks
        named = path.stem.partition("-")[2]
        yield Delivery(
            str(path),
            notice,
            set_aside if wrong else unlink,
            own=own,
            wrong=wrong,
            evaluation_id="" if named.isdecimal() else named,  # the process that left it
            user=user,
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


def from_stream(paths: WorkPaths, *, signed: bool = False) -> Iterator[Delivery]:
    """Notices of the Redis stream, first an earlier daemon's unacknowledged ones. None if away.

    `signed`: other programs may write to this Redis, so that a notice counts only with its signature.
    """
    # `submit` runs once a checkpoint and never reads the stream: importing redis takes a third of a second
    import redis  # noqa: PLC0415

    from evaljobs.queue.redis_client import QueueUnavailable, connect  # noqa: PLC0415

    try:
        secret = notice_key(paths) if signed else None
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
        text = fields.get(b"notice", b"")
        done = partial(acknowledge, entry_id)
        if secret is not None and not is_signed(text, fields.get(b"mac", b""), secret):
            yield Delivery(key, Notice(checkpoint=key), done, unsigned=True)
            continue
        notice, wrong = parse(text, claimed=key)
        yield Delivery(key, notice, done, wrong=wrong)


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
    into folders of the same names.
    """

    def __init__(self, memory: Path, folders: Sequence[tuple[str, str]], *, any_format: bool = False) -> None:
        """`folders`: (folder of checkpoints or a glob, suite). `memory`: file of reported folders.

        `any_format`: a folder with a training step in its name counts as a checkpoint, too.
        """
        self.any_format = any_format
        self.memory = memory
        self.folders = folders
        self._seen: dict[str, str] = {}  # reported folder -> digest of its contents then
        self._due: deque[str] = deque()  # reported folders, the next to be checked again first
        self._guard = LoopGuard(log)  # an error in one place skips that place alone
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(memory.read_text()))

    def look(self) -> Iterator[Delivery]:
        """A delivery for each checkpoint folder not acknowledged yet; checks AGAIN acknowledged ones."""
        again = self._in_turn()
        for pattern, suite in self.folders:
            for folder in self._guard(f"watching {pattern!r}", _checkpoints, pattern) or ():
                key = f"{suite}\0{folder}"
                if key in self._seen and key not in again:
                    continue
                delivery = self._guard(f"watching {str(folder)!r}", self._news, folder, suite, key)
                if delivery is not None:
                    yield delivery

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
        with contextlib.suppress(OSError):  # full disk: reported again after a restart, without effect
            write_atomic(self.memory, json.dumps(self._seen, sort_keys=True).encode())


def _held(folder: Path) -> str:
    """Digest of a folder's entries (names, sizes, times) without evalspan's pins. OSError."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PIN_PREFIX):
                with contextlib.suppress(OSError):  # deleted meanwhile, or a dangling link
                    found = entry.stat()
                    rows.append((entry.name, found.st_size, found.st_mtime_ns))
    rows.sort()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _checkpoints(pattern: str) -> list[Path]:
    """Folders of a watched place: a glob's matches, else the folder and those in it. OSError."""
    root = Path(pattern)
    if not any(char in pattern for char in "*?["):
        # `Path.is_dir` raises for a link into a folder that this user may not enter
        within = [p for p in root.iterdir() if os.path.isdir(p)] if root.is_dir() else []  # noqa: PTH112
        return [root, *sorted(p for p in within if not _is_unfinished(p.name))] if root.is_dir() else []
    anchor = Path(root.anchor or ".")
    found = anchor.glob(str(root.relative_to(anchor)) if root.anchor else pattern)
    return sorted(p for p in found if not _is_unfinished(p.name))


def _is_unfinished(name: str) -> bool:
    """Is it the name of a folder that a copy or a training is still writing, by custom?"""
    return name.startswith((".", "tmp-")) or name.endswith((".tmp", ".partial"))
