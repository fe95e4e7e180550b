"""`evalspan daemon --until-idle` with a clock in its loop, and the bench's interpreter on the nodes.

    python -m bench.timed FOLDER

Leaves FOLDER/costs.json: what the loop took, and where its long turns waited. Nothing of the
daemon is replaced but what starts its jobs, and how many trials one evaluation may have at once (no setting says that).
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import synthetic
from bench.harness import spread
from coordinator.cli.service import Daemon
from coordinator.config.schema import Config
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import RunOptions
from coordinator.intake import from_settings
from coordinator.runtime import wiring
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.service import Service

LONGEST = 3  # turns that are listed one by one
LONG_SECONDS = 0.3  # of a turn from which on it is looked at where it waits
LOOK_SECONDS = 0.02  # between two such looks
DEPTH, MOST_PLACES = 9, 20  # functions of a place, and places that are kept


class Costs:
    """How long each turn of the loop's two parts took, and what the process has used since the first of them."""

    def __init__(self) -> None:
        self.turns: dict[str, list[tuple[float, float, float]]] = {}  # (since the start, wall, CPU) seconds
        self.started, self.cpu = time.monotonic(), time.process_time()
        self.busy_until = self.busy_cpu = 0.0
        self.turn_since: float | None = None  # monotonic seconds
        self.places: Counter[str] = (
            Counter()
        )  # where a turn of more than LONG_SECONDS was -> looks that saw it there
        self.looked_at = 0.0  # unix seconds at which the loop looked at notices for the first time

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

    def run(self, plain: Callable[..., None]) -> Callable[..., None]:
        """`Coordinator.run`; "loop" is a whole turn of it, without its sleep: the tick and all that follows it."""

        def run(owner: Coordinator, until: Callable[[], bool], on_tick: Callable[[], None]) -> None:
            def tick(_owner: object) -> None:
                self.looked_at = self.looked_at or time.time()
                self.turn_since = time.monotonic()
                owner.tick()
                on_tick()
                self.turn_since = None

            plain(_Turn(owner, self.timed("loop", tick)), until)

        return run

    def watch(self, thread: int) -> None:
        """Note where the loop is, over and over, in each long turn."""
        while True:
            time.sleep(LOOK_SECONDS)
            since = self.turn_since
            if since is not None and time.monotonic() - since > LONG_SECONDS:
                stack = traceback.extract_stack(sys._current_frames()[thread])  # noqa: SLF001 (documented)
                own = [
                    f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in stack if "bench" not in f.filename
                ]
                self.places[" < ".join(own[: -DEPTH - 1 : -1])] += 1

    def account(self) -> dict[str, Any]:
        """`cores`: CPU of this process alone over the seconds in which there was an evaluation to run."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "busy_seconds": self.busy_until,
            "cpu_seconds": self.busy_cpu,
            "cores": self.busy_cpu / max(1e-9, self.busy_until),
            "rss_mb": used.ru_maxrss / 1024,
            "long_turns": dict(self.places.most_common(MOST_PLACES)),
            "looked_at": self.looked_at,
            "turns": {what: self._turns(rows) for what, rows in self.turns.items()},
        }

    @staticmethod
    def _turns(rows: list[tuple[float, float, float]]) -> dict[str, Any]:
        longest = [
            {"at": at, "seconds": wall, "cpu_seconds": cpu}
            for at, wall, cpu in sorted(rows, key=lambda row: -row[1])[:LONGEST]
        ]
        return {"count": len(rows), "seconds": spread([wall for _, wall, _ in rows]), "longest": longest}


class _Turn:
    """A loop whose tick is `turn`."""

    def __init__(self, owner: Coordinator, turn: Callable[[Any], Any]) -> None:
        self.pace = owner.pace
        self.tick = partial(turn, owner)


def synthetic_jobs(root: Path) -> None:
    """Have the daemon of this process start its jobs with `bench.synthetic`, which reads `root`/bench.json."""
    os.environ[synthetic.FOLDER] = str(root)
    command = (sys.executable, "-m", "bench.synthetic")
    plain = wiring.site_of

    def site_of(config: Config) -> Site:
        return dataclasses.replace(plain(config), trial_command=command, worker_command=command)

    wiring.site_of = site_of
    options_of = from_settings.run_options

    def run_options(config: Config) -> RunOptions:
        return options_of(config).model_copy(update={"max_trials": synthetic.given().get("trials_each")})

    from_settings.run_options = run_options


def main(root: Path) -> None:
    synthetic_jobs(root)
    costs = Costs()
    Coordinator.run = costs.run(Coordinator.run)  # type: ignore[method-assign]
    Coordinator.tick = costs.timed("coordinator", Coordinator.tick)  # type: ignore[method-assign]
    Service.tick = costs.timed("service", Service.tick)  # type: ignore[method-assign]
    threading.Thread(target=costs.watch, args=[threading.get_ident()], daemon=True).start()
    try:
        Daemon(config=root / "evalspan.toml", until_idle=True).run()
    finally:
        (root / "costs.json").write_text(json.dumps(costs.account()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
