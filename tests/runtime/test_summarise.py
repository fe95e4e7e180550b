"""Laws of what is said of an evaluation under way: its stage, what it waits for, and the time that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.simulated.parts import record

from coordinator.cli.screen.standing import Shown, about, ahead_of, held_jobs, in_words, standing
from coordinator.cluster import Job, JobPhase, JobState, Purpose
from coordinator.config.schema import Config
from coordinator.evaluation.indexes import file_job
from coordinator.evaluation.state import (
    EntryState,
    HeldJob,
    JobInfo,
    MetricState,
    NodeUse,
    ShardState,
    State,
    Trial,
)
from coordinator.runtime.summarise import WAITS_SECONDS, seconds_left, stage_of, summary_of
from coordinator.runtime.summary import NO_SLOT, Timed
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import FrameRef, Weights
from evaljobs.queue.work_queue import Progress, QueueSnapshot

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
    eta = seconds_left(state, NOW + elapsed)
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
    assert seconds_left(state, NOW + elapsed) == pytest.approx(sum(shards) + 50)
    state.plan.made_at = None
    assert seconds_left(state, NOW + elapsed) is None


def test_the_plan_runs_from_the_start_of_the_first_trial():
    """Also where it waited in the queue for an hour; later the pace of the shards counts more and more."""
    state = with_job(state_of(10.0, 10.0, makespan=60.0), "trial", "running", at=NOW + 3600)
    assert seconds_left(state, NOW + 3610) == pytest.approx(50.0)
    slow = with_job(state_of(*[10.0] * 10, done=9, makespan=110.0), "trial", "running")
    eta = seconds_left(slow, NOW + 900)
    assert eta is not None
    assert 85.0 < eta < 100.0


def test_a_pause_is_no_pace():
    """Half done, and no trial runs, four days after the plan: what is left is what the plan says of it."""
    state = state_of(*[10.0] * 10, done=5, makespan=110.0)
    left = seconds_left(state, NOW + 4 * 86400)
    assert left == pytest.approx(55.0)
    with_job(state, "trial", "pending")
    assert seconds_left(state, NOW + 4 * 86400) == left


def test_after_the_last_shard_the_tail_is_left():
    """The open metric jobs, which are predicted, too; then nothing."""
    state = state_of(10.0, done=1)
    assert seconds_left(state, NOW) is None
    state.scoring.metrics["m"] = MetricState(name="m", kind="score", entry=0, seconds=30.0)
    state.scoring.outstanding.add("m")
    assert seconds_left(state, NOW) == 30.0


RUN = ("running", "running")
STAGES = [  # shards done of two, members of the trial job, its age, the phase of each trial and of a lost one, the stage
    (0, ("pending", "pending"), 0.0, None, "starting trials"),  # submitted just now
    (0, ("pending", "pending"), WAITS_SECONDS, None, "waits"),
    (0, ("pending", "running"), WAITS_SECONDS, None, "starting trials"),
    (0, RUN, 0.0, None, "starting trials"),  # before a first shard, no queue is no inference
    (0, RUN, 0.0, (), "starting trials"),
    (0, RUN, 0.0, ("import",), "loading"),
    (0, RUN, 0.0, ("load", "wait"), "loading"),
    (0, RUN, 0.0, ("load", "infer"), "inference"),
    (0, RUN, 0.0, ("wait",), "starting trials"),
    (0, RUN, 0.0, ("", "", "infer"), "starting trials"),  # a trial that was lost says nothing more
    (1, ("running",), 0.0, ("load",), "loading"),  # a second round of trials
    (1, ("running",), 0.0, (), "inference"),
]


@pytest.mark.parametrize(("done", "members", "age", "phases", "stage"), STAGES)
def test_trials_that_wait_or_load_are_not_called_inference(done, members, age, phases, stage):
    """Their queue says so, as far as it was read; an early trial runs before there is a shard: requests are built."""
    state = with_job(state_of(10.0, 10.0, done=done), "trial", *members)
    names = [*state.trials.live, "lost"]
    trials = dict(zip(names, (Progress(phase=p) for p in phases or ()), strict=False))
    snapshot = QueueSnapshot(epoch="", unclaimed=1, claims={}, claimed_at={}, trials=trials)
    assert stage_of(state, NOW + age, None if phases is None else snapshot) == stage
    early = with_job(state_of(), "trial", "running")
    early.entries[0].status = "building"
    assert stage_of(early, NOW) == "building requests"


def waits_of(state: State, now: float, listed: Sequence[JobState] = (), *, timed: bool = True) -> list[str]:
    return [in_words(what, now, timed=timed) for what in summary_of(state, now, None, listed).waits]


def test_an_evaluation_without_a_node_waits_and_says_so():
    """With its place in the order; one that has a node is staging."""
    state = state_of(10.0)
    assert stage_of(state, NOW) == "waits"
    assert waits_of(state, NOW) == [NO_SLOT]
    state.nodes.by_name["n1"] = NodeUse(name="n1", lanes=1, status="staging")
    assert stage_of(state, NOW) == "staging"
    assert waits_of(state, NOW) == []
    turns = {"es-1": (0, 3.0), "es-2": (0, 1.0), "es-3": (-5, 9.0), "es-4": (0, 4.0)}
    ahead = {name: ahead_of(name, turns) for name in turns}
    assert ahead["es-1"] == ["2 evaluations are served before it"]
    assert (ahead["es-2"], ahead["es-3"]) == (["es-3 is served before it"], [])
    # GPUs may be free, since the first one has not taken them yet
    waits = (Timed(what="a trial is pending"), Timed(what=NO_SLOT))
    made = summary_of(state, NOW).model_copy(update={"waits": waits})
    assert Shown(made, ahead=ahead["es-2"]).waits_for(NOW) == ["a trial is pending", *ahead["es-2"]]
    assert Shown(made).waits_for(NOW)[1:] == [NO_SLOT]


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
def test_an_evaluation_without_a_slot_names_what_is_taken(borrow, more, tmp_path):
    """Nodes are asked for where one waits, and [borrow] is named where it is set; one that is stopped says nothing of it."""
    config = Config.model_validate({"borrow": borrow, "work_dir": tmp_path})
    waits = summary_of(state_of(10.0), NOW)
    paths = EvaluationPaths(tmp_path / waits.evaluation_id)
    paths.root.mkdir()
    paths.journal.touch()
    large = record(1)
    large = large.model_copy(
        update={
            "checkpoint": large.checkpoint.model_copy(update={"weights": Weights(sizes={"BF16": 20 * 10**9})})
        }
    )
    paths.evaluation.write_text(large.model_dump_json())
    taken = [replace(fake_node("n1"), gpus_free=0)]
    small = replace(fake_node("n2"), gpu_type="t4", gpus_free=8)
    others = [waits.model_copy(update={"gpus": 2})]
    (stopped,) = standing(config, [waits], others, ask_nodes=lambda: taken)
    assert (stopped.stopped, stopped.waits_for(NOW)) == (True, [NO_SLOT])
    lock = WorkLock(WorkPaths(tmp_path).lock)
    lock.acquire()
    said = [
        standing(config, [waits], others, ask_nodes=ask)[0]
        for ask in (lambda: taken, lambda: [*taken, small], tuple)
    ]
    lock.release()
    too_small = "without n2 (t4 of 16 GB): GPUs too small for weights of 20.0 GB; [trial] gpus_per_trial = 2 would use them"
    assert [one.waits_for(NOW) for one in said] == [
        [f"8 of 8 GPUs are used, 2 of them by evalspan{more}"],
        [f"8 of 16 GPUs are used, 2 of them by evalspan{more}, {too_small}"],
        [f"nothing that it could run on is free{more}"],
    ]


def test_a_job_that_is_kept_out_has_a_countdown_only_while_a_process_goes_on():
    state = state_of(10.0)
    state.jobs.held["es-1"] = HeldJob(why="QOSMaxSubmitJobPerUserLimit", due_at=NOW + 95)
    kept = "Slurm does not take it yet (QOSMaxSubmitJobPerUserLimit)"
    made = summary_of(state, NOW)
    assert held_jobs(made, NOW) == {"es-1": f"{kept}; submitted again in 95.0 s"}
    assert held_jobs(made, NOW, timed=False) == {"es-1": kept}
