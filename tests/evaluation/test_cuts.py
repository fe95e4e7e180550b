"""Batches that do not fit a GPU's memory: exact names the size that fits, fast starts the task again in smaller units."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import SITE, Faults, ended, record
from support.simulated.world import World, replay

from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.cuts import MIN_TOKEN_BUDGET
from coordinator.evaluation.job_specs import specs_of
from coordinator.evaluation.records import cut_of
from coordinator.evaluation.shards import is_retired
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import Probed, TooLarge
from evaljobs.contract.specs import BuildSpec, SuiteSpec, TaskEntry

FAST = {"mode": "fast", "token_budget": 8192}


def run(seed: int, suite: dict[str, Any], fits: int, nodes: int = 2, **faults: float) -> World:
    world = World(seed, Faults(**faults), record(4, suite=suite), nodes=nodes)
    world.fits = fits
    world.run()
    return world


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    fits=st.sampled_from([300, 1024, 2048, 5000]),
    often=st.sampled_from([0.1, 0.5, 1.0]),
    nodes=st.integers(1, 3),
)
def test_a_budget_too_large_for_memory_loses_no_document_and_never_mixes_sizes(
    seed: int, fits: int, often: float, nodes: int
) -> None:
    """Whatever else goes wrong, every entry is scored, from answers in one cut, and a replay gives the same state."""
    world = run(
        seed,
        FAST,
        fits,
        nodes,
        too_large=often,
        kill=0.01,
        submit_timeout=0.05,
        listing=0.2,
        wipe_queue=0.03,
        lose_metric=0.05,
        restart=0.05,
        slow_outcome=0.3,
    )
    state = world.state
    assert not state.ending.reason, world.summary()
    assert all(e.status == "scored" or "times" in e.error for e in state.entries), world.summary()
    for leaf in state.shards.leaves.values():
        (cut,) = {ShardId.parse(shard).cut for shard in leaf.planned.shards}
        if not leaf.planned.executes:
            assert cut == state.cut_of(state.entries[leaf.planned.entry])
    reduced = [e for e in world.journal if isinstance(e, ev.TokenBudgetReduced)]
    by_entry = {e.entry: e.token_budget for e in reduced}
    assert by_entry == {e.index: e.token_budget for e in state.entries if e.token_budget}
    assert all(budget >= MIN_TOKEN_BUDGET for budget in by_entry.values())
    assert sum("starts again" in warning for warning in state.warnings) == len(reduced)
    assert replay(world.journal) == state
    world.assert_nothing_left()


@pytest.mark.parametrize("seed", range(10))
def test_an_exact_batch_that_does_not_fit_fails_its_task_alone_and_says_what_to_type(seed: int) -> None:
    """The other tasks are scored; the error names task, batch size, the size that fits, and where to set it."""
    world = run(seed, {"tasks": tasks(None, None, 16, None)}, 8, too_large=1.0)
    failed = [e for e in world.state.entries if e.status == "failed"]
    assert [e.name for e in failed] == ["t2"], world.summary()
    for part in ("task t2", "a batch of 2 rows (batch_size = 16)", "A100", "CUDA out of memory"):
        assert part in failed[0].error
    assert "set batch_size = 1 in [[task]] t2 of suite suite" in failed[0].error
    assert not any(e.token_budget for e in world.state.entries)
    assert replay(world.journal) == world.state
    world.assert_nothing_left()


def tasks(*sizes: int | None) -> tuple[TaskEntry, ...]:
    return tuple(TaskEntry(name=f"t{i}", batch_size=size) for i, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("fits", "what", "says"),
    [
        (
            0,
            "unit",
            "with token budget 8192 does not fit the GPU memory of n0 (A100): OOM; give trials more GPUs",
        ),
        (0, "generation", "a batch of 8 prompts (batch_size = 8) does not fit"),
        (4, "generation", "4 fit: set batch_size = 4 in [[task]] t0 of suite suite"),
    ],
)
def test_what_no_smaller_budget_mends_fails_the_task_in_words(fits: int, what: Any, says: str) -> None:
    """A single row that does not fit, and generation, which the budget does not cut."""
    world = World(1, Faults(), record(1, suite=FAST))
    while not world.claims:
        world.tick()
    shard, trial = next(iter(world.claims.items()))
    outcome = TooLarge(
        name="x", trial=trial, node="n0", shard=shard, what=what, fits=fits, of=8, devices="A100", error="OOM"
    )
    world.take([ev.OutcomeSeen(at=world.now, outcome=outcome)])
    assert world.state.entries[0].status == "failed"
    assert says in world.state.entries[0].error


def test_of_several_trials_that_say_it_the_first_counts() -> None:
    """Answers and outcomes in a cut that is retired change nothing."""
    world = World(1, Faults(), record(1, suite=FAST))
    while not world.claims:
        world.tick()
    shard, trial = next(iter(world.claims.items()))

    def said(name: str) -> ev.OutcomeSeen:
        outcome = TooLarge(
            name=name, trial=trial, node="n", shard=shard, what="unit", fits=1, of=4, devices="", error=""
        )
        return ev.OutcomeSeen(at=world.now, outcome=outcome)

    world.take([said("x"), said("y")])
    assert [e.token_budget for e in world.journal if isinstance(e, ev.TokenBudgetReduced)] == [2048]
    world.fits = 2048
    world.run_to_scores()
    assert {ShardId.parse(s).cut for s in world.state.shards.by_name} == {"fast-2048-8"}


@given(
    mode=st.sampled_from([None, "fast"]),
    own=st.one_of(st.none(), st.integers(1, 64)),
    size=st.one_of(st.just("auto"), st.integers(1, 64)),
    budget=st.one_of(st.just("auto"), st.integers(1, 10**6)),
)
def test_a_cut_says_what_decides_the_batches(mode: Any, own: Any, size: Any, budget: Any) -> None:
    """Exact: "" for the evaluation's batch size, else the task's own. Fast: budget and batch size, once both are settled."""
    suite = SuiteSpec(
        name="s", mode=mode, batch_size=size, token_budget=budget if mode else None, tasks=tasks(own)
    )
    cut = cut_of(suite, 0, size, suite.token_budget)
    if mode is None:
        assert cut == ("" if own is None else str(own))
    elif "auto" in (own or size, budget):
        assert cut == ""
    else:
        assert Cut.parse(cut) == Cut(own or size, budget)


def test_auto_settles_the_token_budget_with_the_batch_size() -> None:
    """Requests are built first; the probe's outcome says both, and the batches of that cut are built then."""
    suite = {"mode": "fast", "token_budget": "auto", "batch_size": "auto"}
    state, _ = machine.start(ev.Accepted(at=0.0, record=record(1, suite=suite)))
    found = ev.RequestSetsFound(at=1.0, sets={0: {"t0": "/s/t0"}}, folders={0: "/s"}, batch_size="auto")
    machine.step(state, SITE, found)
    assert (state.entries[0].status, state.cut_of(state.entries[0])) == ("built", "")
    probed = Probed(name="x", batch_size=16, token_budget=4096)
    made = machine.step(state, SITE, ev.OutcomeSeen(at=2.0, outcome=probed))
    (job,) = (e for e in made.intents if isinstance(e, ev.JobIntended))
    (spec,) = specs_of(state, SITE, state.jobs.by_name[job.job.name]).values()
    assert isinstance(spec, BuildSpec)
    assert (spec.batch_size, spec.cut) == (16, "fast-4096-16")


def test_a_name_that_is_no_shard_s_is_of_no_cut() -> None:
    """A job may write anything into a response file."""
    world = World(1, Faults(), record(1))
    assert not any(is_retired(world.state, name) for name in ("", "x", "t0|a|b", "t0|1"))


def test_a_model_that_shares_nothing_is_named_once() -> None:
    """Each trial says why its likelihoods were computed lm-eval's way; the evaluation warns once."""
    world = World(1, Faults(), record(1, suite=FAST), nodes=2)
    while len(world.state.trials.live) < 2:
        world.tick()
    for trial in sorted(world.state.trials.live):
        said = ended("n0", trial, "drained").model_copy(update={"fast": "sliding windows"})
        world.take([ev.OutcomeSeen(at=world.now, outcome=said)])
    assert sum("sliding windows" in warning for warning in world.state.warnings) == 1
