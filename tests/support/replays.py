"""Journals of simulated evaluations under faults, and what they lead to: `python -m support.replays > FILE`, in a commit's clone."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.state import State
from support.simulated.parts import SITE, Faults
from support.simulated.world import World

SEEDS = 16
MOMENTS = 5  # of a journal, its end among them
Replay = tuple[list[ev.AnyEvent], dict[int, Any]]  # events; how many of them -> what they lead to


def standing(state: State) -> Any:
    """What is done, what is lost, and which jobs there are, as JSON keeps it."""
    found = {
        "entries": [(e.status, e.error, e.build_attempts, e.score_attempts) for e in state.entries],
        "shards": {n: s.frame.file if s.frame else None for n, s in state.shards.by_name.items()},
        "jobs": {n: (j.phase, j.job_id) for n, j in state.jobs.by_name.items()},
        "trials": sorted(state.trials.live),
        "metrics": {n: m.done for n, m in state.scoring.metrics.items()},
        "end": (state.ending.phase.value, state.ended_at),
    }
    return json.loads(json.dumps(found))


def simulated() -> Iterator[Replay]:
    """Evaluations of this commit, each under faults of its own."""
    for seed in range(SEEDS):
        dice = random.Random(seed)
        chances = {
            f.name: dice.choice([0.0, 0.02, 0.1]) for f in fields(Faults) if isinstance(f.default, float)
        }
        world = World(seed, Faults(**chances))
        world.run()
        moments = {len(world.journal), *(dice.randrange(2, len(world.journal)) for _ in range(MOMENTS - 1))}
        yield world.journal, replayed(world.journal, moments)


def replayed(events: list[ev.AnyEvent], moments: Iterable[int]) -> dict[int, Any]:
    """Number of events -> what they lead to by this commit's rules. IllegalEventError."""
    assert isinstance(events[0], ev.Accepted)
    state, _ = machine.start(events[0])
    found = {}
    for number, event in enumerate(events[1:], start=2):
        machine.step(state, SITE, event, replaying=True)
        if number in moments:
            found[number] = standing(state)
    return found


def read(file: Path) -> Iterator[Replay]:
    with gzip.open(file, "rt") as lines:
        for line in lines:
            kept = json.loads(line)
            events = [ev.EVENT.validate_python(event) for event in kept["events"]]
            yield events, {int(number): standing for number, standing in kept["standings"].items()}


if __name__ == "__main__":
    with gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", mtime=0) as out:
        for journal, standings in simulated():
            events = [ev.EVENT.dump_python(event, mode="json") for event in journal]
            out.write(json.dumps({"events": events, "standings": standings}).encode() + b"\n")
