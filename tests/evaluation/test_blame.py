"""What is to blame for trials that fail on a shard: bad nodes rest, poison shards are quarantined, seeded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import VAGUE, World

from coordinator.allocation.demand import at_fault
from coordinator.evaluation.events import JobEnded
from coordinator.evaluation.job_ends import (
    MAX_DEATHS,
    MAX_KILLS,
    MAX_KILLS_ON_ONE_NODE,
    NODE_WORDS,
    SHARD_WORDS,
    whose,
)
from coordinator.evaluation.jobs import PREEMPTED
from coordinator.evaluation.memory import MAX_DOUBLINGS

ECC = (
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered Search for `cudaErrorECCUncorrectable'"
)
ASSERT = "AcceleratorError: CUDA error: device-side assert triggered Search for `cudaErrorAssert' in"
MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
QUIET = Faults()
BUSY = Faults(
    submit_waits=0.2, submit_timeout=0.05, listing=0.2, wipe_queue=0.02, restart=0.05, slow_outcome=0.3
)


def faulty(*args: Any, **kwargs: Any) -> World:
    """Trials claim shards as from the real queue."""
    return World(*args, in_order=True, **kwargs)


def in_use_again(world: World) -> None:
    """No node that works is out of use, or only for as long as one rest."""
    for node in world.state.nodes.by_name.values():
        assert node.name in world.odd.bad or node.back_offs <= 1, world.summary()


@pytest.mark.parametrize("phrase", NODE_WORDS)
def test_words_that_only_hardware_says_are_the_nodes(phrase: str) -> None:
    """As torch says them; the same words in a prompt are no error of CUDA."""
    assert whose(f"AcceleratorError: CUDA error: {phrase} Search for") == "node"
    assert whose(f"RuntimeError: CUDA error: {phrase} CUDA kernel errors might be asynchronously") == "node"
    assert whose(f"KeyError: '{phrase}'") == "either"


def test_words_that_tell_nothing_of_whose_fault_it_is() -> None:
    """A kernel's check of its input is the shard's; memory, addresses, other errors may be either's."""
    assert {whose(f"RuntimeError: CUDA error: {phrase}") for phrase in SHARD_WORDS} == {"shard"}
    for error in (
        MEMORY,
        VAGUE,
        "ValueError: no",
        "RuntimeError: CUDA error: unspecified launch failure",
        "",
    ):
        assert whose(error) == "either"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(2, 4),
    gpus=st.sampled_from([1, 2, 8]),
    error=st.sampled_from([ECC, VAGUE, MEMORY]),
    faults=st.sampled_from([QUIET, BUSY]),
)
def test_a_bad_node_among_good_ones_costs_nothing(
    seed: int, nodes: int, gpus: int, error: str, faults: Faults
) -> None:
    """Whatever its error, each of its trials fails on a shard: every entry is scored, no shard is quarantined,
    and where it had the time to fail again and again it is in back-off."""
    world = faulty(seed, faults, record(entries=8), nodes=nodes, gpus=gpus)
    world.odd.bad = {"n0": error}
    world.run_to_scores()
    most = 3 if error == ECC else 3 * gpus
    backed_off = [w for w in world.state.warnings if w.startswith("node n0 is in back-off")]
    late = 4 if faults.restart else 0  # with shards that another trial has done meanwhile
    assert backed_off or world.died_at.get("n0", 0) < most + gpus + late, world.died_at
    assert not [w for w in world.state.warnings if "is in back-off" in w and "n0" not in w] or faults.restart


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 4),
    gpus=st.sampled_from([1, 2, 8]),
    error=st.sampled_from([ASSERT, VAGUE, MEMORY]),
    how=st.tuples(st.booleans(), st.sampled_from([QUIET, BUSY])),
)
def test_poison_costs_its_task_and_no_node(
    seed: int, nodes: int, gpus: int, error: str, how: tuple[bool, Faults]
) -> None:
    """One shard, or all of a task: the task fails after a bounded number of deaths of each, everything else is scored, and
    no node is out of use for longer than one rest."""
    whole, faults = how
    world = faulty(seed, faults, record(entries=6), nodes=nodes, gpus=gpus)
    world.until_planned()
    shards = list(world.state.shards.leaves["t1"].planned.shards)
    world.odd.poison = dict.fromkeys(shards if whole else shards[:1], error)
    world.run()
    assert {e.name for e in world.state.entries if e.status != "scored"} == {"t1"}, world.summary()
    assert f"took down {MAX_KILLS}" in world.state.entries[1].error or nodes > 1
    assert max(world.deaths.values()) <= MAX_KILLS_ON_ONE_NODE + (3 if faults.restart else 0)
    world.assert_nothing_left()
    in_use_again(world)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(3, 4),
    gpus=st.sampled_from([1, 2, 8]),
    errors=st.tuples(st.sampled_from([ECC, VAGUE]), st.sampled_from([ASSERT, VAGUE])),
)
def test_a_bad_node_and_a_poison_shard_are_told_apart(
    seed: int, nodes: int, gpus: int, errors: tuple[str, str]
) -> None:
    """Both at once: the poison's task fails and no other."""
    world = faulty(seed, BUSY, record(entries=6), nodes=nodes, gpus=gpus)
    world.odd.bad = {"n0": errors[0]}
    world.until_planned()
    poison = world.state.shards.leaves["t1"].planned.shards[0]
    world.odd.poison = {poison: errors[1]}
    world.run()
    assert {e.name for e in world.state.entries if e.status != "scored"} == {"t1"}, world.summary()
    world.assert_nothing_left()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    error=st.sampled_from([ECC, ASSERT, VAGUE]),
    everything=st.booleans(),
)
def test_where_all_nodes_or_all_shards_are_bad_it_ends_with_reasons(
    seed: int, nodes: int, error: str, everything: bool
) -> None:
    """It ends after a bounded number of trials, and each entry says why."""
    world = faulty(seed, Faults(slow_outcome=0.2), record(entries=5), nodes=nodes)
    world.until_planned()
    if everything:
        world.odd.poison = dict.fromkeys(world.state.shards.by_name, error)
    else:
        world.odd.bad = dict.fromkeys(world.node_names, error)
    world.run()
    assert all(e.status == "failed" and e.error for e in world.state.entries)
    assert sum(world.died_at.values()) <= MAX_KILLS_ON_ONE_NODE * len(world.state.shards.by_name) + 8 * nodes
    world.assert_nothing_left()


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), gpus=st.sampled_from([1, 2, 8]))
def test_a_node_without_its_gpus_rests_at_once_and_no_evaluation_is_offered_it(seed: int, gpus: int) -> None:
    """One trial a lane dies there before the node rests, for one minute and longer each time; all is scored elsewhere."""
    world = faulty(seed, QUIET, record(entries=6), nodes=2, gpus=gpus)
    world.odd.blind = True
    world.until_planned()
    bad = world.node_names[0]
    world.odd.bad = {bad: "no GPU"}
    told: set[str] = set()
    while world.state.ended_at is None:
        world.tick()
        node = world.state.nodes.by_name.get(bad)
        resting = node is not None and node.status == "back-off"
        told |= at_fault([world.state]).keys()
        assert not (at_fault([world.state]) and not resting)
    world.assert_scored()
    node = world.state.nodes.by_name.get(bad)
    if node is not None and node.back_offs:
        assert told == {bad}
        assert world.died_at[bad] <= gpus * node.back_offs


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3), gpus=st.sampled_from([1, 2, 8]))
def test_a_shard_that_takes_too_much_memory_is_named_and_no_node_is(seed: int, nodes: int, gpus: int) -> None:
    """Its trials are killed without a word of their own, also with more memory: it is quarantined as if they had told of it."""
    world = faulty(seed, Faults(listing=0.2, slow_outcome=0.2), record(entries=6), nodes=nodes, gpus=gpus)
    world.odd.silent = True
    world.until_planned()
    shard = world.state.shards.leaves["t1"].planned.shards[0]
    world.odd.poison = {shard: "OUT_OF_MEMORY"}
    world.run()
    failed = {e.name: e.error for e in world.state.entries if e.status != "scored"}
    assert failed.keys() == {"t1"}, world.summary()
    assert f"shard {shard} took down" in failed["t1"]
    assert world.deaths[shard] <= MAX_KILLS_ON_ONE_NODE + MAX_DOUBLINGS
    world.assert_nothing_left()
    in_use_again(world)


def test_preemptions_end_no_evaluation() -> None:
    """However many in a row: they are no fault of a trial, so the evaluation waits for its place."""
    world = World(1, preempts=True)
    for _ in range(200):
        world.tick()
    preempted = [e for e in world.journal if isinstance(e, JobEnded) and e.state == PREEMPTED]
    assert len(preempted) > 2 * MAX_DEATHS * len(world.node_names)
    assert not world.state.ending.reason
