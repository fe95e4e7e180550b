"""Whether all tasks of an evaluation score at chance, although an earlier checkpoint of its training did not.

Rule: a score above chance does not prove health: weights may be broken in a way that no check sees. Called by `finalize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.results.report.scores import scores_of
from coordinator.runtime.summary import read_file
from evaljobs.contract.paths import EvaluationPaths

MAX_ERRORS_ABOVE = 2.0  # standard errors above chance within which a score counts as chance


def at_chance(results: Mapping[str, Any], signals: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether every task with a chance level scores within ERRORS standard errors of it; False without such tasks.

    `results`: merged results of lm-eval; `signals`: leaf task -> its signals, including "chance".
    """
    found: dict[str, bool] = {}
    for score in scores_of(
        {"results": results.get("results", {}), "higher_is_better": results.get("higher_is_better", {})}
    ):
        chance = signals.get(score.task, {}).get("chance")
        if chance is not None and score.higher_is_better and 0 <= score.value <= 1:
            found.setdefault(score.task, score.value <= chance + MAX_ERRORS_ABOVE * (score.stderr or 0.0))
    return bool(found) and all(found.values())


def fell_to_chance(record: EvaluationRecord, paths: EvaluationPaths) -> str:
    """Return a warning that names the last earlier checkpoint of this training and suite above chance; "" if there is none."""
    place, step = PurePath(record.checkpoint.announced).parent, record.checkpoint.step
    others = (read_file(str(folder)) for folder in paths.root.parent.iterdir() if folder != paths.root)
    above = [
        (s.step, s.evaluation_id)
        for s in others
        if s is not None
        and (s.suite, PurePath(s.checkpoint).parent) == (record.suite.name, place)
        and s.scores
        and not s.at_chance
        and s.step is not None
        and step is not None
        and s.step < step
    ]
    if not above:
        return ""
    before, evaluation = max(above)
    return (
        f"every task scores within {MAX_ERRORS_ABOVE:g} standard errors of chance, and step {before} ({evaluation}) did not: compare the "
        "weights, the config and the tokenizer of both"
    )
