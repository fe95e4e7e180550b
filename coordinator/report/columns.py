"""Columns of a task's documents: from the file that its scoring wrote, else made of its samples and kept.

Rule: an evaluation of an earlier version is indexed at its first comparison; where its folder may not be written to, the
next comparison reads its samples again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.columns import columns_of, means, packed, unpacked
from evaljobs.contract.folded import files_in, open_file, read_bytes
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError

if TYPE_CHECKING:
    from evaljobs.contract.columns import Columns


def columns(paths: EvaluationPaths, record: EvaluationRecord, task: str) -> Columns | None:
    """A leaf task's columns; None where it has neither a file of them nor samples. OperatorError where it is damaged."""
    for file in files_in(paths.scores, f"[0-9][0-9][0-9]-{slug(task)}.npz"):
        return unpacked(read_bytes(file), str(file))
    samples = sample_file(paths, task)
    if samples is None:
        return None
    entry = int(samples.stem.rpartition("_")[2])
    made = columns_of(sample_lines(samples), record.suite.tasks[entry].cluster)
    with contextlib.suppress(OSError):  # another user's folder, or a full disk
        write_atomic(paths.columns(task, entry), packed(made))
    return made


def sample_file(paths: EvaluationPaths, task: str) -> Path | None:
    """lm-eval's samples of a task, loose or archived; None where it was not scored."""
    return next(iter(files_in(paths.samples, f"samples_{slug(task)}_[0-9][0-9][0-9].jsonl")), None)


def with_signals(
    paths: EvaluationPaths, record: EvaluationRecord, results: Mapping[str, Any], *, index: bool = True
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
