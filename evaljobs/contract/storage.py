"""Files that outlive a crash: atomic writes, records, and append-only files of framed shards.

Rule: a reader sees a whole record or none. A frame is synced before its shard is reported as done.
Checksums find accidents, not forgeries: reading any response file takes bounded memory, and an
invalid record raises FrameError.

A frame is: magic (4 bytes) · bytes of head · bytes of body (u32 each) · xxh3_64 of those two
figures and the head · xxh3_64 of the body (u64 each) · head (JSON of `ShardHead`) · body (zlib of
the answers' JSON). Little endian.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import xxhash
from pydantic import ValidationError

from evaljobs.contract.folded import open_member
from evaljobs.contract.outcomes import Outcome, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SCHEMA_VERSION, FrameRef, Record
from evaljobs.errors import OperatorError

log = logging.getLogger(__name__)

MAGIC = b"\xf5ES1"
_PREFIX = struct.Struct("<4sIIQQ")
_SIZES = struct.Struct("<II")
_SCAN_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 28  # most bytes of a shard's answers, as JSON and compressed
MAX_TROUBLES = 1000  # damaged records, or false starts of one, before a file is refused
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

R = TypeVar("R", bound=Record)


class FrameError(Exception):
    """A record that should be whole is not: its shard must be run again."""


class ShardHead(Record):
    """What a frame says about its shard without its answers being read."""

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    shard: str
    trial: str
    started_at: float
    seconds: float
    responses: int


# --- whole files -------------------------------------------------------------------------------------------------


def make_folder(path: str | Path) -> None:
    """Make a folder and its missing parents, each as visible as the folder that it lies in, whatever the umask.

    Only its user may write to it. The group passes on where the parent passes it on (setgid). OSError.
    """
    path = Path(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
        return
    bits = stat.S_IMODE(path.parent.stat().st_mode) & 0o2055
    if bits:
        path.chmod(bits | 0o700)


def file_mode(folder: str | Path) -> int:
    """Mode of a new file: as visible as its folder, and only its user may write to it."""
    return stat.S_IMODE(Path(folder).stat().st_mode) & 0o044 | 0o600


def make_file(path: str | Path, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Open a file, made where it is missing, as visible as its folder whatever the umask; its descriptor. OSError."""
    mode = file_mode(Path(path).parent)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        with contextlib.suppress(PermissionError):  # another user's
            os.fchmod(descriptor, mode)
    return descriptor


def show_as(tree: Path, folder: Path) -> None:
    """Make a copied folder and what is in it as visible as `folder`: the copy kept the modes of its source. OSError."""
    mode, inner = stat.S_IMODE(folder.stat().st_mode) & 0o2055 | 0o700, file_mode(folder)
    for path, _, names in os.walk(tree):
        Path(path).chmod(mode)
        for name in names:
            (Path(path) / name).chmod(inner)


def write_atomic(path: str | Path, data: bytes, *, mode: int | None = None) -> None:
    """Write `data` so that `path` holds the old content or all of the new, even after a power cut.

    Makes the folder where it is missing. `mode`: None means as visible as its folder. Raises OSError where the file
    system refuses.
    """
    path = Path(path)
    make_folder(path.parent)
    mode = file_mode(path.parent) if mode is None else mode
    # File WORK_DIR/…/.NAME.RANDOM: a file that is being written; killed meanwhile, it stays | any process | by hand
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse fsync on folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_anew(folder: Path) -> None:
    """Have the next listing of a folder come from the server.

    An NFS client keeps a listing for 30 to 60 s, but not past a change of its own to the folder.
    """
    mark = folder / f".look-{os.getpid()}"
    with contextlib.suppress(OSError):
        mark.touch(0o600)
        mark.unlink()


def write_record(path: str | Path, record: Record) -> None:
    """Write a record atomically as JSON."""
    write_atomic(path, record.model_dump_json(indent=1).encode())


def read_record(path: str | Path, model: type[R]) -> R:
    """Read a record; FileNotFoundError, or ValidationError where another version wrote it."""
    return model.model_validate_json(Path(path).read_bytes())


def write_outcome(paths: EvaluationPaths, outcome: Outcome) -> Path:
    """Write a job's outcome where the coordinator looks for it; returns its path."""
    place = paths.outcome(outcome.kind, outcome.name)
    write_record(place, outcome)
    return place


# --- response files ----------------------------------------------------------------------------------------------


