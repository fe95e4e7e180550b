"""State of trainings, below the output of `status`, `report` and `eval`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coordinator.cli.screen.standing import all_of
from coordinator.config.schema import Config
from coordinator.page.index import Standing, trainings_of
from coordinator.report import trainings
from coordinator.report.tables import Parts
from coordinator.report.training import Training, clauses, morning, title
from coordinator.runtime.summary import Halt, Summary, halt_of
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

MOST = 3  # trainings below a table, those with the newest evaluations


def standings(
    settings: Config, every: Iterable[Summary], chosen: Iterable[Summary], now: float
) -> list[Standing]:
    """Return the state of the trainings of `chosen` that have scores of at least two checkpoints."""
    wanted = {summary.training for summary in chosen}
    held = WorkLock(WorkPaths(settings.work_dir).lock).held()

    def halted(summary: Summary) -> Halt | None:
        paths = EvaluationPaths(settings.work_dir / summary.evaluation_id)
        return None if summary.ended_at is not None else halt_of(summary, paths, held=held)

    def find(key: trainings.Key, scored: Sequence[Summary]) -> Training | None:
        return (
            trainings.find_training(settings, key, [s.evaluation_id for s in scored])
            if len(scored) > 1
            else None
        )

    found = [(summary, halted(summary)) for summary in every if summary.training in wanted]
    return [one for one in trainings_of(found, find, now, MOST) if one.training]


def lines_of(settings: Config, evaluation: str) -> Iterator[Parts]:
    """Yield the state of an evaluation's training; nothing if only one checkpoint has scores."""
    every = all_of(settings)
    own = [summary for summary in every if summary.evaluation_id == evaluation]
    return of_trainings(standings(settings, every, own, time.time()))


def of_trainings(found: Iterable[Standing]) -> Iterator[Parts]:
    for one in found:
        if one.training:
            worse = any(clause.verdict == "worse" for clause in clauses(one.training))
            said = f"{title(*one.key)}: {said_of(one)}"
            yield Parts(said, style="red" if worse else "")


def said_of(one: Standing) -> str:
    return morning(one.training, one.others[:MOST]) if one.training else ""


def as_json(one: Standing) -> dict[str, Any]:
    """Return the document, with its state as a sentence, and evaluations that are not done."""
    known = one.training.model_dump(mode="json") if one.training else {}
    return {"standing": said_of(one), "not_done": one.states, **known}
