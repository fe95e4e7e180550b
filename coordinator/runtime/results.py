"""The results of an evaluation as a value, and as flat rows. For `coordinator.api`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.state import State
from coordinator.report.learning_curves import SCORES, Point, ScoreValue, scores_of
from coordinator.report.measurements import Report
from coordinator.runtime import finalize
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record

SCORE_COLUMNS = (
    "task", "filter", "metric", "value", "stderr", "documents", "n_shot", "version", "higher_is_better",
)  # fmt: skip


class Results(Record):
    """An evaluation's scores and costs, as far as it is.

    `scores` has a row for each task, metric and filter that has a value; `rows()` gives them flat.
    """

    model_config = SCORES

    evaluation_id: str
    status: str  # running | done | failed | cancelled; failed: at least one task has no score
    suite: str
    checkpoint: str
    step: int | None
    scores: tuple[ScoreValue, ...]
    failed: dict[str, str]  # task -> its error
    makespan_seconds: float | None  # from acceptance to the last score
    gpu_seconds: float | None
    folder: Path  # holds results.json, samples, logs and the journal
    note: str = ""  # of `evaluate`: why nothing was run
    report: Report = Field(exclude=True, repr=False)  # where the time went
    raw: dict[str, Any] = Field(exclude=True, repr=False)  # results.json, in lm-eval's shape

    @property
    def complete(self) -> bool:
        """Has every task its score, and every item counted?"""
        return self.status == "done" and not self.raw.get("unscored")

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for each score, as `series` gives them."""
        return rows_of(
            Point(
                evaluation_id=self.evaluation_id,
                suite=self.suite,
                checkpoint=self.checkpoint,
                step=self.step,
                status=self.status,
                accepted_at=self.report.accepted_at,
                makespan_seconds=self.makespan_seconds,
                gpu_seconds=self.gpu_seconds,
                scores=self.scores,
            )
        )


def results_of(
    state: State, paths: EvaluationPaths, events: Sequence[AnyEvent] | None = None, note: str = ""
) -> Results:
    """`events`: of the journal, where they were read; None: the report at the end is read, too."""
    if events is None and paths.report.exists():
        report = Report.model_validate_json(paths.report.read_bytes())
    else:
        report = finalize.report_of(state, paths, events)
    raw = json.loads(paths.results.read_bytes()) if paths.results.exists() else finalize.merged_results(state)
    return Results(
        evaluation_id=state.evaluation_id,
        status=report.status,
        suite=report.suite,
        checkpoint=report.checkpoint,
        step=report.step,
        scores=scores_of(raw),
        failed=raw.get("failed", {}),
        makespan_seconds=report.makespan_seconds,
        gpu_seconds=report.gpu_seconds,
        folder=paths.root,
        note=note,
        report=report,
        raw=raw,
    )


def rows_of(point: Point) -> list[dict[str, Any]]:
    head = {
        "evaluation_id": point.evaluation_id,
        "suite": point.suite,
        "step": point.step,
        "checkpoint": point.checkpoint,
        "status": point.status,
    }
    tail = {"makespan_seconds": point.makespan_seconds, "gpu_seconds": point.gpu_seconds}
    scores = [{name: getattr(score, name) for name in SCORE_COLUMNS} for score in point.scores]
    return [{**head, **score, **tail} for score in scores or [dict.fromkeys(SCORE_COLUMNS)]]
