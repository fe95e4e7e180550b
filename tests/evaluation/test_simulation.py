"""The machine under seeded failures: thousands of interleavings, each replayable by its seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.shared import Shared
from support.simulated.world import VAGUE, World, replay

from coordinator.evaluation import events as ev


@pytest.mark.parametrize("seed", range(20))
def test_without_stealing_a_lane_runs_exactly_the_shards_that_were_planned_for_it(seed: int) -> None:
    """`steal` False, undisturbed: every shard is run once, by a trial of its planned lane, and no lane has two trials."""
    world = World(seed, Faults(), record(steal=False), nodes=3)
    world.run_to_scores()
    (plan,) = (e for e in world.journal if isinstance(e, ev.Planned))
    lane_of = {s: lane.lane for lane in plan.lanes for s, _, _ in lane.shards}
    ran = {
        s: world.state.trials.by_name[frame.file.removesuffix(".frames")].lane
        for e in world.journal
        if isinstance(e, ev.ShardsDumped)
        for s, frame in e.shards
    }
    assert ran == lane_of
    assert all(n == 1 for n in world.frames.values())
    lanes = [trial.lane for trial in world.state.trials.by_name.values()]
    assert len(set(lanes)) == len(lanes)


@pytest.mark.long
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), quiet=st.booleans())
def test_evaluations_that_share_a_cluster_all_end(seed: int, quiet: bool) -> None:
    """They arrive while others infer, with GPUs and memory for few of them, nodes given back, down, taken by other
    users' jobs: none waits for another for ever, each is scored, and nothing is left."""
    faults = Faults(
        kill=0.005,
        submit_waits=0.2,
        submit_timeout=0.05,
        listing=0.2,
        overrun=0.02,
        restart=0.02,
        stage_fails=0.03,
        slow_outcome=0.2,
        preempt=0.01,
    )
    shared = Shared(seed, Faults() if quiet else faults)
    shared.run()
    for tenant in shared.tenants:
        lost = [e for e in tenant.state.entries if e.status != "scored"]
        told = tenant.state.ending.reason or all("times" in e.error for e in lost)
        assert not lost or (told and not quiet), tenant.summary()
        tenant.assert_nothing_left()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), steal=st.booleans())
def test_a_journal_rebuilds_the_state_exactly(seed: int, steal: bool) -> None:
    """Replaying the journal gives the state that the living coordinator had, whatever happened."""
    faults = Faults(
        kill=0.02, submit_timeout=0.05, wipe_queue=0.02, slow_outcome=0.2, build_fails=0.1, node_down=0.05
    )
    world = World(seed, faults, record(steal=steal))
    for _ in range(40):
        if world.state.ended_at is None:
            world.tick()
        assert replay(world.journal) == world.state


def test_a_stragglers_lane_is_left_alone_while_another_trial_runs() -> None:
    """It ends with shards to do: no trial follows it on its lane while another one runs."""
    checked = 0
    for seed in range(30):
        world = World(seed, Faults(straggle=0.2), record(entries=8))
        before: set[str] = set()
        for _ in range(200):
            if world.state.ended_at is not None:
                break
            runs = any(world.state.running_lanes(node) for node in world.state.nodes.by_name)
            shunned = {world.state.trials.by_name[t].lane for t in world.state.trials.stragglers}
            before = set(world.state.trials.live)
            world.tick()
            still = any(
                world.state.running_lanes(node) for node in world.state.nodes.by_name
            ) and before & set(world.state.trials.live)
            for trial in set(world.state.trials.live) - before if runs and still else ():
                checked += 1
                assert world.state.trials.by_name[trial].lane not in shunned, world.summary()
        world.assert_scored()
    assert checked, "no trial followed another: other dice are needed"


def inferring(world: World) -> bool:
    """A shard is done and another one is to do, with a trial running."""
    done = any(s.frame is not None for s in world.state.shards.by_name.values())
    return (
        done
        and world.state.shards.todo > 2
        and any(world.state.running_lanes(n) for n in world.state.nodes.by_name)
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_node_that_takes_eight_trials_with_it_ends_no_evaluation(seed: int) -> None:
    """Eight deaths in one listing are one node's fault: it rests, and the work goes on, also where it was the only one."""
    world = World(seed, Faults(), record(entries=12), nodes=1 + seed % 2, gpus=8)
    while not inferring(world):
        world.tick()
    world.kill("trial", ["n0"])
    world.tick()
    assert not world.state.ending.reason
    world.run_to_scores()


@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_all_rest_are_waited_for(seed: int) -> None:
    """Trials die until every node is in back-off; the evaluation waits for the first to return, says so, and ends well."""
    world = World(seed, Faults(), record(entries=12))
    while not inferring(world):
        world.tick()
    world.odd.unready = frozenset(world.node_names)
    while not all(n.status == "back-off" for n in world.state.nodes.by_name.values()):
        world.tick()
    assert not world.state.ending.reason
    times = [n.back_off_until or 0 for n in world.state.nodes.by_name.values()]
    assert world.state.waits_until == min(times) > world.now
    world.odd.unready = frozenset()
    world.run_to_scores()


@pytest.mark.parametrize("seed", range(10))
def test_weights_go_once_no_shard_is_left(seed: int) -> None:
    """While metrics still run no node holds weights; a record that proves unreadable has them staged once more."""
    world = World(seed, Faults(), record(entries=4))
    score, world.run_metric = world.run_metric, lambda *_: None  # type: ignore[method-assign]
    while world.memory or not world.state.shards.leaves or world.state.shards.todo:
        world.tick()
        assert world.now < 5000, world.summary()
    assert world.state.scoring.outstanding
    assert world.state.ended_at is None
    shard = sorted(world.state.shards.by_name)[seed % len(world.state.shards.by_name)]
    world.take([ev.ShardCorrupted(at=world.now, shard=shard, error="torn")])
    world.run_metric = score  # type: ignore[method-assign]
    world.run_to_scores()
    assert world.frames[shard] == 2


def test_a_node_returns_from_a_rest_and_rests_longer_each_time() -> None:
    """A minute, then two; back in use, one more death and it rests again. The time is in the state."""
    world = World(1, Faults(), record(entries=60), gpus=1, in_order=True, bad={"n0": VAGUE})
    rests: dict[int, float] = {}
    while world.state.ended_at is None:
        world.tick()
        for node in world.state.nodes.by_name.values():
            if node.back_off_until is not None:
                rests.setdefault(node.back_offs, node.back_off_until - world.now)
    assert len(rests) > 2
    assert all(rest == 60.0 * 2 ** (number - 1) for number, rest in rests.items())
    world.assert_scored()
