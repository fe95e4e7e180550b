"""How evaluations end: jobs that have not started are no reason to wait, and no node rests after the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import SITE, Faults, ended, record
from support.simulated.world import World

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.runtime import detect
from evaljobs.contract.outcomes import Failed

TICK = 5.0


@pytest.mark.parametrize("seed", range(10))
def test_the_end_waits_for_no_worker_that_has_not_started(seed: int) -> None:
    """With all scored by the first worker, the second, still queued, is gone at once."""
    world = World(seed, rec=record(entries=6, workers=3), full=("metric", 1))
    plan = world.effect

    def wide(action: do.Action) -> list[ev.AnyEvent]:
        events: list[Any] = plan(action)
        return [e.model_copy(update={"workers": 3}) if isinstance(e, ev.Planned) else e for e in events]

    world.effect = wide  # type: ignore[method-assign]
    scored_at = None
    while world.state.ended_at is None:
        world.tick()
        if scored_at is None and all(e.terminal for e in world.state.entries):
            scored_at = world.now
    assert any(j.job.count == 3 for j in world.jobs.values() if j.job.purpose == "metric")
    assert scored_at is not None
    assert world.now - scored_at <= 3 * TICK
    world.assert_nothing_left()


def test_a_node_that_rests_is_told_of_once_and_not_after_the_end() -> None:
    """However long the last jobs take to end, the journal has a node's return only where something follows from it."""
    world = World(3, Faults())
    while not world.state.trials.live:
        world.tick()
    node = next(iter(world.state.nodes.by_name.values()))
    node.status, node.back_off_until = "back-off", world.now + TICK
    assert [e.kind for e in detect.waits_over(world.state, world.now + TICK)] == ["back-off-over"]
    machine.step(world.state, SITE, ev.CancelAsked(at=world.now, reason="asked"))
    assert world.state.jobs.live
    assert not detect.waits_over(world.state, world.now + 100 * TICK)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3), again=st.booleans())
def test_what_has_all_its_responses_is_scored_though_no_trial_lives_any_more(
    seed: int, nodes: int, again: bool
) -> None:
    """Once nodes are given up, entries that lack responses fail with the reason; the others are scored, however slow
    their metrics are. A retry then does the rest."""
    world = World(seed, Faults(metric_slow=1.0), record(entries=10), nodes=nodes)
    while (
        not world.state.shards.leaves
        or sum(leaf.todo == 0 for leaf in world.state.shards.leaves.values()) < 3
    ):
        world.tick()
    trial, world.run_trial = world.run_trial, world.end_member  # type: ignore[method-assign]
    while not world.state.ending.reason and world.state.shards.todo:
        world.tick()
    if not world.state.ending.reason:
        return  # the claimed shards were the last
    answered = {t for t, leaf in world.state.shards.leaves.items() if leaf.todo == 0}
    if again:
        world.run_trial = trial  # type: ignore[method-assign]
        world.take([ev.RetryAsked(at=world.now)])
    world.faults.metric_slow = 0.0
    world.run()
    assert {e.name for e in world.state.entries if e.status == "scored"} >= answered, world.summary()
    for entry in world.state.entries:
        assert entry.status == "scored" or (entry.error == world.state.ending.reason and not again), (
            world.summary()
        )
    world.assert_nothing_left()


@pytest.mark.parametrize("seed", range(5))
def test_no_trial_is_cancelled_that_has_said_that_it_ended(seed: int) -> None:
    """It exits by itself; cancelled, it would stand as CANCELLED in the site's accounting. One that still holds its GPU
    after `Grace.overdue` is cancelled.
    """
    world = World(seed, Faults(), record(entries=6))
    while not any(i.live and i.job.count == 2 for i in world.state.live_jobs("trial")):
        world.tick()
    info = next(i for i in world.state.live_jobs("trial") if i.job.count == 2)
    while info.phase != "submitted":
        world.tick()
    asked: list[do.CancelJob] = []
    world.cancel = asked.append  # type: ignore[method-assign]
    world.take([ev.OutcomeSeen(at=world.now, outcome=ended(info.job.node or "", info.trials[0], "drained"))])
    world.take([ev.CancelAsked(at=world.now, reason="asked")])
    assert [c.index for c in asked if c.job_id == info.job_id] == [1]
    grace, seen = detect.Grace(), detect.Sightings()
    assert info.job_id not in detect.overdue_jobs(world.state, seen, grace, world.now + grace.overdue)
    assert info.job_id in detect.overdue_jobs(world.state, seen, grace, world.now + grace.overdue + 1)


def test_a_hung_trial_counts_once_though_its_end_brings_an_error() -> None:
    """What was cancelled may fail on the way out: its shard and its node have answered for it."""
    world = World(1, nodes=1)
    while not world.claims:
        world.tick()
    shard, trial = next(iter(world.claims.items()))
    world.take([ev.TrialHung(at=world.now, trial=trial, shard=shard, seconds=900.0)])
    failed = Failed(name=trial, job="trial", blame="retry", error="NCCL timeout", node="n0", shard=shard)
    world.take([ev.OutcomeSeen(at=world.now + TICK, outcome=failed)])
    assert world.state.shards.by_name[shard].died_on == ["n0"]
    world.run_to_scores()
