"""`evalspan daemon --until-idle` with a clock in its loop, and the bench's interpreter on the nodes.

    python -m bench.timed FOLDER

Leaves FOLDER/costs.json: what the loop took. Nothing of the daemon is replaced but what starts its jobs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import synthetic
from bench.harness import spread
from coordinator.cli.service import daemon
from coordinator.config.schema import Config
from coordinator.evaluation.job_specs import Site
from coordinator.runtime import wiring
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.service import Service

LONGEST = 3  # turns that are listed one by one


class Costs:
    """How long each turn of the loop's two parts took, and what the process has used since the first of them."""

    def __init__(self) -> None:
        self.turns: dict[str, list[tuple[float, float, float]]] = {}  # (since the start, wall, CPU) seconds
        self.started, self.cpu = time.monotonic(), time.process_time()
        self.busy_until = self.busy_cpu = 0.0

    def timed(self, what: str, turn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        rows = self.turns.setdefault(what, [])

        def around(owner: Any) -> Any:
            began, cpu = time.monotonic(), time.process_time()
            try:
                return turn(owner)
            finally:
                ended = time.monotonic()
                rows.append((began - self.started, ended - began, time.process_time() - cpu))
                if isinstance(owner, Coordinator) and owner.busy:
                    self.busy_until = time.monotonic() - self.started
                    self.busy_cpu = time.process_time() - self.cpu

        return around

    def account(self) -> dict[str, Any]:
        """`cores`: CPU of this process alone over the seconds in which there was an evaluation to run."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "busy_seconds": self.busy_until,
            "cpu_seconds": self.busy_cpu,
            "cores": self.busy_cpu / max(1e-9, self.busy_until),
            "rss_mb": used.ru_maxrss / 1024,
            "turns": {what: self._turns(rows) for what, rows in self.turns.items()},
        }

    @staticmethod
    def _turns(rows: list[tuple[float, float, float]]) -> dict[str, Any]:
        longest = [
            {"at": at, "seconds": wall, "cpu_seconds": cpu}
            for at, wall, cpu in sorted(rows, key=lambda row: -row[1])[:LONGEST]
        ]
        return {"count": len(rows), "seconds": spread([wall for _, wall, _ in rows]), "longest": longest}


def synthetic_jobs(root: Path) -> None:
    """Have the daemon of this process start its jobs with `bench.synthetic`, which reads `root`/bench.json."""
    os.environ[synthetic.FOLDER] = str(root)
    command = (sys.executable, "-m", "bench.synthetic")
    plain = wiring.site_of

    def site_of(config: Config) -> Site:
        return dataclasses.replace(plain(config), trial_command=command, worker_command=command)

    wiring.site_of = site_of


def main(root: Path) -> None:
    synthetic_jobs(root)
    costs = Costs()
    Coordinator.tick = costs.timed("coordinator", Coordinator.tick)  # type: ignore[method-assign]
    Service.tick = costs.timed("service", Service.tick)  # type: ignore[method-assign]
    try:
        daemon(config=root / "evalspan.toml", until_idle=True)
    finally:
        (root / "costs.json").write_text(json.dumps(costs.account()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
