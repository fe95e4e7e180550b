"""Reads notices of checkpoints from the hook's stream, spool folder, submissions and watched folders.

Rule: delivery is at least once, and every source gives the same `Notice`. An evaluation's id is a
function of its content, so a checkpoint announced a hundred times is evaluated once. A notice is
acknowledged only after it was accepted or refused for good. Other users may write to the stream and
the spool folder, and members of the group that shares the work folder to its submissions: only
watched folders and the user's own submissions give `own` notices.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from coordinator.base.isolate import warn_once
from coordinator.base.turns import ALL, Turns
from coordinator.base.words import CONTROL, one_line
from coordinator.errors import OperatorError
from coordinator.hook import STREAM
from coordinator.intake.work_folder import DROP, SHARED, is_of_another, name_of, unsafe
from coordinator.services.notice_key import is_signed, notice_key
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, make_folder, read_with_status, write_atomic

log = logging.getLogger(__name__)

MOST_NOTICE_BYTES = 1 << 16
MOST_PATH = 4096  # characters of a path that Linux takes
MOST_ENTRIES = 100  # of the stream, of each kind (unacknowledged and new), that one look reads
MOST_STREAM_BYTES = 4 << 20  # of one answer of the stream: a larger one would fill the daemon's memory
MOST_ERRORS = 3  # errors shown of a malformed notice
MOST_SHOWN = 500  # characters shown of a malformed notice
GROUP = "daemon"
CONSUMER = "coordinator"
COUNT_SECONDS = 2.0  # longest wait for Redis where notices are only counted


class Notice(Record):
    """A checkpoint was announced or seen. The hook writes exactly these fields."""

    checkpoint: Annotated[str, Field(max_length=MOST_PATH)]
    step: int | None = None
    suite: Annotated[str, Field(max_length=MOST_PATH)] = "default"
    priority: int = 0
    noticed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notice and its acknowledgement. `key`: the same at each delivery until acknowledged.

    `unsigned`: it came by a Redis of the site's without the signature of this work folder's key.
    `announced`: by hook or `submit`; False: seen in a watched folder, perhaps half-written. `own`:
    named by the daemon's user or the settings. `wrong`: why it is no notice; `notice` then holds its
    claims. `evaluation_id`: what `submit` printed; "" of a notice by another way. `member`: who left
    the submission, where that is another user; else "".
    """

    key: str
    notice: Notice
    acknowledge: Callable[[], object]
    announced: bool = True
    own: bool = False
    wrong: str = ""
    evaluation_id: str = ""
    member: str = ""
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
    """Remove the submissions of this evaluation: no daemon begins it by them."""
    with _own_folder(paths):
        for each in from_submissions(paths):
            if each.evaluation_id == evaluation_id:
                each.acknowledge()


def keep_suite(paths: WorkPaths, name: str, text: str) -> Path:
    """Write a suite file that submissions name, beside them. OperatorError as of `submit`."""
    with _own_folder(paths) as folder:
        # File WORK_DIR/submissions/suites/SUITE.toml: a suite that submissions name | `submit` | by hand
        make_folder(folder / "suites")
        file = folder / "suites" / name  # its content decides its name
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


def from_submissions(paths: WorkPaths, turns: Turns | None = None) -> Iterator[Delivery]:
    """Submissions, oldest first. A file of another user, or in a folder that such a user owns or may write, is not `own`;
    members of the group that shares the work folder may write there.

    `turns`: of the daemon, which looks again and again; None: one look.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from _from_folder(turns or Turns(paths.submissions, ALL), own=_is_trusted(paths))


def _is_trusted(paths: WorkPaths) -> bool:
    """Is the submissions folder this user's, and open to no others but the group that shares the work folder?"""
    drop, root = paths.submissions.lstat(), paths.root.stat()
    shared = stat.S_IMODE(root.st_mode) == SHARED and stat.S_IMODE(drop.st_mode) == DROP
    by_members = shared and (root.st_uid, root.st_gid) == (drop.st_uid, drop.st_gid)
    return drop.st_uid == os.geteuid() and (by_members or drop.st_mode & 0o022 == 0)


def from_spool(paths: WorkPaths, turns: Turns | None = None) -> Iterator[Delivery]:
    """Notices in the spool folder, oldest first. Files stay until their notices are acknowledged. `turns`: as above."""
    yield from _from_folder(turns or Turns(paths.spool, ALL), own=False)


