"""Trying again what has failed, at any moment of an evaluation's life, seeded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import VAGUE, World

from coordinator.evaluation import events as ev

FAULTS = Faults(
    kill=0.005,
    submit_waits=0.2,
    submit_timeout=0.05,
    listing=0.2,
    restart=0.03,
    slow_outcome=0.3,
    item_fails=0.1,
)


def nothing_is_doubled(world: World) -> None:
    """No node is staged on twice, and no lane has two trials, but for jobs that were told to end."""
    live = [world.state.jobs.by_name[name] for name in world.state.jobs.live]
    held = Counter(i.job.node for i in live if i.job.purpose in ("stage", "host") and i.released_at is None)
    assert max(held.values(), default=0) <= 1, world.summary()
    lanes = Counter(
        trial.lane
        for trial in world.state.trials.live.values()
        if world.state.jobs.by_name[trial.job].released_at is None
    )
    assert max(lanes.values(), default=0) <= 1, world.summary()
    for info in live:  # a live precursor belongs to a node
        node = world.state.nodes.by_name.get(info.job.node or "")
        if info.job.purpose in ("stage", "host") and info.released_at is None and node is not None:
            assert node.precursor == info.job.name, world.summary()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    asked=st.lists(st.integers(0, 120), min_size=1, max_size=6),
    cancelled=st.none() | st.integers(0, 60),
)
def test_a_retry_at_any_moment_doubles_and_orphans_nothing(
    seed: int, nodes: int, asked: list[int], cancelled: int | None
) -> None:
    """Whenever it is asked for, of an evaluation that runs, is ending or has ended: what had failed is tried again, no
    job is there twice, and in the end, with the reason gone, all is scored and nothing is left."""
    world = World(
        seed, Faults(**vars(FAULTS) | {"build_fails": 0.3}), record(entries=5), nodes=nodes, in_order=True
    )
    tick = 0
    while world.state.ended_at is None or tick <= max(asked):
        if world.state.shards.leaves and not world.odd.poison and tick < 40:
            world.odd.poison = dict.fromkeys(list(world.state.shards.by_name)[:2], VAGUE)
        if tick in asked:
            world.take([ev.RetryAsked(at=world.now)])
        if tick == cancelled and world.state.ended_at is None:
            world.take([ev.CancelAsked(at=world.now, reason="asked")])
        world.tick()
        nothing_is_doubled(world)
        tick += 1
        assert tick < 2000, world.summary()
    world.assert_nothing_left()
    world.odd.poison = {}
    world.faults = Faults(listing=0.1)
    if world.state.failed_entries() or world.state.unscored_items:
        world.take([ev.RetryAsked(at=world.now)])
        world.run()
    world.assert_scored()
    world.assert_nothing_left()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3))
def test_a_retry_of_what_runs_takes_nothing_from_it(seed: int, nodes: int) -> None:
    """With an entry failed and the rest inferring: no job ends of it, no weights are staged anew, the entry is scored."""
    world = World(seed, Faults(), record(entries=12), nodes=nodes, in_order=True)
    world.until_planned()
    poison = world.state.shards.leaves["t1"].planned.shards[0]
    world.odd.poison = {poison: VAGUE}
    while not world.state.failed_entries() and world.state.ended_at is None:
        world.tick()
    world.odd.poison = {}
    if world.state.ended_at is not None or not world.state.shards.todo:
        return  # it came last
    live, staged = set(world.state.jobs.live), [j for j in world.jobs if world.jobs[j].job.purpose == "stage"]
    world.take([ev.RetryAsked(at=world.now)])
    assert live <= world.state.jobs.live
    assert not [n for n in live if world.state.jobs.by_name[n].released_at is not None]
    world.run_to_scores()
    anew = [j for j in world.jobs if world.jobs[j].job.purpose == "stage" and j not in staged]
    nodes_then = {world.jobs[j].job.node for j in staged}
    assert not nodes_then & {world.jobs[j].job.node for j in anew}
    world.assert_nothing_left()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), ticks=st.integers(0, 40), after=st.integers(0, 3))
def test_a_retry_while_it_is_being_cancelled_waits_for_the_end(seed: int, ticks: int, after: int) -> None:
    """It is not lost: once the last job has ended all is tried again, and scored. A second cancellation takes it back."""
    for taken_back in (False, True):
        world = World(seed, Faults(), record(entries=4), in_order=True)
        for _ in range(ticks):
            if world.state.ended_at is None:
                world.tick()
        if world.state.ended_at is not None:
            return
        world.take([ev.CancelAsked(at=world.now, reason="asked")])
        for _ in range(after):
            world.tick()
        world.take([ev.RetryAsked(at=world.now)])
        if taken_back:
            world.take([ev.CancelAsked(at=world.now, reason="asked")])
        while world.state.ended_at is None:
            world.tick()
            nothing_is_doubled(world)
        if not taken_back:
            world.assert_scored()
        assert not world.state.ending.retry_waits
        world.assert_nothing_left()
