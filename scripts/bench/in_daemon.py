"""`evalspan daemon` whose jobs are synthetic, looked at after each turn of its loop.

    python -m bench.in_daemon FOLDER [AT_ONCE MINUTES]

Without AT_ONCE it runs until idle. With it, AT_ONCE checkpoints move into the watched folder, and SETTLE_SECONDS after all
have ended a row is added to FOLDER/rows.jsonl: what the process holds, and the seconds from each checkpoint to its scores.
After the last checkpoint, or once MINUTES have passed, it ends by SIGTERM, as an operator would end it; killed at any moment,
it goes on when it is run again. FOLDER/costs.json says what its loop took.
Rule: nothing of the daemon is replaced but what starts its jobs, and how many trials one evaluation may have at once (no
setting says that).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import resource
import shutil
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from support import toys

from bench import synthetic
from bench.harness import spread
from bench.world import WATCHED
from coordinator.base import clock
from coordinator.intake import from_settings
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.interface.cli.service import Daemon
from coordinator.runtime import wiring
from coordinator.runtime.service import Service
from coordinator.runtime.summary import read_ended_summary
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.queue import redis_client

SETTLE_SECONDS = 5.0  # of an idle daemon before a row: the last jobs' ends are taken meanwhile
FEWEST_BLOCKS = 20  # of a line of code that is named in a row
TOYS = "toys.toml"  # the suite of real checkpoints
REAL = "real"  # the folder of announced checkpoints that are evaluated by lm-eval
STANDING = 100  # newest checkpoints in the watched folder; older ones are removed, as trainings do
Turn = Callable[[Service], None]


class Costs:
    """How long each turn of the loop took, and what this process has used while there was an evaluation to run."""

    def __init__(self, tick: Turn) -> None:
        self.tick, self.turns = tick, list[float]()
        self.began = (time.monotonic(), time.process_time())
        self.busy = (0.0, 0.0)  # seconds and CPU seconds until the last turn with an evaluation

    def turn(self, service: Service) -> None:
        self.turns.append(service.coordinator.turn_seconds)  # of the turn before
        self.tick(service)
        if service.coordinator.evaluations.busy:
            self.busy = (time.monotonic() - self.began[0], time.process_time() - self.began[1])

    def account(self) -> dict[str, Any]:
        """`cores`: CPU of this process alone over the seconds in which there was an evaluation to run."""
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "cores": self.busy[1] / max(1e-9, self.busy[0]),
            "rss_mb": rss,
            "turns": spread(self.turns[1:]),
        }


class Announcer:
    """Moves checkpoints into the watched folder group by group, and measures the daemon between two groups."""

    def __init__(self, tick: Turn, root: Path, at_once: int, minutes: float) -> None:
        self.tick, self.root, self.at_once = tick, root, at_once
        self.until = time.monotonic() + 60 * minutes
        for name in (WATCHED, REAL):
            (root / name).mkdir(exist_ok=True)
        # with each start: it names the tasks' folder of the tree that runs the bench now
        (root / TOYS).write_text(toys.suite_text("toys", {"toy_choice": {"limit": 8}}))
        self.left = sorted((root / "checkpoints").iterdir(), key=_number)
        # of checkpoints that were announced
        self.past = sorted([*(root / WATCHED).iterdir(), *(root / REAL).iterdir()], key=_number)
        self.ended = _number(self.past[-1]) + 1 if self.past else 0
        self.announced_at = clock.now()
        self.idle_since: float | None = None
        self.life = round(self.announced_at)

    def turn(self, service: Service) -> None:
        self.tick(service)
        coordinator, now = service.coordinator, clock.now()
        busy = bool(coordinator.evaluations.busy or coordinator.evaluations.running or service.waiting)
        busy = busy or any(service.paths.inbox.glob("*.json"))
        self.idle_since = None if busy else self.idle_since or now
        if self.idle_since is None or now - self.idle_since <= SETTLE_SECONDS:
            return
        with (self.root / "rows.jsonl").open("a") as file:
            row = {"life": self.life, "ended": self.ended, **self.seconds(service.paths)}
            file.write(json.dumps(row | holdings(service.paths)) + "\n")
        self.idle_since = None
        if not self.left or time.monotonic() > self.until:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        for place in self.past[:-STANDING]:
            shutil.rmtree(place)
        group, self.left = self.left[: self.at_once], self.left[self.at_once :]
        self.past, self.ended = self.past[-STANDING:], self.ended + len(group)
        self.past += [self.announce(place, service.paths) for place in group]
        self.announced_at = clock.now()

    def announce(self, place: Path, work: WorkPaths) -> Path:
        if not place.name.startswith(synthetic.REAL):
            return place.rename(self.root / WATCHED / place.name)
        there, suite = self.root / REAL / place.name, str(self.root / TOYS)
        # first: announced again where this process is killed before the move
        leave_notice(work, Notice(checkpoint=str(there), suite=suite, noticed_at=clock.now()))
        return place.rename(there)

    def seconds(self, work: WorkPaths) -> dict[str, list[float]]:
        """From the announcement of the last group to the scores of each of its evaluations, and of each real one."""
        took: dict[str, list[float]] = {"seconds": [], "real_seconds": []}
        for record in work.root.glob("*/evaluation.json"):
            if record.stat().st_mtime < self.announced_at:
                continue
            if (end := read_ended_summary(EvaluationPaths(record.parent))) and end.ended_at:
                kind = "real_seconds" if record.parent.name.startswith(synthetic.REAL) else "seconds"
                took[kind].append(end.ended_at - self.announced_at)
        return took


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def holdings(work: WorkPaths) -> dict[str, Any]:
    """What this process holds now, and what is in Redis and in the work folder outside of evaluations' own folders.

    `blocks_of`: of Python's allocator, of each line that has many, where PYTHONTRACEMALLOC is set.
    """
    gc.collect()
    tasks = list(Path("/proc/self/task").iterdir())
    found: dict[str, Any] = {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(tasks),
        "children": sum(len((task / "children").read_text().split()) for task in tasks),
        "resident_mb": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20,
        "python_blocks": sys.getallocatedblocks(),
    }
    with redis_client.make_client(redis_client.read_address(work.redis_address)) as client:
        info: dict[str, Any] = client.info()  # type: ignore[assignment]
        found["redis_mb"] = info["used_memory"] / 2**20
        found["redis_keys"] = sum(1 for _ in client.scan_iter(count=1000))
    inodes = size = indexed = own_inodes = evaluations = 0
    for place, folders, names in os.walk(work.root):
        own = {name for name in folders if Path(place, name, "journal.jsonl").exists()}
        evaluations += len(own)
        own_inodes += sum(1 for name in own for _ in Path(place, name).rglob("*"))
        folders[:] = [name for name in folders if name not in own]
        inodes += len(folders) + len(names)
        for name in names:
            file = Path(place, name)
            # `priors.table` drops old runs: the file of observations grows up to a bound
            if file == work.observations:
                continue
            with contextlib.suppress(OSError):
                if (
                    file == work.samples or file.parent == work.trainings
                ):  # a line of each evaluation that is there
                    indexed += file.stat().st_size
                else:
                    size += file.stat().st_size
    found |= {"work_inodes": inodes, "rest_kb": size / 1024}
    found["index_bytes_each"] = indexed / max(1, evaluations)
    if tracemalloc.is_tracing():
        lines = tracemalloc.take_snapshot().statistics("lineno")
        found["blocks_of"] = {str(one.traceback): one.count for one in lines if one.count >= FEWEST_BLOCKS}
    return found | {"inodes_each": own_inodes / max(1, evaluations)}


def synthetic_jobs() -> None:
    """Have the daemon of this process start its jobs with `bench.synthetic`."""
    command = (sys.executable, "-m", "bench.synthetic")
    site_of, run_options = wiring.site_of, from_settings.run_options
    own, most = {"trial_command": command, "worker_command": command}, synthetic.given()["trials_each"]
    wiring.site_of = lambda config: dataclasses.replace(site_of(config), **own)
    from_settings.run_options = lambda config: run_options(config).model_copy(update={"max_trials": most})


def main(root: Path, at_once: int = 0, minutes: float = 0.0) -> None:
    os.environ[synthetic.FOLDER] = str(root)
    os.environ.pop("PYTHONTRACEMALLOC", None)  # this process alone is traced, not its jobs
    # pydantic keeps strings that it read, about 16,000: full before the first row, as after weeks
    TypeAdapter(list[str]).validate_json(json.dumps([f"string {n}" for n in range(200_000)]))
    costs = Costs(Service.tick)
    synthetic_jobs()
    each = Announcer(Service.tick, root, at_once, minutes).turn if at_once else costs.turn
    Service.tick = lambda service: each(service)  # type: ignore[method-assign] # noqa: PLW0108 (binds it)
    try:
        Daemon(config=root / "evalspan.toml", until_idle=not at_once).run()
    finally:
        (root / "costs.json").write_text(json.dumps(costs.account()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