def encode_frame(shard: ShardResponses) -> bytes:
    """The bytes of one frame. Answers keep every digit, since JSON floats read back equal.

    Raises FrameError where the answers are larger than a reader accepts.
    """
    head = ShardHead(
        schema_version=shard.schema_version,
        task=shard.task,
        key=shard.key,
        shard=shard.shard,
        trial=shard.trial,
        started_at=shard.started_at,
        seconds=shard.seconds,
        responses=len(shard.responses),
    )
    head_bytes = head.model_dump_json().encode()
    answers = json.dumps(shard.responses, separators=(",", ":")).encode()
    body = zlib.compress(answers, 6)
    if max(len(answers), len(body)) > MAX_ANSWER_BYTES:
        raise FrameError(
            f"the answers of shard {shard.shard} are {len(answers)} bytes: more than a record holds"
        )
    sizes = _SIZES.pack(len(head_bytes), len(body))
    prefix = _PREFIX.pack(
        MAGIC,
        len(head_bytes),
        len(body),
        xxhash.xxh3_64_intdigest(sizes + head_bytes),
        xxhash.xxh3_64_intdigest(body),
    )
    return prefix + head_bytes + body


class FrameWriter:
    """Appends frames to one response file; `append` returns when they are on disk. One writer."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self.path = path
        self._file = os.fdopen(make_file(path), "ab", buffering=0)
        sync_folder(path.parent)

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def append(self, shard: ShardResponses) -> FrameRef:
        data = encode_frame(shard)
        offset = self._file.seek(0, os.SEEK_END)
        written = 0
        while written < len(data):
            written += self._file.write(memoryview(data)[written:])
        os.fsync(self._file.fileno())
        return FrameRef(file=self.path.name, offset=offset, length=len(data))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Start:
    """The sound beginning of a frame, with the offsets of its body's start and end."""

    head: ShardHead
    body: int
    end: int
    body_sum: int


def _read_start(file: IO[bytes], at: int) -> _Start | None:
    """The beginning of a frame at byte `at`, left at its body; None where no sound head is there."""
    file.seek(at)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        return None
    _, head_size, body_size, head_sum, body_sum = _PREFIX.unpack(prefix)
    if head_size > MAX_HEAD_BYTES or body_size > MAX_ANSWER_BYTES:
        return None
    head = file.read(head_size)
    sum_now = xxhash.xxh3_64_intdigest(_SIZES.pack(head_size, body_size) + head)
    if len(head) < head_size or sum_now != head_sum:
        return None
    body = at + _PREFIX.size + head_size
    try:
        return _Start(ShardHead.model_validate_json(head), body, body + body_size, body_sum)
    except ValidationError:  # the checksums are right, so this is no accident of storage
        return None


