"""State of trainings, below the output of `status`, `report` and `eval`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coordinator.interface.cli.screen.evaluation_views import all_summaries
from coordinator.interface.page.index import TrainingStanding, trainings_of
from coordinator.results.report import training_files
from coordinator.results.report.tables import Parts
from coordinator.results.report.training import Training, training_clauses, training_sentence, training_title
from coordinator.runtime.summary import Halt, Summary, halt_of
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

MAX_OTHERS = 3  # states of evaluations that are not done, in a sentence
MAX_TRAININGS = 3  # trainings below a table, those with the newest evaluations


def training_standings(
    settings: Config, every: Iterable[Summary], chosen: Iterable[Summary], now: float
) -> list[TrainingStanding]:
    """Return the state of the trainings of `chosen` that have scores of at least two checkpoints."""
    wanted = {summary.training for summary in chosen}
    held = WorkLock(WorkPaths(settings.work_dir).lock).held()

    def halted(summary: Summary) -> Halt | None:
        paths = EvaluationPaths(settings.work_dir / summary.evaluation_id)
        return None if summary.ended_at is not None else halt_of(summary, paths, held=held)

    def find(key: training_files.Key, scored: Sequence[Summary]) -> Training | None:
        return (
            training_files.find_training(settings, key, [s.evaluation_id for s in scored])
            if len(scored) > 1
            else None
        )

    found = [(summary, halted(summary)) for summary in every if summary.training in wanted]
    return [one for one in trainings_of(found, find, now, MAX_TRAININGS) if one.training]


def training_lines(settings: Config, evaluation: str) -> Iterator[Parts]:
    """Yield the state of an evaluation's training; nothing if only one checkpoint has scores."""
    every = all_summaries(settings)
    own = [summary for summary in every if summary.evaluation_id == evaluation]
    return standing_lines(training_standings(settings, every, own, time.time()))


def standing_lines(found: Iterable[TrainingStanding]) -> Iterator[Parts]:
    for one in found:
        if one.training:
            worse = any(clause.verdict == "worse" for clause in training_clauses(one.training))
            said = f"{training_title(*one.key)}: {standing_sentence(one)}"
            yield Parts(said, style="red" if worse else "")


def standing_sentence(one: TrainingStanding) -> str:
    others = one.others[:MAX_OTHERS]
    if len(one.others) > MAX_OTHERS:
        others.append("others are not done either")
    return training_sentence(one.training, others) if one.training else ""


def as_json(one: TrainingStanding) -> dict[str, Any]:
    """Return the document, with its state as a sentence, and evaluations that are not done."""
    known = one.training.model_dump(mode="json") if one.training else {}
    return {"standing": standing_sentence(one), "not_done": one.states, **known}
