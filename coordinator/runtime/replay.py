"""Finds and replays the evaluations of a work folder. Writes nothing there."""

from __future__ import annotations

import contextlib
from pathlib import Path

from coordinator.base.words import first_of
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.state import State
from coordinator.intake.from_settings import site_of
from coordinator.runtime.journal import events_after, read_events, replay_on, replayed
from coordinator.runtime.status_file import Ended, ended_of, read_status
from evaljobs.contract.paths import EvaluationPaths


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or has it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay(events, config), paths, events


def find_folder(config: Config, prefix: str) -> EvaluationPaths:
    """The folder of that evaluation, unread. OperatorError unless exactly one id matches."""
    root = Path(config.work_dir)
    ids = sorted(p.parent.name for p in root.glob("*/journal.jsonl"))
    found = [i for i in ids if i.startswith(prefix) or i.endswith(f"-{prefix}")]
    if prefix in ids:
        found = [prefix]
    if len(found) != 1:
        known = first_of(found or ids) or "none"
        what = "no evaluation" if not found else f"{len(found)} evaluations"
        verb = "begins" if not found else "begin"
        todo = "type more of the id" if found else "`evalspan status` lists all"
        raise OperatorError(f"{what} in {root} {verb} with {prefix!r} (there are: {known}): {todo}")
    return EvaluationPaths(root / found[0])


def replay(events: list[AnyEvent], config: Config) -> State:
    """The state that a journal's events lead to. Writes nothing."""
    state = replayed(events, site_of(config))
    if state is None:
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    return state


class Follower:
    """Follows the journals of a work folder's evaluations. Reads each line once and writes nothing."""

    def __init__(self, config: Config, only: str | None = None) -> None:
        """`only`: the id of one evaluation."""
        self._config = config
        self._only = only
        self._read: dict[Path, tuple[State, int]] = {}  # journal -> its state, bytes read
        self._skipped: dict[Path, int] = {}  # ended or unreadable journal -> size; skipped until it grows
        self._ended: dict[Path, Ended] = {}  # journal of an ended evaluation -> its summary

    def states(self) -> list[State]:
        """States of evaluations that have not ended, oldest first."""
        for journal in Path(self._config.work_dir).glob(f"{self._only or '*'}/journal.jsonl"):
            # storage is away for a moment, or the journal is unreadable for this user
            with contextlib.suppress(OSError, OperatorError):
                self._look(journal, journal.stat().st_size)
        states = [state for state, _ in self._read.values() if state.ended_at is None]
        return sorted(states, key=lambda state: state.record.accepted_at)

    def ended(self, most: int) -> list[Ended]:
        """Summaries of the evaluations that ended last, the newest first; as of the last `states`."""
        found = [*self._ended.values()]
        found += [ended_of(state, size) for state, size in self._read.values() if state.ended_at is not None]
        return sorted(found, key=lambda ended: -ended.ended_at)[:most]

    def _look(self, journal: Path, size: int) -> None:
        if self._skipped.get(journal) == size:
            return
        self._skipped.pop(journal, None)
        self._ended.pop(journal, None)
        known = self._read.get(journal)
        if known is None or known[0].ended_at is not None:
            status = read_status(EvaluationPaths(journal.parent))
            if isinstance(status, Ended):
                self._read.pop(journal, None)
                self._skipped[journal], self._ended[journal] = size, status
                return
        try:
            self._follow(journal, size)
        except OperatorError:
            self._skipped[journal] = size
            raise

    def _follow(self, journal: Path, size: int) -> None:
        known = self._read.get(journal)
        if known is None or size < known[1]:  # the writer truncated a failed write
            events, offset = events_after(journal, 0)
            if events:
                self._read[journal] = replay(events, self._config), offset
        elif size > known[1]:
            events, offset = events_after(journal, known[1])
            replay_on(known[0], events, site_of(self._config))
            self._read[journal] = known[0], offset
