"""Applies the rules of a policy file to an evaluation, for `evalspan gate` and the daemon's notifications."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.decide.verdicts.gate import Policy, Ruling, is_named, judge_rows
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import best_of, current_points, make_series
from coordinator.results.report.load_series import find_series
from coordinator.results.report.pairs import SCREEN, compare_evaluations
from coordinator.results.report.scores import ScoreValue
from coordinator.results.report.training import mean_points
from coordinator.runtime.known_evaluations import find_record
from coordinator.site.config import toml
from coordinator.site.config.schema import Config
from evaljobs.contract.columns import SIGNALS


def read_policy(file: Path) -> Policy:
    """Read a policy file. Raise OperatorError if it is invalid."""
    data, text = toml.read_toml(file)
    return toml.validate_table(Policy, data, toml.file_locations(file, text))


def gate_evaluation(
    settings: Config, evaluation: str, policy: Policy, baseline: str | None = None, *, mixed: bool = False
) -> tuple[list[Ruling], list[str]]:
    """Return rulings, and the ids of baseline and evaluation. `baseline`: replaces the policy's.

    Raise OperatorError if there is none, or a rule names no score.
    """
    record, _ = find_record(settings, evaluation)
    if record.screening is not None:
        raise OperatorError(SCREEN.format(record.evaluation_id))

    def counts(score: ScoreValue) -> bool:
        return any(is_named(rule, score.task, f"{score.metric},{score.filter}") for rule in policy.rule)

    dense = any((rule.metric or "").partition(",")[0] in SIGNALS for rule in policy.rule)
    against = baseline_of(settings.work_dir, record, baseline or policy.baseline, counts, mixed=mixed)
    ids = [find_record(settings, name)[0].evaluation_id for name in (against, evaluation)]
    if ids[0] == ids[1]:
        raise OperatorError(f"{ids[0]} cannot be its own baseline: name another evaluation")
    made, rows = compare_evaluations(settings.work_dir, ids, mixed=mixed, dense=dense)
    return judge_rows(policy, rows, made[-1].not_asked), ids


def baseline_of(
    work_dir: Path,
    record: EvaluationRecord,
    name: str,
    counts: Callable[[ScoreValue], bool],
    *,
    mixed: bool = False,
) -> str:
    """Return the id of the baseline `name`: "previous" or "best" of the training's earlier checkpoints, or an id itself.

    `counts`: whether a score counts for "best", by the mean that reports show of these; `mixed`: in any mode.
    If tasks take turns (`[[task]] every`), checkpoints with all of this one's tasks are preferred. Raise OperatorError if
    there is no earlier checkpoint.
    """
    if name not in ("previous", "best"):
        return name
    folder = str(Path(record.checkpoint.announced).parent)
    every = find_series(work_dir, folder, record.suite.name, mixed=True)
    own = next((p for p in every if p.evaluation_id == record.evaluation_id), None)
    if own is None:
        raise OperatorError(
            f"{record.evaluation_id} is not among the evaluations of {folder}: name a baseline by --baseline ID"
        )
    modes = {own.mode} if not mixed else {p.mode for p in every} - {"screen"}
    others = (p for p in every if p.checkpoint != own.checkpoint and p.mode in modes)
    points = current_points([*others, own])
    place = [point.evaluation_id for point in points].index(own.evaluation_id)
    earlier = [point for point in points[:place] if point.scores]
    if not earlier:
        raise OperatorError(
            f"{record.evaluation_id} is the first checkpoint of {folder} with scores, so it has no {name} one: "
            "name a baseline by --baseline ID"
        )

    earlier = [p for p in earlier if {*p.not_asked} <= {*record.not_asked}] or earlier
    rare = {*record.not_asked}.union(
        *(set(point.groups.get(task, ())) for point in earlier for task in record.not_asked)
    )
    named = [
        p.model_copy(update={"scores": tuple(s for s in p.scores if counts(s) and s.task not in rare)})
        for p in earlier
    ]
    series = make_series(named)
    means = [*mean_points(series).values()] or [curve.best for curve in series.curves[:1]]
    if name == "previous" or not means:
        return earlier[-1].evaluation_id
    return best_of(means, higher_is_better=True).evaluation_id
