"""Columns of an evaluation's documents, merged from its entries' files into one.

Rule: an evaluation is merged at its end, or at its first comparison, and once more after a retry. If its folder is not
writable, the next process merges it again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaljobs.contract.archived_files import file_exists, files_in, open_file, read_bytes
from evaljobs.contract.columns import Documents, pack_columns, unpack_columns
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import write_atomic

if TYPE_CHECKING:
    from evaljobs.contract.columns import Columns, Part


def read_documents(paths: EvaluationPaths) -> Documents:
    """Return all known documents of an evaluation. Raise OperatorError if one of their files is damaged."""
    with contextlib.suppress(FileNotFoundError):  # a missing file: another process has merged it meanwhile
        return _documents(paths.root, _stamps(paths))
    return _documents(paths.root, _stamps(paths))


def is_merged(paths: EvaluationPaths) -> bool:
    """Return whether no entry's file is left to merge."""
    return not any(paths.scores.glob("*.parquet"))


def _stamps(paths: EvaluationPaths) -> tuple[int, ...]:
    """Return file stamps that change whenever `read_documents` may."""
    found = []
    for path in (paths.documents, paths.scores, paths.results):
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


@lru_cache(maxsize=2)  # a comparison has two; one of 60 tasks x 14,000 documents takes 60 MB
def _documents(root: Path, _stamps: tuple[int, ...]) -> Documents:
    paths = EvaluationPaths(root)
    whole = file_exists(paths.documents)
    new = list(paths.scores.glob("*.parquet")) if whole else files_in(paths.scores, "*.parquet")
    kept = unpack_columns(paths.documents.read_bytes(), str(paths.documents)) if whole else None
    if kept is not None and not new:
        return kept
    parts: dict[Part, Columns] = {}
    for file in sorted(
        new, key=lambda f: (f.stem[:3] == f.stem[-3:], f.name)
    ):  # its own file counts, not a linked one
        entry, of = map(int, file.stem.split("-"))
        found = unpack_columns(read_bytes(file), str(file)).parts()
        parts |= {(entry, task): one for (number, task), one in found.items() if number == of}
    entries = {entry for entry, _ in parts}
    earlier = {} if kept is None else kept.parts()
    parts |= {part: one for part, one in earlier.items() if part[0] not in entries}
    if not parts:
        return Documents({}, {})
    content = pack_columns(dict(sorted(parts.items())))
    if paths.results.exists():
        with contextlib.suppress(OSError):  # another user's folder, or a full disk
            write_atomic(paths.documents, content)
            for file in new:
                file.unlink(missing_ok=True)
    return unpack_columns(content, str(paths.documents))


def sample_file(paths: EvaluationPaths, task: str) -> Path | None:
    """Return lm-eval's samples of a task, loose or archived; None if it was not scored."""
    return next(iter(files_in(paths.samples, f"samples_{slug(task)}_[0-9][0-9][0-9].jsonl")), None)


def sample_lines(samples: Path) -> Iterator[dict[str, Any]]:
    """Yield documents of a sample file; broken lines are skipped."""
    with open_file(samples) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