def _from_folder(turns: Turns, *, own: bool) -> Iterator[Delivery]:
    """Deliveries of a folder; acknowledging a malformed one renames its file to `*.bad`, or removes it past MOST_BAD."""
    unread: list[str] = []  # storage may be away for a moment
    for path in turns.look():
        unlink = partial(path.unlink, missing_ok=True)
        aside = partial(set_aside, path, turns)
        try:
            text, status = read_with_status(path, MOST_NOTICE_BYTES)
        except (OSError, FrameError) as error:
            denied = isinstance(error.__cause__, PermissionError)
            if isinstance(error, OSError) or (denied and not is_of_another(path)):  # a member's stays closed
                unread.append(f"{path} cannot be read yet: {error}")
                continue
            claims = Notice(checkpoint=_printable(path))
            yield Delivery(str(path), claims, aside, own=own, wrong=_printable(error))
            continue
        notice, wrong = parse(text, claimed=str(path))
        member = ""
        if own:  # what the spool may name is limited for all users
            wrong = f"{path}: {why}" if (why := unsafe(status)) else wrong
            member = "" if status.st_uid in (0, os.geteuid()) else name_of(status.st_uid)
        named = path.stem.partition("-")[2]
        yield Delivery(
            str(path),
            notice,
            aside if wrong else unlink,
            own=own and not member,
            wrong=wrong,
            evaluation_id="" if named.isdecimal() else _printable(named),  # the process that left it
            member=member,
        )
    if unread:
        more = f" (and {len(unread) - 1} other files)" if unread[1:] else ""
        warn_once(log, one_line(f"{unread[0]}{more}"))


def set_aside(path: Path, turns: Turns | None = None) -> None:
    """Rename what is no notice or command, so that it is not looked at again; past MOST_BAD of them remove it. OSError."""
    if turns is not None and not turns.keeps_bad():
        with contextlib.suppress(OSError):  # a folder, perhaps
            path.unlink(missing_ok=True)
            return
    aside = path.with_suffix(".bad")
    if os.path.lexists(aside):
        aside = path.with_name(f"{time.time_ns()}.bad")
    path.rename(aside)


def parse(text: bytes, claimed: str) -> tuple[Notice, str]:
    """(notice, ""), or (its claims, why it is none). `claimed`: checkpoint where `text` has none."""
    if len(text) > MOST_NOTICE_BYTES:
        return Notice(checkpoint=_printable(claimed)), f"it is longer than {MOST_NOTICE_BYTES} bytes"
    try:
        notice = Notice.model_validate_json(text)
        if not CONTROL.search(notice.checkpoint + notice.suite):
            return notice, ""
        why = "a name has a control character"
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


@dataclass(slots=True)
class StreamPlace:
    """Where the daemon's next look at its unacknowledged notices begins: they are read in turns."""

    after: str = "0"


# Reads the group's entries from a place on; cuts what is longer than a notice. Takes stream, group, consumer, place,
# most entries, bytes of a field, bytes of the answer. What does not fit into these is unacknowledged and comes again.
_READ = """
local found, bytes, after = {}, 0, ARGV[3]
while #found < tonumber(ARGV[4]) and bytes < tonumber(ARGV[6]) do
  local answer = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 10, 'STREAMS', KEYS[1], after)
  local rows = answer and answer[1][2] or {}
  if #rows == 0 then return found end
  for _, row in ipairs(rows) do
    local fields = {}
    for i, text in ipairs(row[2] or {}) do
      if i <= 8 then
        fields[i] = string.sub(text, 1, tonumber(ARGV[5]) + 1)
        bytes = bytes + #fields[i]
      end
    end
    found[#found + 1] = {row[1], fields}
    if after ~= '>' then after = row[1] end
    if bytes >= tonumber(ARGV[6]) then return found end
  end
end
return found
"""


def from_stream(
    paths: WorkPaths, place: StreamPlace | None = None, *, signed: bool = False
) -> Iterator[Delivery]:
    """Notices of the Redis stream, first an earlier daemon's unacknowledged ones. None if away.

    `place`: of the daemon, which looks again and again; None: one look from the beginning.
    `signed`: other programs may write to this Redis, so that a notice counts only with its signature.
    """
    place = place or StreamPlace()
    # `submit` runs once a checkpoint and never reads the stream: importing redis takes a third of a second
    import redis  # noqa: PLC0415

    from evaljobs.queue.redis_client import QueueUnavailable, connect  # noqa: PLC0415

    try:
        secret = notice_key(paths) if signed else None
        client = connect(paths.redis_address)
        with contextlib.suppress(redis.ResponseError):  # BUSYGROUP: the group exists
            client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        limits = (MOST_ENTRIES, MOST_NOTICE_BYTES, MOST_STREAM_BYTES)
        old: Any = client.eval(_READ, 1, STREAM, GROUP, CONSUMER, place.after, *limits)
        new: Any = client.eval(_READ, 1, STREAM, GROUP, CONSUMER, ">", *limits)
        place.after = old[-1][0].decode() if old else "0"
    except (redis.RedisError, OSError, QueueUnavailable):
        return

    def acknowledge(entry_id: Any) -> None:
        with contextlib.suppress(redis.RedisError):
            client.xack(STREAM, GROUP, entry_id)
            client.xdel(STREAM, entry_id)

    for entry_id, words in (*old, *new):
        fields = dict(zip(words[::2], words[1::2], strict=False))
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
