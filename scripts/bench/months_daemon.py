"""`evalspan daemon` on a furnished folder, which announces checkpoints to itself and measures what it holds between them.

    python -m bench.months_daemon FOLDER AT_ONCE [played]

Rule: nothing of the daemon is replaced but what starts its jobs (`bench.timed`); with "played" its cluster and its clock
are (`bench.months_world`). AT_ONCE checkpoints are announced, and
once all have ended, QUIET turns of the loop pass and a row is added to FOLDER/rows.jsonl. After the last checkpoint it
ends by SIGTERM, as an operator would end it. Started again, it announces no checkpoint that an earlier one has accepted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.folder import WATCHED
from bench.growth import holdings
from bench.months_world import World, play
from bench.timed import synthetic_jobs
from coordinator.base import clock
from coordinator.cli.service import Daemon
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.service import Service

SETTLE_SECONDS = 3.0  # of an idle daemon before its turns count: the last jobs' ends are taken meanwhile
STANDING = 100  # newest checkpoints in the watched folder; older ones are removed, as trainings do
QUIET = 40  # turns with nothing to do, of 0.2 s each, that are timed for a row


class Announcer:
    """Announces checkpoints group by group, and measures the daemon between two groups."""

    def __init__(self, root: Path, at_once: int, world: World | None) -> None:
        self.root, self.at_once, self.world = root, at_once, world
        found = sorted((root / "checkpoints").iterdir(), key=_step)
        accepted = (root / "work").glob("*/journal.jsonl")
        known = {journal.parent.name.partition("-synthetic-")[0] for journal in accepted}
        self.left = [place for place in found if place.name not in known]
        self.past: list[Path] = []  # checkpoints that were put into the watched folder
        self.ended = len(known)
        self.rows = root / "rows.jsonl"
        rows = self.rows.read_text().splitlines() if self.rows.exists() else []
        self.process = 1 + (json.loads(rows[-1])["process"] if rows else 0)  # number of this daemon
        self.idle_since: float | None = None
        self.turns: list[float] = []  # CPU seconds of idle turns
        self.began = 0.0

    def turn_began(self) -> None:
        self.began = time.thread_time()

    def turn_ended(self, service: Service) -> None:
        """Called after each turn of the daemon's loop."""
        spent, now = time.thread_time() - self.began, clock.now()
        busy = bool(service.coordinator.busy or service.coordinator.running or service.waiting)
        busy = busy or any(service.paths.inbox.glob("*.json"))
        if self.world is not None:
            self.world.turn(busy=busy)
        if busy:
            self.idle_since = None
            self.turns.clear()
            return
        self.idle_since = self.idle_since or now
        if now - self.idle_since > SETTLE_SECONDS:
            self.turns.append(spent)
        if len(self.turns) >= QUIET:
            self._measure(service)
            self._announce(service)

    def _measure(self, service: Service) -> None:
        row = {
            "ended": self.ended,
            "process": self.process,
            "at": time.time(),
            "idle_turn_ms": 1000 * sum(self.turns) / len(self.turns),
        }
        row |= holdings(service.paths)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _announce(self, service: Service) -> None:
        self.idle_since = None
        self.turns.clear()
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        for place in self.past[:-STANDING]:
            shutil.rmtree(place)
        self.past = self.past[-STANDING:]
        group, self.left = self.left[: self.at_once], self.left[self.at_once :]
        self.ended += len(group)
        for place in group:
            if (self.root / WATCHED).is_dir():
                self.past.append(place.rename(self.root / WATCHED / place.name))
                continue
            suite = str(self.root / "suite.toml")
            notice = Notice(checkpoint=str(place), step=_step(place), suite=suite, noticed_at=time.time())
            leave(service.paths, notice)


def _step(place: Path) -> int:
    return int(place.name.rpartition("-")[2])


def watched(announcer: Announcer) -> None:
    """Have each turn of the daemon's loop pass through the announcer."""
    first, second = Coordinator.tick, Service.tick

    def coordinator_tick(self: Any) -> None:
        announcer.turn_began()
        first(self)

    def service_tick(self: Any) -> None:
        second(self)
        announcer.turn_ended(self)

    patched: dict[Any, Callable[[Any], None]] = {Coordinator: coordinator_tick, Service: service_tick}
    for owner, tick in patched.items():
        owner.tick = tick


def main(root: Path, at_once: int, *, played: bool) -> None:
    world = None
    if played:
        world = play(root)
    else:
        synthetic_jobs(root)
    watched(Announcer(root, at_once, world))
    Daemon(config=root / "evalspan.toml").run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), played="played" in sys.argv[3:])