def _open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading, also an archived one.

    Raises FrameError for anything else (a pipe would block, a link may lead elsewhere), and OSError
    where the file system refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return open_member(path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM):
            raise FrameError(f"{path.name}: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FrameError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of a file that any user may have written.

    Raises FrameError where it is not a regular file or is longer than `most` bytes.
    """
    return read_with_status(path, most)[0]


def read_with_status(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """`read_plain`, and the status of the file that was read: its owner, its mode."""
    with _open_regular(path) as file:
        data, status = file.read(most + 1), os.fstat(file.fileno())
    if len(data) > most:
        raise FrameError(f"{path.name} is longer than {most} bytes")
    return data, status


def read_own(path: Path) -> bytes:
    """The bytes of a file that decides what this process runs.

    FrameError where it belongs to another user, others may write to it, or it is no regular file.
    """
    with _open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()):
            raise FrameError(f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()}: it is not run")
        if found.st_mode & 0o022:
            raise FrameError(f"{path} may be written by others: it is not run; `chmod go-w` it")
        return file.read()


def read_secret(setting: str, place: Path) -> str:
    """The text of a user's secret file. `setting`: for errors. OperatorError where it cannot be read, or others can read it."""
    try:
        mode = place.stat().st_mode
        text = place.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{setting} {place} cannot be read: {error}") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise OperatorError(f"{setting} {place} is open to others: chmod 600 {place}")
    return text


def read_frames(
    path: Path,
    start: int = 0,
    *,
    on_corrupt: Callable[[int, str], None] | None = None,
) -> Iterator[tuple[FrameRef, ShardHead]]:
    """Heads of the whole frames of a response file from byte `start` on, in file order.

    Bodies are checked but not decoded. An incomplete last frame (still being written, or its writer
    died) ends the walk: call again with `start` at the end of the last whole frame. Damaged bytes
    with a whole frame after them are reported to `on_corrupt(offset, reason)`, or logged, and
    skipped. Raises FrameError where `path` is not a regular file or has more than MAX_TROUBLES of
    them.
    """
    report = on_corrupt or (lambda at, why: log.warning("%s at byte %d: %s", path, at, why))
    with _open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        at, troubles = start, 0
        while at + _PREFIX.size <= size:
            found = _read_start(file, at)
            why = "no record begins here"
            if found is not None:
                if _body_sum(file, found.end - found.body) == found.body_sum:
                    yield FrameRef(file=path.name, offset=at, length=found.end - at), found.head
                    at = found.end
                    continue
                why = f"the answers of shard {found.head.shard} are torn or do not match their checksum"
            following = _next_whole_head(file, at + 1, size)
            if following is None:
                if found is None or found.end > size:
                    return  # its writer may not have finished this frame
                following = found.end
            report(at, why)
            troubles += 1
            if troubles > MAX_TROUBLES:
                raise FrameError(f"{path.name} holds {troubles} damaged records: it is not a response file")
            at = following


def _body_sum(file: IO[bytes], length: int) -> int | None:
    """The checksum of the next `length` bytes, read in parts; None where there are fewer."""
    digest = xxhash.xxh3_64()
    while length > 0:
        part = file.read(min(length, _SCAN_BYTES))
        if not part:
            return None
        digest.update(part)
        length -= len(part)
    return digest.intdigest()


def _next_whole_head(file: IO[bytes], start: int, size: int) -> int | None:
    """Offset of the next magic that begins a frame with a sound head, or None."""
    at, false = start, 0
    while at < size:
        file.seek(at)
        block = file.read(_SCAN_BYTES)
        found = block.find(MAGIC)
        if found < 0:
            at += max(1, len(block) - len(MAGIC) + 1)
            continue
        if _read_start(file, at + found) is not None:
            return at + found
        at += found + 1
        false += 1
        if false > MAX_TROUBLES:
            raise FrameError(f"{false} false starts of a record: this is not a response file")
    return None


def read_frame(root: Path, reference: FrameRef) -> ShardResponses:
    """The record at `reference` below the responses folder `root`.

    Raises FrameError where it is missing, is not whole, or holds anything but a shard's answers.
    """
    where = f"{reference.file}: the record at byte {reference.offset}"
    if Path(reference.file).name != reference.file or reference.offset < 0:
        raise FrameError(f"{where} is not in the responses folder")
    try:
        with _open_regular(root / reference.file) as file:
            found = _read_start(file, reference.offset)
            body = b"" if found is None else file.read(found.end - found.body)
    except (OSError, ValueError, OverflowError) as error:  # for example a name with a NUL
        raise FrameError(f"{reference.file}: {error}") from error
    if found is None or found.end != reference.offset + reference.length:
        raise FrameError(f"{where} is no whole record of {reference.length} bytes")
    if xxhash.xxh3_64_intdigest(body) != found.body_sum:
        raise FrameError(f"{where} does not match its checksum")
    return _decoded(found.head, body, where)


def _decoded(head: ShardHead, body: bytes, where: str) -> ShardResponses:
    """The answers of a body whose checksum is right."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(body, MAX_ANSWER_BYTES + 1)
        if len(text) > MAX_ANSWER_BYTES or not inflate.eof or inflate.unused_data:
            raise FrameError(f"{where} does not unpack to the answers of one shard")
        answers = json.loads(text.decode())
        if _SURROGATE.search(text):  # a lone surrogate cannot be written to a file
            json.dumps(answers, ensure_ascii=False).encode()
        # here pydantic accepts lists of pairs only
        shard = ShardResponses(**head.model_dump(exclude={"responses"}), responses=answers)
    except (ValueError, RecursionError, zlib.error) as error:
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FrameError(f"{where} holds no answers: {why}") from error
    if len(shard.responses) != head.responses:
        raise FrameError(
            f"{where} holds {len(shard.responses)} answers where it says that it holds {head.responses}"
        )
    for index, answer in shard.responses:
        if index < 0 or not _is_answer(answer):
            raise FrameError(f"{where}: its value for request {index} is no answer")
    return shard


def _is_answer(answer: Any) -> bool:
    """Whether a value is an answer as `ShardResponses` describes it."""
    if isinstance(answer, list) and len(answer) == 2 and not isinstance(answer[0], str):
        return all(isinstance(part, int | float) for part in answer)
    turns = answer if isinstance(answer, list) and answer else [answer]
    return all(isinstance(turn, str) for turn in turns)
