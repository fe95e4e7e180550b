"""Replays of a work folder's evaluations from their journals. Writes nothing there."""

from __future__ import annotations

import time

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.state import State
from coordinator.runtime.journal import OtherFormatError, read_events, replayed
from coordinator.runtime.summaries import find_folder
from coordinator.runtime.summarise import summary_now
from coordinator.runtime.summary import Summary, of_record
from evaljobs.contract.paths import EvaluationPaths


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or ends with it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay(events), paths, events


def replay(events: list[AnyEvent]) -> State:
    """Return the state that a journal's events lead to."""
    state = replayed(events)
    if state is None:
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    return state


def by_journal(paths: EvaluationPaths) -> Summary | None:
    """Return the summary of an evaluation that has no valid one; None if its journal is empty or copied from another."""
    try:
        if not paths.journal.stat().st_size:
            return None
        state = replayed(read_events(paths.journal))
        if state is None or state.evaluation_id != paths.root.name:
            return None
        return summary_now(state, paths, time.time())
    except Exception as error:  # noqa: BLE001 (one bad journal must not hide other evaluations)
        what = str(error) if isinstance(error, OtherFormatError) else f"its journal cannot be read: {error}"
        return of_record(paths, what)
