"""The time limits that trials, their precursors and metric workers ask for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.simulated.invariants import recounted
from support.simulated.parts import SITE, Faults, record
from support.simulated.world import World

from coordinator.evaluation import events as ev
from coordinator.evaluation import nodes
from coordinator.evaluation import step as machine
from coordinator.evaluation.job_specs import worker_job
from coordinator.evaluation.state import NodeUse, Trial
from coordinator.evaluation.time_limits import SHORTEST_LIMIT_SECONDS, UNPLANNED_SECONDS, trial_limit_seconds

DAY = 24 * 3600


def state_of(work: float, load: float, lanes: int, most: int, attempt: int = 0):
    state, _ = machine.start(ev.Accepted(at=0.0, record=record(trial_time_limit_seconds=most)))
    state.plan.work_seconds_95, state.plan.load_seconds_95 = work, load
    state.nodes.by_name = {"n1": NodeUse(name="n1", lanes=lanes, status="ready")}
    for number in range(attempt):
        state.trials.by_name[f"t{number}"] = Trial(name=f"t{number}", job="j", member=0, lane="n1/0")
    state.index = recounted(state)
    return state


@given(work=st.floats(1, 1e7), load=st.floats(0, 1e4), lanes=st.integers(1, 64), attempt=st.integers(0, 40))
def test_a_limit_covers_load_and_an_even_share_and_stays_below_the_settings(work, load, lanes, attempt):
    """At least what is predicted and a quarter of an hour, doubled an attempt, unless the settings allow less."""
    for most in (600, DAY):
        limit = trial_limit_seconds(state_of(work, load, lanes, most, attempt), ["n1/0", "n1/1"])
        wanted = max(SHORTEST_LIMIT_SECONDS, load + work / lanes) * 2 ** min(attempt, 20)
        assert limit == most or limit >= wanted
        assert limit <= most


def test_without_a_prediction_the_settings_stand():
    """A trial that probes for the batch size is submitted before there is a plan."""
    assert trial_limit_seconds(state_of(0.0, 0.0, 8, DAY), ["n1/0"]) == DAY


def test_more_gpus_make_limits_shorter():
    """Eight times the lanes: about an eighth of the work each."""
    few, many = (trial_limit_seconds(state_of(80_000.0, 30.0, lanes, DAY), ["n1/0"]) for lanes in (8, 64))
    assert few == 10_150
    assert many == 1_400


def test_workers_ask_for_the_time_of_trials_and_metrics() -> None:
    """Less than the settings' limit and an hour; twice as long after workers that had no metric job done."""
    world = World(1, Faults(), record(entries=4, trial_time_limit_seconds=DAY))
    while not world.state.live_jobs("metric"):
        world.tick()
    limit = world.state.live_jobs("metric")[0].job.time_limit_seconds
    trial = world.state.live_jobs("trial")[0].job.time_limit_seconds
    assert trial <= limit < DAY
    world.state.scoring.worker_attempts = 1
    again = worker_job(world.state, SITE, 1, world.now).job.time_limit_seconds
    world.state.scoring.worker_attempts = 0
    assert again == 2 * worker_job(world.state, SITE, 1, world.now).job.time_limit_seconds


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
