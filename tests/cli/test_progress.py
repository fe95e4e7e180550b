"""Laws of what is said of an evaluation under way: its stage, what it waits for, and the time that is left."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.simulated.parts import record

from coordinator.cli.screen.progress import (
    NO_SLOT,
    WAITS_SECONDS,
    about,
    ahead_of,
    eta_seconds,
    held_jobs,
    stage_of,
    waits_of,
    with_turn,
)
from coordinator.cli.screen.standing import _row_of_state, say_what_is_taken
from coordinator.cluster import Job, JobPhase, JobState, Purpose
from coordinator.config.schema import Config
from coordinator.evaluation.events import PlannedLeaf
from coordinator.evaluation.footprint import GpuNeed
from coordinator.evaluation.indexes import file_job
from coordinator.evaluation.state import (
    EntryState,
    HeldJob,
    JobInfo,
    LeafState,
    MetricState,
    NodeUse,
    ShardState,
    State,
    Trial,
)
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import FrameRef
from evaljobs.queue.work_queue import Progress, QueueSnapshot, WorkQueue

DONE = FrameRef(file="a.frames", offset=0, length=1)
NOW = 1_700_000_000.0


def state_of(*seconds: float, done: int = 0, lanes: int = 1, makespan: float = 100.0) -> State:
    """An evaluation with a plan of these shards; no job yet."""
    state = State(record=record(1), entries=[EntryState(index=0, name="t", status="built")], batch_size=8)
    state.plan.made_at, state.plan.predicted_makespan_seconds = NOW, makespan
    for i, each in enumerate(seconds):
        frame = DONE if i < done else None
        state.shards.by_name[f"t|{i}|{i + 1}"] = ShardState(
            rank=i, seconds=each, lane=f"n1/{i % lanes}", frame=frame
        )
    state.shards.todo = len(seconds) - done
    return state


def with_job(state: State, purpose: Purpose, *members: str, at: float = NOW) -> State:
    """A submitted job of it, with a trial for each member where it is one of trials."""
    name = f"es-1-{purpose}-n1-a0"
    info = JobInfo(
        job=Job(name=name, argv=(), log="", count=len(members), purpose=purpose), phase="submitted"
    )
    info.members, info.changed_at = dict(enumerate(members)), at  # type: ignore[arg-type]
    info.trials = tuple(f"{name}.{i}" for i in info.members) if purpose == "trial" else ()
    for i, trial in enumerate(info.trials):
        state.trials.by_name[trial] = state.trials.live[trial] = Trial(
            name=trial, job=name, member=i, lane=f"n1/{i}"
        )
    state.jobs.by_name[name] = info
    state.jobs.live.add(name)
    file_job(state, info)
    return state


plans = st.lists(st.floats(0.0, 1e5), min_size=1, max_size=20)


@given(plans, st.data(), st.floats(0, 1e6), st.floats(0, 1e5), st.booleans())
def test_what_is_left_is_positive_while_work_is_left(shards, data, elapsed, makespan, started):
    """However long it takes beyond the plan, and never less than what the shards to do need on their lanes."""
    done = data.draw(st.integers(0, len(shards)))
    lanes = data.draw(st.integers(1, 4))
    state = state_of(*shards, done=done, lanes=lanes, makespan=makespan)
    if started:
        with_job(state, "trial", "running")
    eta = eta_seconds(state, NOW + elapsed)
    if done == len(shards):
        assert eta is None
        return
    assert eta is not None
    assert math.isfinite(eta)
    assert eta >= 1.0
    assert eta >= sum(shards[done:]) / lanes * (1 - 1e-9)
    assert about(eta) != "about 0 s"


@given(plans, st.floats(0, 1e6))
def test_before_the_first_trial_starts_the_whole_plan_is_left(shards, elapsed):
    """Load and tail included: a plan that waits for GPUs does not run off."""
    state = state_of(*shards, makespan=sum(shards) + 50)
    assert eta_seconds(state, NOW + elapsed) == pytest.approx(sum(shards) + 50)
    state.plan.made_at = None
    assert eta_seconds(state, NOW + elapsed) is None


def test_the_plan_runs_from_the_start_of_the_first_trial():
    """Also where it waited in the queue for an hour; later the pace of the shards counts more and more."""
    state = with_job(state_of(10.0, 10.0, makespan=60.0), "trial", "running", at=NOW + 3600)
    assert eta_seconds(state, NOW + 3610) == pytest.approx(50.0)
    slow = with_job(state_of(*[10.0] * 10, done=9, makespan=110.0), "trial", "running")
    eta = eta_seconds(slow, NOW + 900)
    assert eta is not None
    assert 85.0 < eta < 100.0


def test_a_pause_is_no_pace():
    """Half done, and no trial runs, four days after the plan: what is left is what the plan says of it."""
    state = state_of(*[10.0] * 10, done=5, makespan=110.0)
    left = eta_seconds(state, NOW + 4 * 86400)
    assert left == pytest.approx(55.0)
    with_job(state, "trial", "pending")
    assert eta_seconds(state, NOW + 4 * 86400) == left


def test_after_the_last_shard_the_tail_is_left():
    """The open metric jobs, which are predicted, too; then nothing."""
    state = state_of(10.0, done=1)
    assert eta_seconds(state, NOW) is None
    state.scoring.metrics["m"] = MetricState(name="m", kind="score", entry=0, seconds=30.0)
    state.scoring.outstanding.add("m")
    assert eta_seconds(state, NOW) == 30.0


@pytest.mark.parametrize(("age", "stage"), [(0.0, "starting trials"), (WAITS_SECONDS, "waits")])
def test_an_evaluation_whose_jobs_are_pending_waits(age, stage):
    """After a moment: a job that was submitted just now is only starting."""
    state = with_job(state_of(10.0), "trial", "pending", "pending")
    assert stage_of(state, NOW + age) == stage
    one_runs = with_job(state_of(10.0), "trial", "pending", "running")
    assert stage_of(one_runs, NOW + age) == "starting trials"


@pytest.mark.parametrize(
    ("phases", "stage"),
    [
        ((), "starting trials"),
        (("import",), "loading"),
        (("load", "wait"), "loading"),
        (("load", "infer"), "inference"),
        (("wait",), "starting trials"),
    ],
)
def test_trials_that_load_are_not_called_inference(phases, stage):
    """Their queue says so; a trial that was lost says nothing more. Before a first shard, no queue is no inference."""
    state = with_job(state_of(10.0), "trial", *["running"] * 2)
    names = [*state.trials.live, "lost"]
    trials = dict(zip(names, (Progress(phase=p) for p in phases), strict=False))
    snapshot = QueueSnapshot(epoch="", unclaimed=1, claims={}, claimed_at={}, trials=trials)
    assert stage_of(state, NOW, snapshot) == stage
    assert (
        stage_of(state, NOW, replace(snapshot, trials={"lost": Progress(phase="infer")})) == "starting trials"
    )
    assert stage_of(state, NOW) == "starting trials"


def test_a_second_round_of_trials_loads_again():
    """Also with shards done; between two rounds no trial runs."""
    state = with_job(state_of(10.0, 10.0, done=1), "trial", "running")
    (name,) = state.trials.live
    snapshot = QueueSnapshot(
        epoch="", unclaimed=1, claims={}, claimed_at={}, trials={name: Progress(phase="load")}
    )
    assert stage_of(state, NOW, snapshot) == "loading"
    assert stage_of(state, NOW, replace(snapshot, trials={})) == "inference"


def test_trials_that_load_while_requests_are_built_infer_nothing():
    """An early trial runs before there is a shard: requests are built."""
    state = with_job(state_of(), "trial", "running")
    state.entries[0].status = "building"
    assert stage_of(state, NOW) == "building requests"


def test_an_evaluation_without_a_node_waits_and_says_so():
    """With its place in the order; one that has a node is staging."""
    state = state_of(10.0)
    assert stage_of(state, NOW) == "waits"
    assert waits_of(state, NOW) == [NO_SLOT]
    state.nodes.by_name["n1"] = NodeUse(name="n1", lanes=1, status="staging")
    assert stage_of(state, NOW) == "staging"
    assert waits_of(state, NOW) == []
    turns = {"es-1": ("", 0, 3.0), "es-2": ("", 0, 1.0), "es-3": ("", -5, 9.0), "es-4": ("", 0, 4.0)}
    turns["es-5"] = ("another user", -9, 0.0)
    assert ahead_of("es-1", turns) == ["2 evaluations are served before it"]
    assert ahead_of("es-2", turns) == ["es-3 is served before it"]
    assert ahead_of("es-3", turns) == []


def test_an_evaluation_behind_another_waits_for_that_one_and_for_no_gpu():
    """GPUs may be free, since the first one has not taken them yet; the log of the daemon says so, too."""
    waits = ["a trial is pending", NO_SLOT]
    assert with_turn(waits, ["es-3 is served before it"]) == [
        "a trial is pending",
        "es-3 is served before it",
    ]
    assert with_turn([NO_SLOT], []) == [NO_SLOT]


def test_pending_jobs_are_counted_by_kind_with_the_clusters_reason():
    """A listing that was not had costs the reason alone; a member that has started since is not counted."""
    state = with_job(state_of(10.0), "trial", "pending", "pending", "running")
    found: list[tuple[JobPhase, str]] = [("pending", "Priority"), ("pending", "Resources"), ("running", "")]
    listed = [
        JobState(job_id="7", name="es-1-trial-n1-a0", index=i, phase=phase, state="", reason=reason)
        for i, (phase, reason) in enumerate(found)
    ]
    now = NOW + 190
    assert waits_of(state, now) == ["2 trials are pending for 3:10 min"]
    assert waits_of(state, now, listed) == [
        "a trial is pending for 3:10 min: jobs of higher priority go first (Priority)",
        "a trial is pending for 3:10 min: no node has enough free GPUs, CPUs or memory yet (Resources)",
    ]
    started = [replace(listed[0], phase="running"), *listed[1:]]
    assert len(waits_of(state, now, started, timed=False)) == 1
    assert "for" not in waits_of(state, now, started, timed=False)[0].split(":")[0]


@pytest.mark.parametrize(
    ("borrow", "more"), [({}, ""), ({"max_nodes": 2}, ", or [borrow] allows no more: max_nodes = 2")]
)
def test_an_evaluation_without_a_slot_names_what_is_taken(borrow, more):
    """Nodes are asked for where one waits, and [borrow] is named where it is set; one that is stopped says nothing of it."""
    taken = [replace(fake_node("n1"), gpus_free=0)]
    waits = {"waits_for": [NO_SLOT], "stopped": False, "gpus": 2}
    stopped = {"waits_for": [NO_SLOT], "stopped": True, "gpus": 0}
    config = Config.model_validate({"borrow": borrow})
    say_what_is_taken([waits, stopped], config, lambda: taken)
    assert waits["waits_for"] == [f"8 of 8 GPUs are used, 2 of them by evalspan{more}"]
    small = replace(fake_node("n2"), gpu_type="t4", gpus_free=8)
    large = {"waits_for": [NO_SLOT], "stopped": False, "need": GpuNeed(weights=20 * 10**9)}
    say_what_is_taken([large], config, lambda: [*taken, small])
    too_small = "without n2 (t4 of 16 GB): GPUs too small for weights of 20.0 GB; [trial] gpus_per_trial = 2 would use them"
    assert large["waits_for"] == [f"8 of 16 GPUs are used{more}, {too_small}"]
    other = {"waits_for": [NO_SLOT], "stopped": False}
    say_what_is_taken([other], config, tuple)
    assert other["waits_for"] == [f"nothing that it could run on is free{more}"]


def test_a_job_that_is_kept_out_has_a_countdown_only_while_a_process_goes_on():
    state = state_of(10.0)
    state.jobs.held["es-1"] = HeldJob(why="QOSMaxSubmitJobPerUserLimit", due_at=NOW + 95)
    kept = "Slurm does not take it yet (QOSMaxSubmitJobPerUserLimit)"
    assert held_jobs(state, NOW) == {"es-1": f"{kept}; submitted again in 95.0 s"}
    assert held_jobs(state, NOW, timed=False) == {"es-1": kept}


def test_status_asks_the_queue_of_an_evaluation_whose_trials_run(shared_work):
    """While a process runs it: no trial's last word before a stop counts."""
    state = with_job(state_of(10.0), "trial", "running")
    planned = PlannedLeaf(
        task="t",
        name="t",
        entry=0,
        key="k",
        folder="f",
        executes=False,
        sampled=False,
        documents=1,
        shards=(),
    )
    state.shards.leaves["t"] = LeafState(planned=planned, todo=1)
    paths = EvaluationPaths(shared_work.root / state.evaluation_id)
    (trial,) = state.trials.live
    WorkQueue.connect(shared_work.redis_address, state.evaluation_id).heartbeat(trial, phase="load")
    assert _row_of_state(state, None, paths, tuple, runs=True)["stage"] == "loading"
    assert _row_of_state(state, None, paths, tuple, runs=False)["stage"] == "starting trials"
    away = EvaluationPaths(paths.root / "work" / state.evaluation_id)
    assert _row_of_state(state, None, away, tuple, runs=True)["stage"] == "starting trials"
