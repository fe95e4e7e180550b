"""What a daemon does beside its loop: trackers, housekeeping, checks of nodes, metrics and news. An error of one is that one's alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from coordinator.base.isolate import LoopGuard
from coordinator.config.schema import Config
from coordinator.keeping.housekeeping import Housekeeper
from coordinator.monitor.watch import Monitor
from coordinator.node_check.run import NodeChecker
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.summary import Summary
from coordinator.trackers.live import Exporter

log = logging.getLogger(__name__)


class Beside:
    """Of one daemon that holds its work folder. OperatorError where `[metrics] listen` cannot be had."""

    def __init__(self, settings: Config, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._exporter = Exporter(settings)
        self._housekeeper = Housekeeper(settings)
        self._checker = NodeChecker(settings, coordinator)
        self._monitor = Monitor(settings)
        self._guard = LoopGuard(log)

    @property
    def busy(self) -> bool:
        """Is something left to do for `--until-idle` to wait for?"""
        return self._exporter.busy or self._housekeeper.busy

    def tick(self, pending: int, gone: Sequence[Summary]) -> None:
        """`pending`: checkpoints that are not accepted yet; `gone`: evaluations that have ended since the last call."""
        for ended in gone:
            self._exporter.ask()
            self._housekeeper.ended(ended.evaluation_id)
        self._guard("metrics and news", self._monitor.tick, self._coordinator, pending, gone)
        self._guard("trackers", self._exporter.tick)
        self._guard("checks of nodes", self._checker.tick, time.time())

    def keep_house(self) -> None:
        """After the loop has forgotten ended evaluations: their files may be archived."""
        self._guard("housekeeping", self._housekeeper.tick, time.time())

    def close(self) -> None:
        self._housekeeper.stop()
        self._checker.stop()
        self._monitor.close()
