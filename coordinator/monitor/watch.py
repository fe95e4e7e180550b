"""Follows a daemon's evaluations for metrics and news. Called between two turns of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from coordinator.base import clock
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.state import State
from coordinator.monitor import notify
from coordinator.monitor.notify import Notifier
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.monitor.metrics import Metrics
    from coordinator.runtime.loop import Coordinator

PARKED_SECONDS = 60.0  # after which a parked evaluation is news: a disk that is full for a moment is none
FINISH_SECONDS = 5.0  # most that a daemon's end waits for news to be sent


class Monitor:
    """Metrics and news of one daemon. OperatorError where `[metrics] listen` cannot be had."""

    def __init__(self, settings: Config) -> None:
        self._work = WorkPaths(settings.work_dir)
        self._notifier = Notifier(settings.notify.command, settings.notify.webhook)
        self._metrics = _metrics(settings, self._work)
        self._parked_since: dict[str, float] = {}  # unix seconds
        self._told: set[str] = set()  # parked evaluations that were news

    def tick(self, coordinator: Coordinator, pending: int, ended: Sequence[State]) -> None:
        """`pending`: checkpoints that are not accepted yet; `ended`: evaluations that have ended since the last call."""
        now = clock.now()
        if self._metrics is not None:
            self._metrics.turn(coordinator.turn_seconds)
            self._metrics.note(coordinator, pending, now)
            self._metrics.ended(self._work.evaluation(s.evaluation_id).report for s in ended)
        for state in ended:
            self._tell_end(state, now)
        self._tell_parked(coordinator, now)

    def close(self) -> None:
        self._notifier.finish(FINISH_SECONDS)
        if self._metrics is not None:
            self._metrics.close()

    def _tell_end(self, state: State, now: float) -> None:
        record = state.record
        errors = {e.name: e.error for e in state.entries if e.status == "failed"}
        status = "cancelled" if state.ending.cancelled else "failed" if errors else "done"
        self._notifier.tell(partial(notify.ended, record, status, errors, now))
        work_dir = self._work.root

        def look() -> notify.News | None:
            found = notify.fallen(work_dir, record)
            return notify.fell(record, found, now) if found else None

        self._notifier.tell(look)

    def _tell_parked(self, coordinator: Coordinator, now: float) -> None:
        parked = coordinator.parked
        self._parked_since = {id_: self._parked_since.get(id_, now) for id_ in parked}
        self._told &= parked.keys()
        for evaluation_id, since in self._parked_since.items():
            one = parked[evaluation_id]
            if evaluation_id in self._told or one.record is None or now - since < PARKED_SECONDS:
                continue
            self._told.add(evaluation_id)
            self._notifier.tell(partial(notify.parked, one.record, one.error, now))


def _metrics(settings: Config, work: WorkPaths) -> Metrics | None:
    if settings.metrics.listen is None:
        return None
    try:
        from coordinator.monitor import metrics  # noqa: PLC0415 (an extra package)
    except ImportError as error:
        raise OperatorError(
            f"[metrics] listen needs {error.name}: pip install 'evalspan[metrics]'"
        ) from error

    from evaljobs.queue.redis_client import used_memory  # noqa: PLC0415 (a daemon with metrics alone)

    return metrics.Metrics(settings.metrics.listen, lambda: used_memory(work.redis_address))
