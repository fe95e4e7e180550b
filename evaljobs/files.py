"""Files that outlive a crash: atomic writes, records, and append-only files of framed shards.

Rule: a reader sees a whole record or none. A file is written beside its place, synced and renamed; a frame is synced
before anyone is told of it, and its checksums tell a whole one from a torn or rotten one.

A frame is: magic (4 bytes) · bytes of head · bytes of body (u32 each) · xxh3_64 of those two figures and the head ·
xxh3_64 of the body (u64 each) · head (JSON of `ShardHead`) · body (zlib of the answers' JSON). Little endian.

It does not know: what the answers mean, or who reads them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import xxhash

from evaljobs.contract import SCHEMA_VERSION, FrameRef, Record
from evaljobs.outcomes import Outcome, ShardResponses
from evaljobs.paths import EvaluationPaths

log = logging.getLogger(__name__)

MAGIC = b"\xf5ES1"
_PREFIX = struct.Struct("<4sIIQQ")
_SIZES = struct.Struct("<II")
_SCAN_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16

R = TypeVar("R", bound=Record)


class FrameError(Exception):
    """A record that should be whole is not: its shard must be run again."""


class ShardHead(Record):
    """What a frame says of itself without its answers being read."""

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    shard: str
    trial: str
    started_at: float
    seconds: float
    responses: int


# --- whole files -------------------------------------------------------------------------------------------------


def write_atomic(path: str | Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` so that `path` holds the old content or all of the new, even after a power cut.

    The folder is made where it is missing. Raises OSError as the file system gives it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse fsync on folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(path: str | Path, record: Record) -> None:
    """Write a record atomically as JSON."""
    write_atomic(path, record.model_dump_json(indent=1).encode())


def read_record(path: str | Path, model: type[R]) -> R:
    """Read a record. Raises FileNotFoundError, or pydantic's ValidationError where it is another version's."""
    return model.model_validate_json(Path(path).read_bytes())


def write_outcome(paths: EvaluationPaths, outcome: Outcome) -> Path:
    """Leave a job's outcome where the coordinator looks for it; returns the place."""
    place = paths.outcome(outcome.kind, outcome.name)
    write_record(place, outcome)
    return place


# --- response files ----------------------------------------------------------------------------------------------


def encode_frame(shard: ShardResponses) -> bytes:
    """The bytes of one frame. Answers keep every digit: Python's JSON writes floats so that they read back equal."""
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
    """Appends frames to one response file; each is on disk when `append` returns. One writer per file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
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
class _Prefix:
    head: int
    body: int
    head_sum: int
    body_sum: int

    @property
    def length(self) -> int:
        return _PREFIX.size + self.head + self.body


def _read_prefix(data: bytes) -> _Prefix | None:
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        return None
    _, head, body, head_sum, body_sum = _PREFIX.unpack_from(data)
    return _Prefix(head, body, head_sum, body_sum) if head <= MAX_HEAD_BYTES else None


def _checked_head(prefix: _Prefix, head: bytes) -> ShardHead | None:
    sizes = _SIZES.pack(prefix.head, prefix.body)
    if len(head) < prefix.head or xxhash.xxh3_64_intdigest(sizes + head) != prefix.head_sum:
        return None
    return ShardHead.model_validate_json(head)


def read_frames(
    path: Path,
    start: int = 0,
    *,
    on_corrupt: Callable[[int, str], None] | None = None,
) -> Iterator[tuple[FrameRef, ShardHead]]:
    """Heads of the whole frames of a response file from byte `start` on, in file order.

    Bodies are checked but not decoded. A torn tail (a frame that is being written, or was when its writer died) ends
    the walk: call again with `start` at the end of the last frame. Bytes that are no whole frame but are followed by
    one are reported to `on_corrupt(offset, reason)` (or logged) and passed over.
    """
    report = on_corrupt or (lambda at, why: log.warning("%s at byte %d: %s", path, at, why))
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = start
        while at + _PREFIX.size <= size:
            file.seek(at)
            prefix = _read_prefix(file.read(_PREFIX.size))
            head = _checked_head(prefix, file.read(prefix.head)) if prefix is not None else None
            why = "no record begins here"
            if prefix is not None and head is not None:
                body = file.read(prefix.body)
                if len(body) == prefix.body and xxhash.xxh3_64_intdigest(body) == prefix.body_sum:
                    yield FrameRef(file=path.name, offset=at, length=prefix.length), head
                    at += prefix.length
                    continue
                why = f"the answers of shard {head.shard} are torn or do not match their checksum"
            following = _next_whole_head(file, at + 1, size)
            if following is None:
                if prefix is None or head is None or at + prefix.length > size:
                    return  # a tail that may still be being written
                following = at + prefix.length
            report(at, why)
            at = following


def _next_whole_head(file: Any, start: int, size: int) -> int | None:
    """Offset of the next magic that begins a frame with a sound head, or None."""
    at = start
    while at < size:
        file.seek(at)
        block = file.read(_SCAN_BYTES)
        found = block.find(MAGIC)
        if found < 0:
            at += max(1, len(block) - len(MAGIC) + 1)
            continue
        file.seek(at + found)
        prefix = _read_prefix(file.read(_PREFIX.size))
        if prefix is not None and _checked_head(prefix, file.read(prefix.head)) is not None:
            return int(at + found)
        at += found + 1
    return None


def read_frame(root: Path, reference: FrameRef) -> ShardResponses:
    """The record at `reference` below the responses folder `root`. FrameError where it is not whole or not there."""
    try:
        with (root / reference.file).open("rb") as file:
            file.seek(reference.offset)
            data = file.read(reference.length)
    except OSError as error:
        raise FrameError(f"{reference.file}: {error}") from error
    prefix = _read_prefix(data)
    if prefix is None or len(data) != prefix.length:
        raise FrameError(f"{reference.file} holds no whole record at byte {reference.offset}")
    head = _checked_head(prefix, data[_PREFIX.size : _PREFIX.size + prefix.head])
    body = data[_PREFIX.size + prefix.head :]
    if head is None or xxhash.xxh3_64_intdigest(body) != prefix.body_sum:
        raise FrameError(
            f"{reference.file}: the record at byte {reference.offset} does not match its checksum"
        )
    fields = head.model_dump(exclude={"responses"})
    answers = tuple((index, answer) for index, answer in json.loads(zlib.decompress(body)))
    return ShardResponses(**fields, responses=answers)
