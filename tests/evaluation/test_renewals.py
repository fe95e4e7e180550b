"""Precursors ask for as much time as the trials that they serve, and are renewed while trials are to come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import SITE, FakeJob, FakeMember, Faults, record
from support.simulated.world import World

from coordinator.evaluation import nodes
from coordinator.evaluation.time_limits import SHORTEST_LIMIT_SECONDS, UNPLANNED_SECONDS

LIFE = 60.0  # seconds that this cluster gives a precursor


class Short(World):
    """Precursors end after LIFE seconds. Trials do a shard every other tick at most, so that one precursor is too few."""

    closed: frozenset[str] = frozenset()  # nodes that start no second precursor beside the first

    def __init__(self, *arguments: Any) -> None:
        self.begun: dict[int, float] = {}
        self.gaps = 0  # ticks in which a node that had weights had none, with shards to do
        self.had: set[str] = set()
        super().__init__(*arguments)

    def ends_at(self, job: FakeJob, member: FakeMember) -> float | None:
        if job.job.purpose != "stage" or member.phase != "running":
            return None
        return self.begun.setdefault(id(member), self.now) + LIFE

    def starts(self, job: FakeJob, member: FakeMember) -> bool:
        held = any(node == job.job.node for node, _ in self.memory)
        if job.job.purpose == "stage":
            return not (held and job.job.node in self.closed)
        return super().starts(job, member)

    def run_trial(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.dice.random() < 0.3:
            super().run_trial(job, index, member)

    def work(self) -> None:
        for job in self.jobs.values():
            for index, member in job.members.items():
                if (end := self.ends_at(job, member)) is not None and self.now >= end:
                    member.word = "COMPLETED"
                    self.end_member(job, index, member)
        super().work()

    def tick(self) -> None:
        super().tick()
        have = {node for node, _ in self.memory}
        self.gaps += len(self.had - have) if self.state.shards.todo else 0
        self.had |= have
        assert self.state.nodes.renewals.keys() <= self.state.jobs.live


@pytest.mark.parametrize("seed", range(8))
def test_a_node_s_weights_stay_while_trials_are_to_come(seed: int) -> None:
    """However often its precursors reach their limit: the copy has a holder, no trial reads storage, nothing is left."""
    world = Short(seed, Faults(), record(entries=12))
    world.run_to_scores()
    stages = [j for j in world.jobs.values() if j.job.purpose == "stage"]
    assert len(stages) > len(world.node_names)
    assert all(n.rung == "shm" for n in world.state.nodes.by_name.values() if n.rung)
    assert world.gaps == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), closed=st.sets(st.sampled_from(["n0", "n1"])))
def test_renewals_survive_deaths_restarts_and_nodes_without_room(seed: int, closed: set[str]) -> None:
    """A successor that must wait for the first one's end stages again."""
    faults = Faults(kill=0.01, restart=0.03, stage_fails=0.05, submit_waits=0.2, node_down=0.005, vanish=0.2)
    world = Short(seed, faults, record(entries=8))
    world.closed = frozenset(closed)
    world.run_to_scores()


@pytest.mark.parametrize("seed", range(4))
def test_a_precursor_that_follows_one_at_its_limit_is_no_new_attempt(seed: int) -> None:
    """More of them than MAX_PRECURSORS, with no room for two at once, and no trial reads storage."""
    world = Short(seed, Faults(), record(entries=30))
    world.closed = frozenset(world.node_names)
    world.run_to_scores()
    for name in world.node_names:
        stages = [j for j in world.jobs.values() if j.job.purpose == "stage" and j.job.node == name]
        assert len(stages) > nodes.MAX_PRECURSORS
        assert world.state.nodes.by_name[name].rung != "storage"


def test_a_precursor_asks_for_the_time_of_the_trials_that_it_serves() -> None:
    """An hour before the plan, then what a lane's share is predicted to take; the staging comes to it."""
    world = World(1, Faults(), record(entries=4, trial_time_limit_seconds=24 * 3600))
    while not world.state.live_jobs("stage"):
        world.tick()
    early = world.state.live_jobs("stage")[0].job.time_limit_seconds
    while not world.state.live_jobs("trial"):
        world.tick()
    (node, *_) = world.state.nodes.by_name.values()
    later = nodes.precursor_job(world.state, SITE, replace(node), world.now)
    trial = world.state.live_jobs("trial")[0].job.time_limit_seconds
    assert UNPLANNED_SECONDS < early < UNPLANNED_SECONDS + 600
    assert SHORTEST_LIMIT_SECONDS <= trial < later.job.time_limit_seconds < trial + 600
