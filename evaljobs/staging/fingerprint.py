"""Safetensors headers, and the identity of a checkpoint or an adapter: a digest of its files, each read once.

Rules: weights count by header, size, mtime and a sample of every tensor, so no weight file is read whole; every other file
counts by content, regardless of its mtime. A checkpoint on shared storage and its copy have the same identity.

Called by `coordinator/intake/checkpoint.py` when a checkpoint is announced, by `precursor.py` for the copy, and by
`coordinator/intake/source_keys.py` for the folders that model arguments name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import xxhash

from evaljobs.contract.specs import CheckpointFile, CheckpointSpec
from evaljobs.staging.copy import SourceChanged, check_source

HEADER_LIMIT = 100 << 20  # bytes; the safetensors library's own limit of a header
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
)  # larger files than HEADER_LIMIT count as weights, too
SAMPLE_BYTES = 1024
SAMPLED_PART = 64 << 20  # larger tensors are sampled in parts of this size
MOST_TENSORS = 1_000_000  # in all weight files; a model of 10**12 parameters has some 10**5
PLAIN_PARTS = 64  # parts of a weight file in another format, each sampled like a tensor
# {"xxh3_128": {file name: hex}}, written beside the weights when they are saved
SAVE_SUMS = "evalspan.sums.json"


class BadWeights(ValueError):  # noqa: N818 (a fact about a file, not about our code)
    """A weight file that violates its format: truncated, half-written, or not safetensors at all."""


class FileRow(NamedTuple):
    """The identity of one file: a digest of its samples, its bytes and mtime; or only a digest of its content."""

    name: str
    digest: str
    size: int = 0
    mtime_ns: int = 0


Tensors = Mapping[str, tuple[str, int]]  # name -> (dtype as in the header, such as "BF16"; bytes)


class Identity(NamedTuple):
    """What one pass over a checkpoint's files yields. 32 hex digits each: `digest` of everything that counts, `samples` of the
    same without mtimes.
    """

    digest: str
    samples: str
    tensors: Mapping[str, Tensors]  # by safetensors file


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A safetensors header: its raw JSON, its tensors, and (first byte, end) of each."""

    raw: bytes
    tensors: Tensors
    spans: Sequence[tuple[int, int]]


