"""Tasks of a daemon beside its loop: metrics and news, trackers, housekeeping, node checks. Called between two turns."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from coordinator.base import clock
from coordinator.base.isolate import LoopGuard
from coordinator.errors import OperatorError
from coordinator.operations.keeping.housekeeping import Housekeeper
from coordinator.operations.monitor import notify
from coordinator.operations.monitor.gate import read_policy
from coordinator.operations.monitor.notify import News, notifier_of
from coordinator.operations.node_check.checker import NodeChecker
from coordinator.results.report import training_files
from coordinator.results.report.training import training_sentence
from coordinator.results.trackers.live import Exporter
from coordinator.runtime.known_evaluations import Summaries
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.summary import Summary, fields_of_record
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import write_record

if TYPE_CHECKING:
    from coordinator.operations.monitor.metrics import Metrics

log = logging.getLogger(__name__)
PARKED_SECONDS = 60.0  # after which a parked evaluation is news, to ignore a disk that is full for a moment
JUDGED_SECONDS = 60.0  # how long news of a drop wait for the housekeeping process to judge the training
LOOK_SECONDS = 0.5  # between two looks at its file
FINISH_SECONDS = 5.0  # longest time that a daemon's end waits for news to be sent


class NewsFile(StateRecord):
    """Contents of `news.json`: evaluations whose end is still to be sent, so that no news is lost if a daemon dies.

    An id is listed from the turn in which a daemon first runs the evaluation until the news of its end were sent or given up.
    Only the loop writes it, on changes.
    """

    schema_version: int = 1
    evaluations: tuple[str, ...] = ()


class Monitor:
    """Metrics and news of one daemon. Raise OperatorError if `[metrics] listen` or `[notify] gate` is unusable."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._work = WorkPaths(settings.work_dir)
        self._notifier = notifier_of(settings.notify)
        self._owed: set[str] | None = None  # ids in `news.json`; read in the first turn
        self._written: set[str] = set()
        self._sent: deque[str] = deque()  # ids whose news were sent; filled by the notifier's thread
        self._metrics = _metrics(settings, self._work)
        if settings.notify.gate is not None:
            read_policy(settings.notify.gate)
        # unix seconds since when an evaluation is parked; inf once reported
        self._parked: dict[str, float] = {}

    def tick(
        self,
        coordinator: Coordinator,
        pending: int,
        ended: Sequence[Summary],
        announced_at: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Update metrics and news. `pending`: checkpoints not yet accepted; `ended`: evaluations ended since the last call;
        `announced_at`: their id -> unix seconds.

        Raise OSError if `news.json` cannot be read or written.
        """
        now = clock.now()
        if self._metrics is not None:
            self._metrics.turn(coordinator.turn_seconds)
            self._metrics.note(coordinator, pending, now)
            self._metrics.ended(ended, announced_at)
        if self._notifier.wanted:
            self._tell_ends(coordinator, ended)
            self._tell_parked(coordinator, now)

    def close(self) -> None:
        self._notifier.finish(FINISH_SECONDS)
        if self._metrics is not None:
            self._metrics.close()
        if self._owed is not None:
            self._write(self._owed)

    def _tell_ends(self, coordinator: Coordinator, ended: Sequence[Summary]) -> None:
        open_ones = coordinator.evaluations.running.keys() | coordinator.evaluations.parked.keys()
        ends = {
            end.evaluation_id: partial(news_of_ended, self._settings, end, JUDGED_SECONDS) for end in ended
        }
        if self._owed is None:
            self._owed = self._written = set(_read(self._work.news))
            left = self._owed - open_ones - ends.keys()
            ends |= {name: partial(_left, self._settings, name) for name in left}
        for evaluation_id, make in ends.items():
            self._notifier.tell(make, partial(self._sent.append, evaluation_id))
        self._write(self._owed | ends.keys() | open_ones)

    def _write(self, owed: set[str]) -> None:
        while self._sent:
            owed = owed - {self._sent.popleft()}
        self._owed = owed
        if owed != self._written:
            write_record(self._work.news, NewsFile(evaluations=tuple(sorted(owed))))
            self._written = owed

    def _tell_parked(self, coordinator: Coordinator, now: float) -> None:
        parked = coordinator.evaluations.parked
        self._parked = {name: self._parked.get(name, now) for name in parked}
        for name, since in self._parked.items():
            record = parked[name].record
            if record is not None and now - since >= PARKED_SECONDS:
                self._parked[name] = inf
                news = notify.parked_news(
                    Summary(written_at=now, **fields_of_record(record)), parked[name].error, now
                )
                self._notifier.tell(partial(list, [news]))


def _read(path: Path) -> tuple[str, ...]:
    try:
        return NewsFile.model_validate_json(path.read_bytes()).evaluations
    except (FileNotFoundError, ValidationError):
        return ()


def news_of_ended(settings: Config, end: Summary, patience: float = 0.0) -> Iterable[News]:
    """Yield news of an end. `patience`: seconds that the daemon's child has to judge its training."""
    yield notify.ended_news(end, notify.gate_outcome(settings, end))
    until = time.monotonic() + patience
    while end.scores and time.monotonic() < until:
        if training_files.read_kept(settings, end.training, [end.evaluation_id]):
            break
        time.sleep(LOOK_SECONDS)
    training = training_files.find_training(settings, end.training, [end.evaluation_id])
    if training and (drops := [d for d in training.drops if d.evaluation_id == end.evaluation_id]):
        yield notify.drop_news(end, drops, training_sentence(training))


def _left(settings: Config, evaluation_id: str) -> Iterable[News]:
    """Yield news of an evaluation that ended under an earlier daemon; none if its folder has been removed."""
    found = Summaries(settings, evaluation_id)
    found.look(0.0)
    for end in found.ended:
        yield from news_of_ended(settings, end)


def _metrics(settings: Config, work: WorkPaths) -> Metrics | None:
    if settings.metrics.listen is None:
        return None
    try:
        from coordinator.operations.monitor import metrics  # noqa: PLC0415 (an extra package)
    except ImportError as error:
        raise OperatorError(
            f"[metrics] listen needs {error.name}: pip install 'evalspan[metrics]'"
        ) from error

    from evaljobs.queue.redis_client import used_memory  # noqa: PLC0415 (a daemon with metrics alone)

    return metrics.Metrics(settings.metrics.listen, lambda: used_memory(work.redis_address))


class DaemonServices:
    """All tasks of a daemon beside its loop, with isolated errors. Raise OperatorError if `[metrics] listen` is unusable."""

    def __init__(self, settings: Config, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._exporter = Exporter(settings)
        self._housekeeper = Housekeeper(settings)
        self._checker = NodeChecker(settings, coordinator)
        self._monitor = Monitor(settings)
        self._guard = LoopGuard(log)

    @property
    def busy(self) -> bool:
        """Whether `--until-idle` has to wait for something."""
        return self._exporter.busy or self._housekeeper.busy

    def tick(self, pending: int, gone: Sequence[Summary], announced_at: Mapping[str, float]) -> None:
        """Update everything, as `Monitor.tick`; `gone`: evaluations ended since the last call."""
        for ended in gone:
            self._exporter.ask()
            self._housekeeper.ended(ended.evaluation_id)
        self._guard("metrics and news", self._monitor.tick, self._coordinator, pending, gone, announced_at)
        self._guard("trackers", self._exporter.tick)
        self._guard("checks of nodes", self._checker.tick, time.time())

    def keep_house(self) -> None:
        """Clean up after the loop has forgotten ended evaluations: their files may now be archived."""
        self._guard("housekeeping", self._housekeeper.tick, time.time())

    def close(self) -> None:
        self._housekeeper.stop()
        self._checker.stop()
        self._monitor.close()
