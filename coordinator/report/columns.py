"""Columns of an evaluation's documents, in one file: merged from those of its entries, or made of its samples, and kept.

Rule: an evaluation that has ended is merged at its end, or at its first comparison, and once more after a retry. Where its
folder may not be written to, the next process merges it again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.columns import Documents, columns_of, means, packed, unpacked
from evaljobs.contract.folded import exists, files_in, open_file, read_bytes
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError

if TYPE_CHECKING:
    from evaljobs.contract.columns import Columns, Part


def documents(paths: EvaluationPaths, record: EvaluationRecord | None) -> Documents:
    """All documents of an evaluation that are known. OperatorError where a file of them is damaged."""
    clusters = () if record is None else tuple(task.cluster for task in record.suite.tasks)
    for _ in range(2):  # a file that went: another process has merged it meanwhile
        with contextlib.suppress(FileNotFoundError):
            return _documents(paths.root, _stamps(paths), clusters)
    return _documents(paths.root, _stamps(paths), clusters)


def columns(paths: EvaluationPaths, record: EvaluationRecord | None, task: str) -> Columns | None:
    """A leaf task's columns; None where neither they nor its samples are there. OperatorError where they are damaged."""
    return documents(paths, record).of(task)


def is_merged(paths: EvaluationPaths) -> bool:
    """Return whether no entry's file is left to be merged."""
    return not any(paths.scores.glob("*.parquet"))


def _stamps(paths: EvaluationPaths) -> tuple[int, ...]:
    """What changes where `documents` may."""
    found = []
    for path in (paths.documents, paths.scores, paths.samples, paths.results):
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


@lru_cache(maxsize=2)  # a comparison has two; one of 60 tasks x 14,000 documents takes 60 MB
def _documents(root: Path, _stamps: tuple[int, ...], clusters: tuple[str | None, ...]) -> Documents:
    paths = EvaluationPaths(root)
    whole = exists(paths.documents)
    new = list(paths.scores.glob("*.parquet")) if whole else files_in(paths.scores, "*.parquet")
    kept = unpacked(paths.documents.read_bytes(), str(paths.documents)) if whole else None
    if kept is not None and not new:
        return kept
    parts: dict[Part, Columns] = {}
    for file in sorted(
        new, key=lambda f: (f.stem[:3] == f.stem[-3:], f.name)
    ):  # its own counts, not a linked one
        entry, of = map(int, file.stem.split("-"))
        found = unpacked(read_bytes(file), str(file)).parts()
        parts |= {(entry, task): one for (number, task), one in found.items() if number == of}
    entries = {entry for entry, _ in parts}
    earlier = _of_samples(paths, clusters, entries) if kept is None else kept.parts()
    parts |= {part: one for part, one in earlier.items() if part[0] not in entries}
    if not parts:
        return Documents({}, {})
    content = packed(dict(sorted(parts.items())))
    if paths.results.exists():
        with contextlib.suppress(OSError):  # another user's folder, or a full disk
            write_atomic(paths.documents, content)
            for file in new:
                file.unlink(missing_ok=True)
    return unpacked(content, str(paths.documents))


def _of_samples(
    paths: EvaluationPaths, clusters: tuple[str | None, ...], without: set[int]
) -> dict[Part, Columns]:
    """Columns made of samples, of all entries but those `without`."""
    results = json.loads(paths.results.read_bytes()) if paths.results.exists() else {}
    names = {slug(task): task for task in results.get("n-samples", {})}
    samples = files_in(paths.samples, "samples_*_[0-9][0-9][0-9].jsonl")
    files = {(int(f.stem[-3:]), f.stem[len("samples_") : -4]): f for f in samples}
    found: dict[Part, Columns] = {}
    for (entry, name), file in files.items():
        if entry not in without:
            cluster = clusters[entry] if entry < len(clusters) else None
            found[entry, names.get(name, name)] = columns_of(sample_lines(file), cluster)
    return found


def sample_file(paths: EvaluationPaths, task: str) -> Path | None:
    """lm-eval's samples of a task, loose or archived; None where it was not scored."""
    return next(iter(files_in(paths.samples, f"samples_{slug(task)}_[0-9][0-9][0-9].jsonl")), None)


def with_signals(
    paths: EvaluationPaths, record: EvaluationRecord | None, results: Mapping[str, Any], *, index: bool = True
) -> dict[str, Any]:
    """results.json with the dense signals of its leaf tasks as "dense", which `scores_of` reads.

    `index`: those that it lacks, as of an earlier version, are computed from columns.
    """
    signals = dict(results.get("evalspan", {}).get("signals", {}))
    for task in results.get("n-samples", {}).keys() - signals.keys() if index else ():
        with contextlib.suppress(OperatorError):  # a damaged file hides no score
            if (found := columns(paths, record, task)) is not None:
                signals[task] = means(found)
    return {**results, "dense": {task: signals[task] for task in sorted(signals)}}


def sample_lines(samples: Path) -> Iterator[dict[str, Any]]:
    """Documents of a sample file; a broken line is left out."""
    with open_file(samples) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
