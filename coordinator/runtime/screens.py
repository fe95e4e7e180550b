"""Screen evaluations: finds the reference to compare with, and reads its documents and those scored so far.

Rule: the record names the reference and the digest of the order of asking; `decide.evaluation.screened_documents` decides the rest
from the files read here. Called from `present_inputs`, `effects`, and `finalize`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from coordinator.decide.evaluation.events import ScreenJudged
from coordinator.decide.evaluation.records import EvaluationRecord, Screening, ScreenScore
from coordinator.decide.evaluation.screened_documents import (
    ReferenceDocuments,
    asking_blocks,
    judge_documents,
)
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import CurvePoint, make_series
from coordinator.results.report.load_series import find_heads, read_document
from coordinator.results.report.row_verdicts import is_mean
from coordinator.results.report.scores import Head, ScoreValue, head_of
from coordinator.results.report.stored_documents import read_documents
from coordinator.results.report.training import mean_points
from coordinator.runtime.rescoring import OF_SUITES, OF_TASKS
from coordinator.runtime.summary import read_evaluation
from evaljobs.contract.archived_files import read_bytes
from evaljobs.contract.columns import DENSE, unpack_columns
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import Blocks, TaskEntry

# --- the reference ---------------------------------------------------------------------------------------------------


def with_reference(record: EvaluationRecord, work: WorkPaths) -> EvaluationRecord:
    """Return the record of a screen evaluation with its reference, any other unchanged. Raise OperatorError if none fits."""
    if record.suite.screen is None:
        return record
    if (known := read_evaluation(work.evaluation(record.evaluation_id))) is not None:
        return record.model_copy(update={"screening": known.screening})  # it was accepted before
    named = record.suite.screen.reference
    try:
        found = _candidates(record, work, named)
    except OperatorError as error:
        raise OperatorError(_refusal(record, named, str(error))) from error
    unfit = []
    for head in found:
        unfit.append(_unfit(record, work, head.evaluation_id))
        if not unfit[-1]:
            screening = Screening(reference=head.evaluation_id, order="")
            new = record.model_copy(update={"screening": screening})
            return new.model_copy(
                update={"screening": screening.model_copy(update={"order": order_of(new, work)})}
            )
    none = "no earlier checkpoint of this training has a full evaluation"
    raise OperatorError(_refusal(record, named, next(iter(unfit), none)))


def _refusal(record: EvaluationRecord, named: str, why: str) -> str:
    return (
        f'suite {record.suite.name}: mode "screen" needs a reference ([screen] reference = "{named}"): {why}; evaluate a checkpoint of '
        'this training with the same tasks and mode = "exact" first'
    )


def _candidates(record: EvaluationRecord, work: WorkPaths, named: str) -> Sequence[Head]:
    """Return full evaluations that may be the reference, the preferred one first. "best": by the mean that reports show."""
    mine = Head(**head_of(record))
    if named not in ("previous", "best") and not named.isdecimal():
        known = read_evaluation(work.evaluation(named))
        if known is None:
            raise OperatorError(f"there is no evaluation {named} in {work.root}")
        return [Head(**head_of(known))]
    folder = str(PurePath(mine.checkpoint).parent)
    heads = [head for head in find_heads(work.root, folder, mixed=True) if head.mode != "screen"]
    if named.isdecimal():
        heads = [head for head in heads if head.step == int(named)]
        if not heads:
            raise OperatorError(f"no checkpoint of step {named} in {folder} has a full evaluation")
        return sorted(heads, key=lambda head: -head.accepted_at)
    heads = [head for head in heads if head.checkpoint != mine.checkpoint and _is_before(head, mine)]
    if named == "previous":
        return sorted(heads, key=lambda head: (-(head.step or 0), -head.accepted_at))
    made = [read_document(work.evaluation(head.evaluation_id)) for head in heads]
    means: dict[str, CurvePoint] = {}
    for suite in {one.suite for one in made}:
        means |= mean_points(make_series(one for one in made if one.suite == suite))
    ranked = (one for one in made if one.evaluation_id in means)
    return sorted(ranked, key=lambda one: -means[one.evaluation_id].value)


def _is_before(head: Head, mine: Head) -> bool:
    return head.step is None or mine.step is None or head.step < mine.step


def _unfit(record: EvaluationRecord, work: WorkPaths, name: str) -> str:
    """Return why an evaluation cannot be the reference; "" if it can."""
    known, made = read_evaluation(work.evaluation(name)), read_document(work.evaluation(name))
    if known is None or known.suite.mode == "screen":
        return f"{name} is a screen evaluation itself"
    if not made.scores:
        return f"{name} has no scores{' yet' if made.status == 'open' else ''}"
    unlike = _unlike(record, known) or next(_unlike_tasks(record, known, made.failed), "")
    return unlike and f"{name} {unlike}"


def _unlike(record: EvaluationRecord, known: EvaluationRecord) -> str:
    """Return how an evaluation's training, model or prompts differ; "" if they do not."""
    if PurePath(known.checkpoint.announced).parent != PurePath(record.checkpoint.announced).parent:
        return "belongs to another training"
    if known.model != record.model or known.inputs.model != record.inputs.model:
        return "ran with other settings of the model"
    changed = (key for key in OF_SUITES if getattr(known.suite, key) != getattr(record.suite, key))
    return next((f"was asked with another {key}" for key in changed), "")


