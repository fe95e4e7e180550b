"""What a trial's death is charged to, by its diagnosis."""

import pytest
from support.simulated.parts import record
from support.simulated.world import World

from coordinator.decide.evaluation import events as ev
from coordinator.runtime import detect
from coordinator.site.cluster import JobState
from coordinator.site.diagnosis.diagnose import diagnose_text
from evaljobs.contract.outcomes import Failed

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("said", "word", "node", "shard"),
    [
        (ECC, "FAILED", "back-off", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "FAILED", "charged", True),
        ("TypeError: f() takes no arguments", "FAILED", "", True),
        ("ModuleNotFoundError: No module named 'a'", "FAILED", "charged", True),
        ("frobnicated", "FAILED", "charged", True),
        ("frobnicated", "TIMEOUT", "", False),
        ("frobnicated", "NODE_FAIL", "", False),
    ],
)
def test_a_death_counts_against_what_its_diagnosis_says(said, word, node, shard):
    """Broken hardware: the node at once, and not the shard. The program's error: the shard alone. Else another node tells."""
    world = World(7, rec=record(entries=6), nodes=2, in_order=True).until(
        lambda w: w.state.running_trials and w.claims and len(w.state.nodes.by_name) == 2
    )
    state = world.state
    name, held = next((trial, s) for s, trial in world.claims.items() if trial in state.trials.live)
    info = state.jobs.by_name[state.trials.live[name].job]
    cause = diagnose_text(said, state=word)
    world.tell(
        ev.JobEnded,
        job=info.job.name,
        index=state.trials.by_name[name].member,
        state=word,
        shard=held,
        cause=cause,
    )
    use = state.nodes.by_name[info.job.node]
    assert (use.status == "back-off") == (node == "back-off")
    assert use.at_fault == (node == "back-off")
    assert bool(use.deaths) == (node == "charged")
    assert bool(state.shards.by_name[held].died_on) == shard


@pytest.mark.parametrize(
    ("said", "blame", "deaths"),
    [
        ("AssertionError: context_enc is empty", "retry", 2),
        ("AssertionError: at 0x{}", "retry", 3),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "retry", 3),
        ("task t0: document 3 has no finite likelihood", "operator", 1),
    ],
)
def test_an_error_that_comes_again_fails_its_task_without_a_third_trial(said, blame, deaths):
    """A program's error in the same words on a second try is the task's. One that differs, or may be a node's, has three tries;
    the operator's has one.
    """
    world = World(7, rec=record(entries=6), nodes=2, in_order=True).until(lambda w: w.claims)
    state = world.state
    shard = next(iter(world.claims))
    leaf = next(leaf for leaf in state.shards.leaves.values() if shard in leaf.planned.shards)
    for number in range(1, deaths + 1):
        assert not any(state.entries[index].error for index in leaf.entries)
        world.until(lambda w: shard in w.claims)
        trial = world.claims[shard]
        error = said.format(number)
        failed = Failed(name=trial, job="trial", blame=blame, error=error, shard=shard)
        world.tell(ev.OutcomeSeen, outcome=failed, cause=diagnose_text(error, state="FAILED"))
    assert all(said.format(deaths) in state.entries[index].error for index in leaf.entries)


def test_of_many_deaths_at_once_those_behind_the_first_may_wait_for_the_next_listing():
    """It tells them again, since their members have not ended in the state; without haste all are read."""
    world = World(7, rec=record(entries=6), nodes=2, in_order=True).until(
        lambda w: len(w.state.trials.live) > 1 and w.claims
    )
    ends = [
        ev.JobEnded(at=world.now, job=live.job, index=world.state.trials.by_name[name].member, state="FAILED")
        for name, live in sorted(world.state.trials.live.items())
    ]
    for enough, most in (((lambda: True), 1), ((lambda: False), len(ends))):
        told = detect.with_causes(
            world.state, ends, world.listing(), {}, began=lambda *_: True, cause=lambda *_: diagnose_text(ECC), enough=enough
        )  # fmt: skip
        assert len(told) == most
        assert all(event.cause.reason == "ECCError" for event in told)


@pytest.mark.parametrize(("word", "avoided"), [("FAILED", True), ("TIMEOUT", False), ("COMPLETED", False)])
def test_a_node_where_workers_reach_no_redis_gets_none_of_the_next(word, avoided):
    """They end by themselves with an error there; the next job of workers goes to another node."""
    world = World(7, rec=record(entries=6), nodes=2, in_order=True).until(
        lambda w: any(i.phase == "submitted" for i in w.state.live_jobs("metric"))
    )
    job = next(i.job.name for i in world.state.live_jobs("metric"))
    row = JobState(job_id="7", name=job, index=0, phase="ended", state=word, node="c9")
    ends = [ev.JobEnded(at=world.now, job=job, index=0, state=word)]
    (told,) = detect.with_causes(
        world.state, ends, [row], {}, began=lambda *_: True, cause=lambda *_: diagnose_text(ECC)
    )
    assert bool(told.unlaunched) == avoided
