"""The data of one evaluation's page. Pure.

Rule: the page shows what the report, the journal and results.json say, and computes sums alone. Long lists go as
columns: 7,000 shards are a few arrays. Seconds count from the acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.evaluation.events import AnyEvent, NodesOffered, OutcomeSeen, Planned
from coordinator.page.timeline import notes, spans
from coordinator.report.learning_curves import scores_of
from coordinator.report.measurements import Report
from coordinator.runtime.summary import CAUSES
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Staged

HALTS = ("stopped", "parked", "given up")  # statuses whose first warning says since when and why
ABOUT = {
    "checkpoint", "step", "suite", "mode", "token_budget", "status", "accepted_at", "ratio", "gpu_seconds", "staged_bytes",
    "storage_bytes", "tokens", "judge", "reused",
}  # fmt: skip  # fields of a report that a page has as they are
SCORE_COLUMNS = ("task", "measure", "value", "stderr", "higher_is_better", "documents", "n_shot", "version")


def evaluation_data(
    report: Report,
    events: Sequence[AnyEvent],
    results: Mapping[str, Any],
    price: float | None = None,
    standing: Sequence[Sequence[Any]] = (),
) -> dict[str, Any]:
    """`price`: of a GPU hour, any currency; `standing`: of `nodes.standing`."""
    predicted = {
        shard: seconds
        for event in events
        if isinstance(event, Planned)
        for lane in event.lanes
        for shard, _, seconds in lane.shards
    }
    return {
        "kind": "evaluation",
        "about": _about(report, price),
        "stages": report.stages.model_dump(exclude_none=True),
        "warnings": report.warnings,
        "entries": [[e.name, e.status, e.error, e.unscored] for e in report.entries],
        "unscored": results.get("unscored", {}),
        "scores": score_rows(results),
        "causes": {cause: sum(getattr(g, cause) * max(1, g.gpus) for g in report.gpus) for cause in CAUSES},
        "lanes": _lanes(report),
        "shards": _shards(report, predicted),
        "jobs": [
            [s.what, s.name, s.begin, s.seconds, s.row]
            for s in spans(events, report.accepted_at, [e.name for e in report.entries])
        ],
        "nodes": _nodes(report, events),
        "standing": standing,
        "notes": [[n.at, n.about, n.text, n.bad] for n in notes(events, report.accepted_at)],
    }


def score_rows(results: Mapping[str, Any]) -> list[list[Any]]:
    """A row per score, as SCORE_COLUMNS."""
    return [[getattr(score, column) for column in SCORE_COLUMNS] for score in scores_of(results)]


def _about(report: Report, price: float | None) -> dict[str, Any]:
    return {
        **report.model_dump(mode="json", include=ABOUT),
        "id": report.evaluation_id,
        "halted": report.warnings[0] if report.status in HALTS else "",
        "makespan": report.makespan_seconds,
        "predicted": report.predicted_makespan_seconds,
        "bound": report.lower_bound_seconds,
        "paused": report.paused_seconds,
        "waited": report.waited_seconds,
        "limited": report.limited_seconds,
        "policy": report.plan_policy,
        "busy": report.gpu_busy_fraction,
        "cost": None if price is None else report.gpu_seconds / 3600 * price,
    }


def _lanes(report: Report) -> list[list[Any]]:
    """A row per trial: name, node, GPUs, device, begin, seconds held, its seconds before the first shard, shards, end."""
    return [
        [
            g.trial,
            g.node,
            g.gpus,
            g.device,
            g.started_at - report.accepted_at,
            g.held,
            g.imports + g.load + g.warm,
            g.shards,
            g.ended,
        ]
        for g in report.gpus
    ]


def _shards(report: Report, predicted: Mapping[str, float]) -> dict[str, list[Any]]:
    """Columns of the shards that count. `lane`: row of `_lanes`, -1 for a trial that runs still; `task`: index into `tasks`."""
    lane = {g.trial: i for i, g in enumerate(report.gpus)}
    named = [ShardId.parse(s.shard) for s in report.shards]
    tasks = {task: i for i, task in enumerate(sorted({n.task for n in named}))}
    return {
        "tasks": list(tasks),
        "task": [tasks[n.task] for n in named],
        "name": [s.shard.partition("|")[2] for s in report.shards],
        "lane": [lane.get(s.trial, -1) for s in report.shards],
        "begin": [round(s.started_at - report.accepted_at, 3) for s in report.shards],
        "seconds": [round(s.seconds, 3) for s in report.shards],
        "predicted": [round(predicted[s.shard], 3) if s.shard in predicted else None for s in report.shards],
    }


def _nodes(report: Report, events: Sequence[AnyEvent]) -> list[list[Any]]:
    """A row per node: name, rung, GPU type, bytes staged, of these from storage, seconds of staging, staged ahead, why."""
    staged: dict[str, Staged] = {}
    types: dict[str, str] = {}
    for event in events:
        if isinstance(event, OutcomeSeen) and isinstance(event.outcome, Staged):
            staged[event.outcome.node] = event.outcome
        elif isinstance(event, NodesOffered):
            types.update({o.node: o.gpu_type for o in event.offers if o.gpu_type})
    rows = []
    for name, rung in sorted(report.nodes.items()):
        one = staged.get(name)
        figures = [one.bytes, one.storage_bytes, one.seconds] if one else [0, 0, None]
        kind = (one.gpu_name if one else "") or types.get(name, "")
        rows.append([name, rung, kind, *figures, report.staged_ahead.get(name), one.why if one else ""])
    return rows