def _unlike_tasks(
    record: EvaluationRecord, known: EvaluationRecord, failed: Collection[str]
) -> Iterator[str]:
    """Yield how tasks of an evaluation differ from the tasks to ask."""
    theirs = {task.name: number for number, task in enumerate(known.suite.tasks)}
    for number, task in enumerate(record.suite.tasks):
        if task.name in record.not_asked:
            continue
        if task.name not in theirs or task.name in known.not_asked or task.name in failed:
            yield f"has no score of {task.name}"
            return
        other = theirs[task.name]
        its = known.suite.tasks[other]
        changed = [key for key in (*OF_TASKS, "judge", "cluster") if getattr(task, key) != getattr(its, key)]
        if changed:
            yield f"was asked {task.name} with another {changed[0]}"
        if known.inputs.entries[other : other + 1] != record.inputs.entries[number : number + 1]:
            yield f"was asked {task.name} before its files or data changed"


@lru_cache(maxsize=4)
def _documents_of(work: Path, reference: str, tasks: tuple[str, ...]) -> Mapping[str, ReferenceDocuments]:
    """Return the reference's documents of these tasks. Raise OperatorError if some are missing, or a score is not their mean."""
    import numpy as np  # noqa: PLC0415

    paths = EvaluationPaths(work / reference)
    known, made, columns = read_evaluation(paths), read_document(paths), read_documents(paths)
    if known is None:
        raise OperatorError(f"{reference} cannot be read")
    scores: dict[str, list[ScoreValue]] = {}
    for score in made.scores:
        scores.setdefault(score.task, []).append(score)
    alias = {rows.start: name for name, rows in columns.tasks.items()}
    entries = [task.name for task in known.suite.tasks]
    parts = columns.parts()
    found = {}
    for task in tasks:
        entry = entries.index(task)
        leaves = {leaf: its for (number, leaf), its in parts.items() if number == entry}
        if not leaves:
            raise OperatorError(f"the documents of {task} in {reference} were removed")
        first: dict[str, tuple[str, bool]] = {}
        for leaf, its in leaves.items():
            for score in scores.get(alias[columns.rows[entry, leaf].start], ()):
                name = f"{score.metric},{score.filter}"
                if (
                    name in its
                    and score.filter != DENSE
                    and is_mean(float(np.nanmean(its[name])), score.value)
                ):
                    first.setdefault(leaf, (name, score.higher_is_better))
        if len(first) < len(leaves) or len(set(first.values())) > 1:
            raise OperatorError(
                f"{task}: its score is not a mean over its documents, or its leaf tasks have different metrics: remove it from the suite"
            )
        found[task] = ReferenceDocuments(leaves, *next(iter(first.values())))
    return found


def _asked(record: EvaluationRecord) -> tuple[TaskEntry, ...]:
    return tuple(task for task in record.suite.tasks if task.name not in record.not_asked)


def reference_documents(record: EvaluationRecord, work: WorkPaths) -> Mapping[str, ReferenceDocuments]:
    """Return the reference's documents of each task asked. Raise OperatorError as `_documents_of`."""
    assert record.screening is not None
    return _documents_of(work.root, record.screening.reference, tuple(task.name for task in _asked(record)))


def blocks_of(record: EvaluationRecord, work: WorkPaths, task: TaskEntry) -> dict[str, Blocks]:
    """Return the documents of each leaf task of one task of the suite, block by block."""
    assert record.suite.screen is not None
    return asking_blocks(reference_documents(record, work)[task.name], task, record.suite.screen)


def order_of(record: EvaluationRecord, work: WorkPaths) -> str:
    """Return the digest of the order in which documents are asked."""
    every = [[task.name, blocks_of(record, work, task)] for task in _asked(record)]
    return hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()[:8]


def judge_screen(record: EvaluationRecord, entry: int, work: WorkPaths, now: float) -> ScreenJudged:
    """Read an entry's scored documents and judge them. Raise OperatorError if they differ from the reference's."""
    assert record.suite.screen is not None
    task, file = record.suite.tasks[entry], work.evaluation(record.evaluation_id).columns(entry)
    parts = unpack_columns(read_bytes(file), str(file)).parts()
    scored = {leaf: columns for (_, leaf), columns in parts.items()}
    reference = reference_documents(record, work)[task.name]
    score, settled = judge_documents(scored, reference, task, record.suite.screen)
    return ScreenJudged(at=now, entry=entry, settled=settled, score=score)


def screens_of(record: EvaluationRecord, found: Iterable[ScreenScore]) -> dict[str, Any]:
    """Return the part of results.json about a screen evaluation."""
    assert record.suite.screen is not None
    assert record.screening is not None
    asked = record.suite.screen.model_dump(include={"max_drop", "level", "power", "seed"})
    return {"reference": record.screening.reference, **asked, "tasks": [one.model_dump() for one in found]}
