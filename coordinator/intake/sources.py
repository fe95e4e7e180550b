"""How checkpoints reach the daemon: the hook's stream and spool folder, `evalspan submit`, and watched folders.

Rule: delivery is at least once and every way ends in the same `Notice`; since an evaluation's id is a function of
what is evaluated, a checkpoint announced a hundred times is evaluated once. A notice is acknowledged only after it was
accepted or refused for good. Anyone may have written to the stream and the spool folder: only what comes from the
user's own submissions folder, or from a watched folder, is marked as `own`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from pydantic import ValidationError

from coordinator.base.isolate import LoopGuard
from coordinator.errors import OperatorError
from coordinator.hook import PIN_PREFIX, STREAM
from coordinator.intake.checkpoint import step_of
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, read_plain, write_atomic
from evaljobs.queue.redis_client import QueueUnavailable, connect

log = logging.getLogger(__name__)

AGAIN = 10  # reported checkpoints that a look looks into again: cheap however many there are
MOST_NOTICE_BYTES = 1 << 16
MOST_ERRORS = 3  # of a malformed notice, that are shown
MOST_SHOWN = 500  # characters of what a malformed notice holds
GROUP = "daemon"
CONSUMER = "coordinator"


class Notice(Record):
    """A checkpoint was seen. The hook writes exactly these fields."""

    checkpoint: str
    step: int | None = None
    suite: str = "default"
    priority: int = 0
    noticed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notice and how to say that it need not come again. `key`: the same each time it comes until then.

    `announced`: whoever saved the checkpoint said so; otherwise it was seen in a watched folder, perhaps half-written.
    `own`: the user of the daemon, or the settings, named it. `wrong`: why it is no notice; `notice` is then what it claims.
    """

    key: str
    notice: Notice
    acknowledge: Callable[[], object]
    announced: bool = True
    own: bool = False
    wrong: str = ""


def spool(paths: WorkPaths, notice: Notice) -> None:
    """Leave a notice for the daemon in the spool folder: works with Redis and daemon away."""
    _leave(paths.spool, notice)


def submit(paths: WorkPaths, notice: Notice) -> None:
    """Leave a person's own submission for the daemon. OperatorError where the work folder is another user's."""
    try:
        paths.submissions.mkdir(mode=0o700, parents=True, exist_ok=True)
        _leave(paths.submissions, notice)
    except PermissionError as error:
        raise OperatorError(
            f"{paths.submissions} cannot be written: a work folder takes submissions of its own user alone; "
            "announce the checkpoint with coordinator.hook.notify"
        ) from error


def _leave(folder: Path, notice: Notice) -> None:
    write_atomic(folder / f"{time.time_ns()}-{os.getpid()}.json", notice.model_dump_json().encode())


def from_submissions(paths: WorkPaths) -> Iterator[Delivery]:
    """What `evalspan submit` left, oldest first. In a folder that others own or may write, it counts as a notice."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        stat = paths.submissions.lstat()
        own = stat.st_uid == os.geteuid() and stat.st_mode & 0o022 == 0
        yield from _from_folder(paths.submissions, own=own)


def from_spool(paths: WorkPaths) -> Iterator[Delivery]:
    """Notices in the spool folder, oldest first. Nothing is changed before they are acknowledged."""
    yield from _from_folder(paths.spool, own=False)


def _from_folder(folder: Path, *, own: bool) -> Iterator[Delivery]:
    """What is no notice, or no plain file, goes by as `*.bad` when it is acknowledged."""
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
        yield Delivery(str(path), notice, set_aside if wrong else unlink, own=own, wrong=wrong)


def parse(text: bytes, claimed: str) -> tuple[Notice, str]:
    """The notice, and ""; else what it claims to be of, with the reason why it is none. `claimed`: for where it names none."""
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
    """What a stranger wrote, as one line that any file or terminal takes."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:MOST_SHOWN])


