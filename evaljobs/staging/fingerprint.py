"""Safetensors headers, and a checkpoint's identity: a digest of names, sizes, mtimes, headers and samples.

Rules: a header and a few small samples are read, never a whole file, and with the standard library alone. A checkpoint
on shared storage and its copy have the same identity.

Called by `coordinator/intake/checkpoint.py` when a checkpoint is announced, and by `publish.py` for the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from evaljobs.contract.specs import CheckpointFile

HEADER_LIMIT = 100 << 20  # bytes; the safetensors library's own limit of a header
SAMPLE_BYTES = 4096
# {"xxh3_128": {file name: hex}}, written beside the weights when they are saved
SAVE_SUMS = "evalspan.sums.json"


class BadWeights(ValueError):  # noqa: N818 (a fact about a file, not about our code)
    """A weight file is not what its format says: truncated, half-written, or no safetensors at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A safetensors header: its raw JSON, and name -> (dtype such as "BF16", bytes) of its tensors."""

    raw: bytes
    tensors: Mapping[str, tuple[str, int]]


def is_safe_name(name: str) -> bool:
    """Whether `name` stays inside the folder that it is relative to, and is spelt in one way only."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts) and "\0" not in name and "/".join(parts) == name and ".." not in parts and name[0] != "/"
    )


def read_header(path: str | Path) -> Header:
    """Read the header of a safetensors file (https://huggingface.co/docs/safetensors: u64 length, JSON, data).

    Raises BadWeights where the file is shorter or longer than its header says, OSError where it cannot be read.
    """
    with Path(path).open("rb") as file:
        actual = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(HEADER_LIMIT, actual - 8):
            raise BadWeights(f"no room for its safetensors header in {actual} bytes (half-written?)")
        raw = file.read(length)
    try:
        table: dict[str, Any] = json.loads(raw)
        entries = {
            n: (e["dtype"], *map(int, e["data_offsets"])) for n, e in table.items() if n != "__metadata__"
        }
        end = max((stop for _, _, stop in entries.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadWeights("its safetensors header is no header") from error
    expected = 8 + len(raw) + end
    if expected != actual:
        raise BadWeights(f"its header says {expected} bytes, the file has {actual}")
    tensors = {name: (str(dtype), stop - start) for name, (dtype, start, stop) in entries.items()}
    return Header(raw=raw, tensors=tensors)


def fingerprint(path: str | Path) -> bytes:
    """A digest of a weight file's header and of samples at its quarters and its end (16 KiB read and the header).

    Two saves of one model have the same sizes and headers, and where mtimes are whole seconds (or were restored by a
    copy) nothing else tells them apart: training moves every tensor, so the samples do.
    """
    sha = hashlib.sha256()
    if str(path).endswith(".safetensors"):
        sha.update(read_header(path).raw)
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for quarter in (1, 2, 3, 4):
            offset = max(0, size * quarter // 4 - SAMPLE_BYTES)
            sha.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return sha.digest()


def identity(files: Iterable[CheckpointFile], folder: str | Path) -> str:
    """The digest of a checkpoint: 32 hex digits over `files` (their order does not matter) and their fingerprints.

    `folder` holds the files' bytes: the checkpoint itself or a copy of it. Raises BadWeights and OSError.
    """
    rows = []
    for f in sorted(files, key=lambda f: f.name):
        weights = f.name.endswith((".safetensors", ".bin"))
        sample = fingerprint(Path(folder) / f.name).hex() if weights else ""
        rows.append((f.name, f.size, f.mtime_ns, sample))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
