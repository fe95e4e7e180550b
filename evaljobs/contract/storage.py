"""Files that outlive a crash: atomic writes, records, and append-only files of framed shards.

Rule: a reader sees a whole record or none. A frame is synced before its shard is reported as done. Checksums detect
accidents; anyone who could forge a record has this user's rights.

A frame is: magic (4 bytes) · bytes of head · bytes of body (u32 each) · xxh3_64 of those two figures and the head · xxh3_64
of the body (u64 each) · head (JSON of `ShardHead`) · body (zlib of the answers' JSON). Little endian.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import xxhash
from pydantic import ValidationError

from evaljobs.contract.archived_files import open_file
from evaljobs.contract.outcomes import Outcome, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SCHEMA_VERSION, FrameRef, Record
from evaljobs.errors import OperatorError

log = logging.getLogger(__name__)

MAGIC = b"\xf5ES1"
# errors of a mount during a failover, or while its server is unavailable, which say nothing about its contents
STORAGE_AWAY = frozenset(
    {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN}
)
PATIENCE_SECONDS = 600.0  # for unavailable storage
AWAY_SECONDS = 2.0  # between two attempts
# of a lock file in a shared work folder, since any user who can read a file can hold its lock
LOCK_MODE = 0o600
_PREFIX = struct.Struct("<4sIIQQ")
_SIZES = struct.Struct("<II")

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class FrameError(Exception):
    """A damaged record: its shard must run again."""


class ShardHead(Record):
    """Facts about a frame's shard, readable without its answers."""

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
    """Create a folder and its missing parents, each as visible as its parent folder, whatever the umask.

    Only its user may write to it. The group is inherited if the parent does so (setgid). Raise OSError.
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
    """Return the mode of a new file: as visible as its folder, and only writable by its user."""
    return stat.S_IMODE(Path(folder).stat().st_mode) & 0o044 | 0o600


def make_file(path: str | Path, flags: int = os.O_WRONLY | os.O_APPEND, *, mode: int | None = None) -> int:
    """Open a file, creating it if missing, and return its descriptor. Raise OSError.

    `mode` None: as visible as its folder, whatever the umask.
    """
    mode = file_mode(Path(path).parent) if mode is None else mode
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        os.fchmod(descriptor, mode)
    return descriptor


def retry_while_away(work: Callable[[], T]) -> T:
    """Return the result of `work`, retried while storage is unavailable; raise its last error after PATIENCE_SECONDS."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in STORAGE_AWAY or time.monotonic() > end:
                raise
            log.warning("storage is unavailable, retrying: %s", error)
        time.sleep(AWAY_SECONDS)


def try_lock(file: int | IO[bytes], *, shared: bool = False, wait: float = 0.0) -> bool:
    """Take the flock of an open file. Return False if another process still holds it after `wait` seconds. The kernel
    releases the lock when the file is closed, also by its owner's death. Raise OSError if the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end, pause = time.monotonic() + wait, 0.02
    while True:
        try:
            fcntl.flock(file, kind if wait == math.inf else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)  # each try may be a request to a file server
        else:
            return True


@contextlib.contextmanager
def hold_lock(path: Path, *, wait: float = math.inf) -> Iterator[bool]:
    """Hold the lock file `path`, created with its folder, within the context; False if `try_lock` did not get it. Without
    file locks it excludes no process.
    """
    make_folder(path.parent)
    with os.fdopen(make_file(path, mode=LOCK_MODE), "ab") as file:
        taken = True
        with contextlib.suppress(OSError):
            taken = try_lock(file, wait=wait)
        yield taken


def show_as(tree: Path, folder: Path) -> None:
    """Make a copied folder and its contents as visible as `folder`, not as their source. Raise OSError."""
    mode, inner = stat.S_IMODE(folder.stat().st_mode) & 0o2055 | 0o700, file_mode(folder)
    for path, _, names in os.walk(tree):
        Path(path).chmod(mode)
        for name in names:
            (Path(path) / name).chmod(inner)


def write_atomic(path: str | Path, data: bytes, *, mode: int | None = None) -> None:
    """Write `data` so that `path` has the old content or all of the new, even after a power cut.

    Creates the folder if missing. `mode` None: as visible as its folder. Raise OSError if the file system refuses.
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
    """Make the names in `folder` durable, if its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse fsync on folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_anew(folder: Path) -> None:
    """Make the next listing of a folder come from the server.

    An NFS client caches a listing for 30 to 60 s, but not past its own change to the folder.
    """
    mark = folder / f".look-{os.getpid()}"
    with contextlib.suppress(OSError):
        mark.touch(0o600)
        mark.unlink()


def write_record(path: str | Path, record: Record) -> None:
    """Write a record atomically as JSON."""
    write_atomic(path, record.model_dump_json(indent=1).encode())


def read_record(path: str | Path, model: type[R]) -> R:
    """Read a record. Raise FileNotFoundError, or ValidationError if another version wrote it."""
    return model.model_validate_json(Path(path).read_bytes())


def find_record(path: str | Path, model: type[R]) -> R | None:
    """Read a record; None if it is missing, cannot be read, or is damaged or of another version."""
    try:
        return read_record(path, model)
    except (OSError, ValidationError):
        return None


def write_outcome(paths: EvaluationPaths, outcome: Outcome) -> Path:
    """Write a job's outcome where the coordinator looks for it, and return its path."""
    place = paths.outcome(outcome.kind, outcome.name)
    write_record(place, outcome)
    return place