def is_safe_name(name: str) -> bool:
    """Return whether `name` stays inside its folder and is in canonical form."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts) and "\0" not in name and "/".join(parts) == name and ".." not in parts and name[0] != "/"
    )


def read_header(path: str | Path) -> Header:
    """Read the header of a safetensors file (https://huggingface.co/docs/safetensors: u64 length, JSON, data).

    Raise BadWeights if the file is shorter or longer than its header says, OSError if it cannot be read.
    """
    with Path(path).open("rb") as file:
        return _header_in(file)


def _header_in(file: BinaryIO) -> Header:
    actual = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(HEADER_LIMIT, actual - 8):
        raise BadWeights(f"too short for a safetensors header: {actual} bytes (half-written?)")
    raw = file.read(length)
    try:
        table: dict[str, Any] = json.loads(raw)
        entries = {
            n: (e["dtype"], *map(int, e["data_offsets"])) for n, e in table.items() if n != "__metadata__"
        }
        spans = sorted((start, stop) for _, start, stop in entries.values())
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadWeights("its safetensors header is invalid") from error
    end = 0
    for start, stop in spans:
        if start != end or stop < start:
            raise BadWeights("its safetensors header describes tensors that overlap or leave a gap")
        end = stop
    data = 8 + len(raw)
    expected = data + end
    if expected != actual:
        raise BadWeights(f"its header says {expected} bytes, the file has {actual}")
    return Header(
        raw=raw,
        tensors={name: (str(dtype), stop - start) for name, (dtype, start, stop) in entries.items()},
        spans=[(data + start, data + stop) for start, stop in spans],
    )


def weights_fingerprint(path: str | Path) -> tuple[str, Tensors]:
    """Return a digest (hex) of a weight file's header and samples, and its tensors; none are known of another format.

    Samples are of every tensor, or of 64 parts, and at the file's quarters and end. Two saves of one model have equal sizes
    and headers, and with mtimes in whole seconds (or restored by a copy) nothing else distinguishes them: training changes
    every tensor, so the samples do. Raise BadWeights, which names the file.
    """
    sha = hashlib.sha256()
    tensors: Tensors = {}
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if str(path).endswith(".safetensors"):
            try:
                header = _header_in(file)
            except BadWeights as error:
                raise BadWeights(f"{path}: truncated or damaged, {error}") from error
            tensors = header.tensors
            sha.update(header.raw)
            places = [place for span in header.spans for place in _places(*span, 1)]
        else:
            places = list(_places(0, size, PLAIN_PARTS))
        places += [max(0, size * quarter // 4 - SAMPLE_BYTES) for quarter in (1, 2, 3, 4)]
        for place in places:  # all are requested first: slow storage answers concurrently
            os.posix_fadvise(file.fileno(), place, SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
        for place in places:
            sha.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
    return sha.hexdigest(), tensors


def hash_file(path: Path) -> str:
    """Return the xxh3_128 (hex) of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _places(start: int, stop: int, parts: int) -> Iterator[int]:
    """Yield where the samples of these bytes begin: in the middle of each of `parts` parts, or of more for large ones."""
    parts = max(parts, -(-(stop - start) // SAMPLED_PART))
    for part in range(parts):
        middle = start + (stop - start) * (2 * part + 1) // (2 * parts)
        yield max(start, middle - SAMPLE_BYTES // 2)


def is_weights(name: str, size: int) -> bool:
    """Return whether a file counts by header, size, mtime and samples, and not by content."""
    return name.endswith(WEIGHTS) or size > HEADER_LIMIT


def checkpoint_identity(files: Iterable[CheckpointFile], folder: str | Path) -> Identity:
    """Return the identity of a checkpoint, over `files` (in any order) and their contents, and its tensors.

    `folder` contains the files: the checkpoint itself or a copy of it. Raise OSError, or BadWeights, which names the file.
    """
    return _identity((f.name, f.size, f.mtime_ns, Path(folder) / f.name) for f in files)


def content_of(sums: Mapping[str, str]) -> str:
    """Return 32 hex digits over whole files: `sums` has the xxh3_128 of each. Checkpoints of equal content are the same."""
    return _digest(sorted(sums.items()))


def check_storage(checkpoint: CheckpointSpec) -> None:
    """Raise SourceChanged unless the checkpoint on storage is the announced one."""
    for file in checkpoint.files:
        path = Path(checkpoint.source) / file.name
        check_source(path, file.size, announced_mtime(file))
    check_identity(checkpoint, checkpoint.source)


def check_identity(checkpoint: CheckpointSpec, folder: str | Path) -> None:
    """Raise SourceChanged unless `folder`, the checkpoint's own or a copy, contains what was announced."""
    _check(checkpoint.source, checkpoint.digest, lambda: checkpoint_identity(checkpoint.files, folder).digest)


def check_folder(place: str | Path, announced: str) -> None:
    """Raise SourceChanged unless an adapter has the announced `folder_identity`."""
    _check(place, announced, lambda: folder_identity(place))


def _check(place: str | Path, announced: str, look: Callable[[], str]) -> None:
    try:
        if look() == announced:
            return
    except FileNotFoundError as error:
        raise SourceChanged(f"{error.filename} is gone") from error
    except BadWeights as error:
        raise SourceChanged(str(error)) from error
    raise SourceChanged(f"{place} holds other content than was announced")


def announced_mtime(file: CheckpointFile) -> int | None:
    """Return the mtime in ns that a file must still have; None if its content counts."""
    return file.mtime_ns if is_weights(file.name, file.size) else None


def folder_identity(place: str | Path) -> str:
    """Return the identity of an adapter, or of any other file or folder that a model argument names, like `checkpoint_identity`.

    Hidden files do not count. Raises BadWeights and OSError.
    """
    place = Path(place)
    if not place.is_dir():
        found = place.stat()
        return _identity([(place.name, found.st_size, found.st_mtime_ns, place)]).digest
    there = []
    for path, folders, files in os.walk(place):
        folders[:] = [each for each in folders if not each.startswith((".", "__pycache__"))]
        for file in (Path(path) / name for name in files if name[0] != "."):
            if file.is_file():
                found = file.stat()
                there.append((file.relative_to(place).as_posix(), found.st_size, found.st_mtime_ns, file))
    return _identity(there).digest


def _identity(files: Iterable[tuple[str, int, int, Path]]) -> Identity:
    """Return the identity of files: (name, bytes, mtime in ns, path) of each."""
    rows: list[FileRow] = []
    tensors: dict[str, Tensors] = {}
    for name, size, mtime_ns, place in files:
        if not is_weights(name, size):
            rows.append(FileRow(name, hash_file(place)))
            continue
        digest, tensors[name] = weights_fingerprint(place)
        rows.append(FileRow(name, digest, size, mtime_ns))
        if sum(map(len, tensors.values())) > MOST_TENSORS:
            raise BadWeights(f"{place.parent}: has more than {MOST_TENSORS} tensors, which no model has")
    rows.sort()
    return Identity(_digest(rows), _digest([row._replace(mtime_ns=0) for row in rows]), tensors)


def _digest(rows: Sequence[tuple[object, ...]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
