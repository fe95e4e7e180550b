"""`[nodes] check`: the daemon checks nodes, each alone, before their first use of a day. A process beside its loop.

Rule: the loop offers such a node to no evaluation until `nodes.json` says that it was checked. A bad one is cordoned for a
day. One that failed while another passed is cordoned for an hour, then checked again; where none passed the check may be at
fault, and the node is taken last. No evaluation waits for a check that cannot be held. Started by `coordinator.cli.beside`.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.allocation import cordons
from coordinator.base.aside import Aside
from coordinator.config.schema import Config
from coordinator.node_check.run import TEST_SECONDS, CheckedNode, check
from coordinator.runtime.loop import Coordinator
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record

COMMAND = "the daemon's check"  # names it in `nodes.json`
# until a node's next check, by its verdict
AFTER_SECONDS = {"ok": 86400.0, "bad": 86400.0, "suspect": 3600.0, "not checked": 600.0}
WAIT_SECONDS = TEST_SECONDS + 30.0  # for a check's job to start and end
log = logging.getLogger(__name__)


class Asked(Record):
    """What the process gets on its standard input."""

    config: Config
    nodes: tuple[str, ...]


class NodeChecker:
    """Starts the process for the daemon and does not wait for it."""

    def __init__(self, config: Config, coordinator: Coordinator) -> None:
        self._config, self._coordinator, self._nodes = config, coordinator, tuple[str, ...]()
        self._work = WorkPaths(config.work_dir)
        # File WORK_DIR/cache/node-check.log: output of checks of nodes before their use | the coordinator | may be removed
        self._process = Aside(__name__, self._work.cache / "node-check.log")
        coordinator.offers.checks_nodes = config.nodes.check and config.cluster.kind == "slurm"

    def tick(self, now: float) -> None:
        """Start what is due, where nothing runs. `now`: unix seconds. OSError where it cannot be started yet."""
        if (code := self._process.ended()) is not None:
            self._coordinator.offers.to_check = frozenset()  # of a look at `nodes.json` before it was written
            if code:
                log.warning("the check of %s has failed: see %s", ", ".join(self._nodes), self._process.log)
                keep([CheckedNode(node=n, verdict="not checked") for n in self._nodes], self._work.nodes, now)
        if not self._process.running and self._coordinator.offers.to_check:
            self._nodes = tuple(sorted(self._coordinator.offers.to_check))
            self._process.begin(Asked(config=self._config, nodes=self._nodes).model_dump_json().encode())

    def stop(self) -> None:
        """End what runs, which cancels its jobs; the next daemon checks again."""
        self._process.stop()


def keep(rows: Sequence[CheckedNode], place: Path, now: float) -> None:
    """Write what was found to `nodes.json` (`place`). OSError."""
    passed = any(row.verdict == "ok" for row in rows)
    after = {row.node: now + AFTER_SECONDS[row.verdict] for row in rows}
    for row in rows:
        log.info("%s: %s %s", row.node, row.verdict, row.why)
        if row.verdict in ("bad", "suspect"):
            cordons.remember(place, [(row.node, cordons.Failure(at=now, why=row.why, seen_by=COMMAND))], now)
        if row.verdict == "bad" or (row.verdict == "suspect" and passed):
            cordons.cordon(place, [row.node], after[row.node], now)
    cordons.check_again(place, after, now)


def main() -> int:
    """The child process. Its output is the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that jobs are cancelled and files deleted
    asked = Asked.model_validate_json(sys.stdin.buffer.read())
    found = check(asked.config, asked.nodes, wait_seconds=WAIT_SECONDS, seed=0, alone=True)
    keep(found.nodes, WorkPaths(asked.config.work_dir).nodes, time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
