"""Jobs that the kernel ends for lack of memory: the next ones ask for more, no node rests, and the setting is named."""

from __future__ import annotations

import pytest
from support.simulated.parts import FIRST_MB, Faults, record
from support.simulated.world import World

from coordinator.cluster import Purpose
from coordinator.evaluation import events as ev
from coordinator.evaluation import memory
from coordinator.evaluation.job_specs import trial_memory_mb
from coordinator.evaluation.memory import MAX_DOUBLINGS
from evaljobs.contract.specs import CheckpointFile

SETTINGS: dict[Purpose, str] = {
    "build": "[trial] memory_mb",
    "trial": "[trial] memory_mb",
    "metric": "[metric] memory_mb",
}


def strict(seed: int, purpose: Purpose, takes_mb: int, **world: int) -> World:
    """The kernel ends each job of one purpose that asks for less than it takes."""
    faults = Faults(listing=0.2, restart=0.02)
    return World(seed, faults, record(entries=4), takes_mb={purpose: takes_mb}, **world)


@pytest.mark.parametrize("purpose", ["build", "trial", "metric"])
def test_beyond_that_the_failure_names_the_setting_that_would_do(purpose: Purpose) -> None:
    """And a retry goes on from there."""
    most = FIRST_MB[purpose] << MAX_DOUBLINGS
    world = strict(3, purpose, 2 * most)
    world.run()
    assert max(world.asked_mb) == most
    errors = [e.error for e in world.state.entries if e.status != "scored"]
    assert errors
    assert all(f"it had {most} MB; set {SETTINGS[purpose]} = {2 * most}" in error for error in errors)
    world.workers_stopped = False
    world.take([ev.RetryAsked(at=world.now)])
    world.run_to_scores()


def of_nodes(takes_mb: int, node_mb: int) -> World:
    """A world whose trials take `takes_mb`, on one node of `node_mb`."""
    world = strict(3, "trial", takes_mb, nodes=1)
    world.faults.restart = 0.0
    while not world.state.nodes.by_name:
        world.tick()
    world.state.nodes.largest_mb = node_mb
    return world


def test_a_trial_is_given_what_the_node_has_where_twice_as_much_is_more_than_that() -> None:
    """8,000 MB, of which the weights take 513: 7,487 for a trial that had 4,097."""
    world = of_nodes(7000, 8000)
    world.run_to_scores()
    assert set(world.asked_mb) == {4097, 7487}
    assert any("set [trial] memory_mb = 7487 for later evaluations" in w for w in world.state.warnings)


def test_no_number_is_named_that_no_node_has() -> None:
    world = of_nodes(7600, 8000)
    world.run()
    assert set(world.asked_mb) == {4097, 7487}
    said = "it had 7487 MB, and no node has more than 8000 MB for it and the weights"
    assert all(said in entry.error for entry in world.state.entries)


def test_a_build_that_lacks_memory_never_lowers_what_trials_ask_for() -> None:
    """Both have one setting, and a trial asks for more by its weights."""
    world = strict(3, "build", 8192)
    file = CheckpointFile(name="model.safetensors", size=20 << 30, mtime_ns=1)
    state = world.state
    spec = state.record.checkpoint.model_copy(update={"files": (file,)})
    state.record = state.record.model_copy(update={"checkpoint": spec})
    before = trial_memory_mb(state.record)
    assert memory.short(state, "build", "it", had_mb=4096)
    assert trial_memory_mb(state.record) == before == 4096 + (20 << 10)
    assert f"it had 4096 MB, and the next asks for {before} MB" in state.warnings[-1]