# --- response files ----------------------------------------------------------------------------------------------


def encode_frame(shard: ShardResponses) -> bytes:
    """Return the bytes of one frame. Answers keep every digit, since JSON floats round-trip."""
    head = ShardHead(**shard.model_dump(exclude={"responses"}), responses=len(shard.responses))
    head_bytes = head.model_dump_json().encode()
    body = zlib.compress(json.dumps(shard.responses, separators=(",", ":")).encode(), 6)
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
        self._file = os.fdopen(make_file(path), "ab")
        sync_folder(path.parent)

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def append(self, shard: ShardResponses) -> FrameRef:
        data = encode_frame(shard)
        offset = self.bytes
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        return FrameRef(file=self.path.name, offset=offset, length=len(data))

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()


def _read_start(file: IO[bytes], at: int) -> tuple[ShardHead, int, int] | None:
    """Return head, bytes of body and its sum of the frame at byte `at`, with `file` at the body. None: no valid head."""
    file.seek(at)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        return None
    _, head_size, body_size, head_sum, body_sum = _PREFIX.unpack(prefix)
    head = file.read(head_size)
    if xxhash.xxh3_64_intdigest(_SIZES.pack(head_size, body_size) + head) != head_sum:
        return None
    return ShardHead.model_validate_json(head), body_size, body_sum


def read_plain(path: Path, most: int) -> bytes:
    """Return the bytes of a file that another user may have written.

    Raise FrameError if it is not a regular file or is longer than `most` bytes.
    """
    return read_with_status(path, most)[0]


def read_with_status(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """Return `read_plain`, and the status of the file that was read: its owner, its mode.

    A pipe would block, and a link may lead elsewhere: both are FrameError. Raise OSError if the file system refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM):
            raise FrameError(f"{path.name}: {error.strerror}") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise FrameError(f"{path.name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FrameError(f"{path.name} is longer than {most} bytes")
    return data, status


def read_secret(setting: str, place: Path) -> str:
    """Read a user's secret file. `setting`: for errors. Raise OperatorError if it cannot be read, or others can read it."""
    try:
        mode = place.stat().st_mode
        text = place.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{setting} {place} cannot be read: {error}") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise OperatorError(f"{setting} {place} is readable by others: type chmod 600 {place}")
    return text


def read_frames(path: Path, start: int = 0) -> Iterator[tuple[FrameRef, ShardHead]]:
    """Yield heads of the complete frames of a response file from byte `start` on, in file order.

    Bodies are checked but not decoded. An incomplete last frame (still being written, or its writer died) ends the iteration:
    call again with `start` at the end of the last complete frame. So does a damaged head; a frame with a damaged body is
    logged and skipped. Shards without a complete frame run again. Raise OSError if the file cannot be read.
    """
    at = start
    with open_file(path) as file:
        while (found := _read_start(file, at)) is not None:
            head, size, body_sum = found
            begin, data = file.tell(), file.read(size)
            if xxhash.xxh3_64_intdigest(data) == body_sum:
                yield FrameRef(file=path.name, offset=at, length=begin + size - at), head
            elif len(data) == size:
                log.warning("%s at byte %d: skipping a damaged record", path, at)
            else:
                return
            at = begin + size


def read_frame(root: Path, reference: FrameRef) -> ShardResponses:
    """Return the record at `reference` below the responses folder `root`. Raise FrameError if it is missing or damaged."""
    where = f"{reference.file}: the record at byte {reference.offset}"
    try:
        with open_file(root / reference.file) as file:
            found = _read_start(file, reference.offset)
            if found is None or xxhash.xxh3_64_intdigest(body := file.read(found[1])) != found[2]:
                raise FrameError(f"{where} does not match its checksums")
        answers = json.loads(zlib.decompress(body))
        return ShardResponses(**found[0].model_dump(exclude={"responses"}), responses=answers)
    except (OSError, ValueError, RecursionError, zlib.error) as error:
        raise FrameError(f"{where}: {error}") from error
