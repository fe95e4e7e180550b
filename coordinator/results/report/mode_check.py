"""Differences between an exact and a fast evaluation of the same documents, for `eval --check-fast`.

Rule: compares the samples with all digits: log-likelihoods by request, answers, and the metrics of each document. Documents
are matched by number, so both evaluations must be of the same suite with the same limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.results.report.scores import scores_of
from coordinator.results.report.stored_documents import sample_file
from coordinator.results.report.tables import Sheet, print_parts
from evaljobs.contract.archived_files import open_file
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record

GENERATES = "generate_until"  # lm-eval's output type


class TaskCheck(Record):
    """One leaf task in both modes. Likelihood figures are None if the task has none."""

    task: str
    documents: int
    worst: float | None  # largest absolute difference of a log-likelihood
    mean: float | None  # mean absolute difference
    argmax: int | None  # documents with another likeliest choice
    metrics: int  # documents with another value of a metric
    answers: int | None  # generated answers that differ; None if the task generates none


class ScoreCheck(Record):
    """A score in both modes; None if an evaluation lacks it."""

    name: str
    exact: float | None
    fast: float | None


class ModeCheck(Record):
    """The complete comparison; `--json` prints exactly this."""

    schema_version: int = 1
    evaluations: dict[str, str]  # mode -> evaluation id
    tasks: tuple[TaskCheck, ...]
    scores: tuple[ScoreCheck, ...]


def check_modes(folders: Mapping[str, Path], results: Mapping[str, Mapping[str, Any]]) -> ModeCheck:
    """Compare both modes. `folders`, `results`: mode -> an evaluation's folder, and its results in lm-eval's shape."""
    exact, fast = EvaluationPaths(folders["exact"]), EvaluationPaths(folders["fast"])
    tasks = []
    for task, config in sorted(results["exact"].get("configs", {}).items()):
        before, after = _samples(exact, task), _samples(fast, task)
        kind = str(config.get("output_type", ""))
        tasks.append(
            task_check(task, kind, [(before[d], after[d]) for d in sorted(before.keys() & after.keys())])
        )
    values = [{score.name: score.value for score in scores_of(results[mode])} for mode in ("exact", "fast")]
    names = dict.fromkeys(name for some in values for name in some)
    return ModeCheck(
        evaluations={mode: folder.name for mode, folder in folders.items()},
        tasks=tuple(tasks),
        scores=tuple(ScoreCheck(name=n, exact=values[0].get(n), fast=values[1].get(n)) for n in names),
    )


def task_check(
    task: str, kind: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> TaskCheck:
    """Compare one task. `pairs`: samples of one document and filter, exact and fast. `kind`: lm-eval's output type."""
    differences: list[float] = []
    argmax = metrics = answers = 0
    several = False
    for exact, fast in pairs:
        metrics += any(exact.get(name) != fast.get(name) for name in exact.get("metrics", ()))
        if kind == GENERATES:
            answers += exact["resps"] != fast["resps"]
            continue
        before, after = _likelihoods(exact["resps"]), _likelihoods(fast["resps"])
        differences += [abs(a - b) for a, b in zip(before, after, strict=True)]
        several |= len(before) > 1
        argmax += before.index(max(before)) != after.index(max(after))
    return TaskCheck(
        task=task,
        documents=len({exact.get("doc_id") for exact, _ in pairs}),
        worst=max(differences, default=None),
        mean=sum(differences) / len(differences) if differences else None,
        argmax=argmax if several else None,
        metrics=metrics,
        answers=answers if kind == GENERATES else None,
    )


def _likelihoods(resps: Sequence[Any]) -> list[float]:
    """Return the likelihood of each request of a document, including clones. lm-eval stores numbers as text in its samples."""
    return [
        float(answer[0] if isinstance(answer, list) else answer) for request in resps for answer in request
    ]


def _samples(paths: EvaluationPaths, task: str) -> dict[tuple[int, str], Mapping[str, Any]]:
    """Return (document, filter) -> sample; empty if the task has not been scored."""
    file = sample_file(paths, task)
    if file is None:
        return {}
    with open_file(file) as lines:
        return {(int(s["doc_id"]), str(s.get("filter", ""))): s for s in map(json.loads, lines)}


def show_mode_check(console: Console, made: ModeCheck) -> None:
    """Print a row per task, then a row per score."""
    table = Sheet("fast against exact", "task", "documents", "worst", "mean", "argmax", "metrics", "answers")
    for one in made.tasks:
        differences = ("-" if x is None else f"{x:.1e}" for x in (one.worst, one.mean))
        others = ("-" if x is None else str(x) for x in (one.argmax, one.metrics, one.answers))
        table.add(one.task, str(one.documents), *differences, *others)
    scores = Sheet("", "score", "exact", "fast", "difference")
    for score in made.scores:
        both = score.exact is not None and score.fast is not None
        values = ("-" if x is None else f"{x:.4f}" for x in (score.exact, score.fast))
        scores.add(score.name, *values, f"{(score.fast or 0) - (score.exact or 0):+.4f}" if both else "-")
    said = "worst, mean: absolute difference of a log-likelihood; argmax, metrics, answers: documents that differ"
    ids = (f"{mode}: {evaluation}" for mode, evaluation in made.evaluations.items())
    print_parts(console, table, said, "", scores, "", *ids)
