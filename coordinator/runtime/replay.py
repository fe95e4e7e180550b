"""Replays of a work folder's evaluations from their journals. Writes nothing there."""

from __future__ import annotations

from coordinator.decide.evaluation.events import AnyEvent
from coordinator.decide.evaluation.state import State
from coordinator.errors import OperatorError
from coordinator.runtime.journal import read_events, replayed_state
from coordinator.runtime.known_evaluations import find_folder
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or ends with it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay_events(events), paths, events


def replay_events(events: list[AnyEvent]) -> State:
    """Return the state that a journal's events lead to."""
    state = replayed_state(events)
    if state is None:
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    return state
