"""Finds and replays the evaluations of a work folder. Writes nothing there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from coordinator.base.listing import Listing
from coordinator.base.words import first_of
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import State
from coordinator.intake.from_settings import site_of
from coordinator.runtime.journal import events_after, read_events, replay_on, replayed
from coordinator.runtime.status_file import Ended, ended_of, read_evaluation, read_status
from evaljobs.contract.paths import EvaluationPaths

ENDED_SECONDS = 10.0  # between two looks at the journals of evaluations that have ended


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or has it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay(events, config), paths, events


def find_record(config: Config, prefix: str) -> tuple[EvaluationRecord, EvaluationPaths]:
    """The evaluation of that name as it was accepted; its journal is not read. OperatorError."""
    paths = find_folder(config, prefix)
    if (record := read_evaluation(paths)) is None:
        raise OperatorError(f"{paths.evaluation} cannot be read")
    return record, paths


def find_folder(config: Config, prefix: str) -> EvaluationPaths:
    """The folder of that evaluation, unread. OperatorError unless exactly one id matches."""
    root = Path(config.work_dir)
    if prefix != ".." and Path(prefix).name == prefix and EvaluationPaths(root / prefix).journal.exists():
        return EvaluationPaths(root / prefix)
    ids = sorted(p.parent.name for p in root.glob("*/journal.jsonl"))
    found = [i for i in ids if i.startswith(prefix) or i.endswith(f"-{prefix}")]
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
    """Follows the journals of a work folder's evaluations. Reads each line once and writes nothing.

    The journal of an ended evaluation grows by `retry` alone: it is looked at once in ENDED_SECONDS, so that a look
    at thousands of evaluations costs as much as one at those that run.
    """

    def __init__(self, config: Config, only: str | None = None) -> None:
        """`only`: the id of one evaluation."""
        self._config = config
        self._only = only
        self._journals: set[Path] = set()
        self._listing = Listing(config.work_dir)
        self._all_at = float("-inf")  # when the journals of ended evaluations were looked at
        self._read: dict[Path, tuple[State, int]] = {}  # journal -> its state, bytes read
        self._skipped: dict[Path, int] = {}  # ended or unreadable journal -> size; skipped until it grows
        self._ended: dict[Path, Ended] = {}  # journal of an ended evaluation -> its summary

    def states(self) -> list[State]:
        """States of evaluations that have not ended, oldest first."""
        for journal in self._to_look_at(time.monotonic()):
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

    def mark(self) -> int:
        """Differs once a journal has grown, appeared or gone; as of the last `states`, in this process."""
        read = frozenset((journal, size) for journal, (_, size) in self._read.items())
        return hash((read, frozenset(self._skipped.items())))

    def _to_look_at(self, now: float) -> list[Path]:
        """Journals that may have grown."""
        root = Path(self._config.work_dir)
        if self._only is not None:
            return [EvaluationPaths(root / self._only).journal]
        with contextlib.suppress(OSError), self._listing.news(now) as entries:
            if entries is not None:
                names = [entry.name for entry in entries if entry.is_dir()]
                self._journals = {EvaluationPaths(root / name).journal for name in names}
        for kept in (self._read, self._skipped, self._ended):
            for journal in kept.keys() - self._journals:
                del kept[journal]
        if now - self._all_at >= ENDED_SECONDS:
            self._all_at = now
            return list(self._journals)
        return list(self._journals - self._ended.keys())

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