def from_stream(paths: WorkPaths) -> Iterator[Delivery]:
    """Notices of the Redis stream: first those that an earlier daemon took and did not acknowledge. Nothing if away."""
    try:
        client = connect(paths.redis_address)
        with contextlib.suppress(redis.ResponseError):  # BUSYGROUP: it is there
            client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        entries: list[tuple[Any, dict[Any, Any]]] = []
        for start in ("0", ">"):
            answer: Any = client.xreadgroup(GROUP, CONSUMER, {STREAM: start}, count=100)
            for _, rows in answer or ():
                entries += rows
    except (redis.RedisError, OSError, QueueUnavailable):
        return
    for entry_id, fields in entries:
        key = f"stream/{entry_id!r}"
        notice, wrong = parse(fields.get(b"notice", fields.get("notice", b"")), claimed=key)
        yield Delivery(key, notice, _acknowledge(client, entry_id), wrong=wrong)


def _acknowledge(client: Any, entry_id: Any) -> Callable[[], None]:
    def acknowledge() -> None:
        with contextlib.suppress(redis.RedisError):
            client.xack(STREAM, GROUP, entry_id)
            client.xdel(STREAM, entry_id)

    return acknowledge


class FolderWatch:
    """Checkpoint folders below watched folders: what a lost notice would have told. Remembers what it has reported, and what
    lay in it then: training that is started again writes other checkpoints into folders of the same names.
    """

    def __init__(self, memory: Path, folders: Sequence[tuple[str, str]], *, any_format: bool = False) -> None:
        """`folders`: (a folder of checkpoints or a glob of them, suite). `memory`: a file of what was reported.

        `any_format`: a folder with a training step in its name is a checkpoint, too, whatever it holds.
        """
        self.any_format = any_format
        self.memory = memory
        self.folders = folders
        self._seen: dict[str, str] = {}  # what was reported -> what lay in it then
        self._due: deque[str] = deque()  # of these, which are looked into again next
        self._guard = LoopGuard(log)  # an error at one place hides that place alone
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(memory.read_text()))

    def look(self) -> Iterator[Delivery]:
        """A delivery for each checkpoint folder not acknowledged yet that looks like one; of those acknowledged a few are
        looked into, in turns.
        """
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
        str(folder).encode()  # a name that is no text (UTF-8) can be told to nobody
        notice = Notice(
            checkpoint=str(folder), step=step_of(folder.name), suite=suite, noticed_at=time.time()
        )
        return Delivery(f"watch/{key}", notice, lambda: self._remember(key, held), announced=False, own=True)

    def _is_checkpoint(self, folder: Path) -> bool:
        # `Path.exists` raises where it may not look, as in a folder that is not for us
        return os.path.exists(folder / "config.json") or (  # noqa: PTH110
            self.any_format and step_of(folder.name) is not None
        )

    def _remember(self, key: str, held: str) -> None:
        self._seen[key] = held
        with contextlib.suppress(OSError):  # a full disk: reported once more after a restart, to no effect
            write_atomic(self.memory, json.dumps(self._seen, sort_keys=True).encode())


def _held(folder: Path) -> str:
    """A digest of what lies in a folder: names, sizes and times of its entries, less our own pins. OSError."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PIN_PREFIX):
                with contextlib.suppress(OSError):  # it went meanwhile, or links to nothing
                    stat = entry.stat()
                    rows.append((entry.name, stat.st_size, stat.st_mtime_ns))
    rows.sort()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _checkpoints(pattern: str) -> list[Path]:
    """Folders that a watched place may mean: those that a glob finds; else the folder itself and those in it. OSError."""
    root = Path(pattern)
    if not any(char in pattern for char in "*?["):
        # `Path.is_dir` raises where it may not look, as for a link into a folder that is not for us
        return [root, *sorted(p for p in root.iterdir() if os.path.isdir(p))] if root.is_dir() else []  # noqa: PTH112
    anchor = Path(root.anchor or ".")
    return sorted(anchor.glob(str(root.relative_to(anchor)) if root.anchor else pattern))
