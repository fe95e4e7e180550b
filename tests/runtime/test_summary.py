"""Laws of `Summary`, which screens, pages, metrics and news read in place of a journal: stage, waits, time left, and its file."""

import json
import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ended import leave_ended
from support.simulated.large import Large
from support.simulated.parts import record
from support.trainings import leave

from coordinator.base.words import format_estimate
from coordinator.decide.evaluation.state import (
    EntryState,
    JobInfo,
    MetricState,
    NodeUse,
    Phase,
    ShardState,
    State,
    Trial,
)
from coordinator.interface.cli.screen.evaluation_views import timed_in_words
from coordinator.operations.keeping.archive import archive_ended
from coordinator.results.report.scores import ScoreValue
from coordinator.runtime.known_evaluations import Summaries
from coordinator.runtime.make_summary import WAITS_SECONDS, seconds_left, stage_of, summary_now, summary_of
from coordinator.runtime.summary import (
    MOST_BYTES,
    NO_SLOT,
    SILENT_SECONDS,
    Summary,
    failed_jobs,
    fit_summary,
    halt_of,
    read_summary,
    with_document,
    write_summary,
)
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.cluster import Job
from coordinator.site.config.schema import Config
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import FrameRef
from evaljobs.queue.work_queue import Progress, QueueSnapshot

DONE = FrameRef(file="a.frames", offset=0, length=1)
NOW = 1_700_000_000.0
TEN = [10.0] * 10


def state_of(*seconds, done=0, lanes=1, makespan=100.0):
    """An evaluation with a plan of these shards; no job yet."""
    state = State(record=record(1), entries=[EntryState(index=0, name="t", status="built")], batch_size=8)
    state.plan.made_at, state.plan.predicted_makespan_seconds = NOW, makespan
    for i, each in enumerate(seconds):
        known = {"rank": i, "seconds": each, "lane": f"n1/{i % lanes}", "frame": DONE if i < done else None}
        state.shards.by_name[f"t|{i}|{i + 1}"] = ShardState(**known)
    state.shards.todo = len(seconds) - done
    return state


def with_trials(state, *members, at=NOW):
    """A submitted job of trials, one for each member."""
    name = "es-1-trial-n1-a0"
    job = Job(name=name, argv=(), log="", count=len(members), purpose="trial")
    info = JobInfo(job=job, phase="submitted")
    info.members, info.changed_at = dict(enumerate(members)), at
    info.trials = tuple(f"{name}.{i}" for i in info.members)
    for i, trial in enumerate(info.trials):
        made = Trial(name=trial, job=name, member=i, lane=f"n1/{i}", running=members[i] == "running")
        state.trials.by_name[trial] = state.trials.live[trial] = made
    state.jobs.by_name[name] = state.jobs.live[name] = info
    return state


# --- the time that is left -------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.0, 1e5), min_size=1, max_size=20),
    st.data(),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    st.booleans(),
)
def test_what_is_left_is_positive_while_work_is_left(shards, data, elapsed, makespan, started):
    """However long it takes beyond the plan, and never less than what the shards to do need on their lanes. Before the first
    trial starts the whole plan is left, load and tail included: one that waits for GPUs does not run off.
    """
    done, lanes = data.draw(st.integers(0, len(shards))), data.draw(st.integers(1, 4))
    state = state_of(*shards, done=done, lanes=lanes, makespan=makespan)
    if started:
        with_trials(state, "running")
    eta = seconds_left(state, NOW + elapsed)
    if done == len(shards):
        assert eta is None
        return
    assert math.isfinite(eta)
    assert eta >= 1.0
    assert eta >= sum(shards[done:]) / lanes * (1 - 1e-9)
    assert format_estimate(eta) != "about 0 s"
    if not started and not done and makespan > max(1.0, sum(shards)):
        assert eta == pytest.approx(makespan)
    state.plan.made_at = None
    assert seconds_left(state, NOW + elapsed) is None


DAYS = 4 * 86400.0
LEFT = {  # shards done of ten, makespan, members of the trial job and their start, seconds since the plan, what is left
    "the plan runs from the start of the first trial": (0, 160.0, ["running"], 3600.0, 3610.0, 150.0),
    "later the pace of the shards counts more": (9, 110.0, ["running"], 0.0, 900.0, 92.5),
    "a pause is no pace": (5, 110.0, [], 0.0, DAYS, 55.0),
    "a trial that waits is no pace": (5, 110.0, ["pending"], 0.0, DAYS, 55.0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_plan_and_the_pace_so_far_leave(name):
    """Within 8 %: how the two are weighted may change."""
    done, makespan, members, at, elapsed, left = LEFT[name]
    state = state_of(*TEN, done=done, makespan=makespan)
    if members:
        with_trials(state, *members, at=NOW + at)
    assert seconds_left(state, NOW + elapsed) == pytest.approx(left, rel=0.08 if done == 9 else 1e-6)


def test_after_the_last_shard_the_tail_is_left():
    """The open metric jobs, which are predicted, too; then nothing."""
    state = state_of(10.0, done=1)
    assert seconds_left(state, NOW) is None
    state.scoring.metrics["m"] = MetricState(name="m", kind="score", entry=0, seconds=30.0)
    state.scoring.outstanding.add("m")
    assert seconds_left(state, NOW) == 30.0


# --- stage and waits -------------------------------------------------------------------------------------------------

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
    state = with_trials(state_of(10.0, 10.0, done=done), *members)
    names = [*state.trials.live, "lost"]
    trials = dict(zip(names, (Progress(phase=p) for p in phases or ()), strict=False))
    snapshot = QueueSnapshot(epoch="", unclaimed=1, claims={}, claimed_at={}, trials=trials)
    assert stage_of(state, NOW + age, None if phases is None else snapshot) == stage
    early = with_trials(state_of(), "running")
    early.entries[0].status = "building"
    assert stage_of(early, NOW) == "building requests"


def waits_of(state, now, listed=(), *, timed=True):
    return [timed_in_words(what, now, timed=timed) for what in summary_of(state, now, None, listed).waits]


def test_an_evaluation_without_a_node_waits_and_says_so():
    """One that has a node is staging."""
    state = state_of(10.0)
    assert (stage_of(state, NOW), waits_of(state, NOW)) == ("waits", [NO_SLOT])
    state.nodes.by_name["n1"] = NodeUse(name="n1", lanes=1, status="staging")
    assert (stage_of(state, NOW), waits_of(state, NOW)) == ("staging", [])


# --- the file --------------------------------------------------------------------------------------------------------


class Halfway(Large):
    """A large evaluation, up to its trials' first responses."""

    def _dump(self):
        raise StopIteration


def under_way(nodes, tasks):
    made = Halfway(nodes, tasks=tasks)
    with pytest.raises(StopIteration):
        made.run()
    return made.state


def paths_of(work, state):
    paths = EvaluationPaths(work / state.evaluation_id)
    paths.root.mkdir()
    return paths


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 2), (600, 20), (2, 600)])
def test_a_summary_is_read_back_as_it_was_written_and_has_at_most_64_kb(tmp_path, nodes, tasks):
    """Of 4,800 lanes, or of 600 tasks with four long scores each: what counts is whole, and what failed stays first."""
    state = under_way(nodes, tasks)
    state.entries[-1].status, state.entries[-1].error = "failed", "KeyError: 'x' " * 500
    for entry in state.entries[:-1]:
        entry.status = "scored"
    long = {"task": "a_task_of_a_long_name" * 3, "metric": "acc_norm", "filter": "none"}
    value = ScoreValue(**long, value=0.1 + 0.2, stderr=0.01)
    made = summary_of(state, 5.0, scores=lambda _: [value] * 9)
    paths = paths_of(tmp_path, state)
    assert write_summary(paths, made)
    read = read_summary(paths)
    assert read == fit_summary(made)
    assert paths.status.stat().st_size <= MOST_BYTES
    assert (read.scored, read.entries, read.trials) == (tasks - 1, tasks, 8 * nodes)
    assert state.entries[-1].name in read.errors
    assert bool(read.left_out) == (tasks == 600)


def test_failed_jobs_are_read_from_their_outcomes_and_the_report(tmp_path):
    """Each with its line; another version's file is passed over; no folder is no failure. A trial that died with its node
    left no outcome: the report has the cluster's word.
    """
    assert failed_jobs(EvaluationPaths(tmp_path)) == {}
    paths = leave(tmp_path, 10, 0.5)
    told = Failed(name="es-1-trial-n1-a0.0", job="trial", blame="retry", error="CUDA out of memory")
    paths.outcome("failed", told.name).write_text(told.model_dump_json())
    (paths.outcomes / "other.failed.json").write_text(json.dumps({"kind": "unheard-of"}))
    said = "OutOfMemoryError (owner: user): CUDA out of memory"
    assert failed_jobs(paths) == {told.name: said}
    known = {"node": "n", "gpus": 1, "device": "", "started_at": 0.0, "held": 5.0, "infer": 2.5, "load": 2.5}
    gpus = [
        {"trial": f"es-1-trial-n{i}-a0.0", "ended": how, "other": 0.0, "shards": 1, **known}
        for i, how in ((2, "NODE_FAIL"), (3, "drained"))
    ]
    paths.report.write_text(json.dumps(json.loads(paths.report.read_text()) | {"gpus": gpus}))
    ended = Summary(schema_version=3, evaluation_id=paths.root.name, written_at=0.0, ended_at=9.0)
    made = with_document(ended, paths)
    assert made.failed_jobs == {
        told.name: said,
        "es-1-trial-n2-a0.0": "NodeFailure (owner: node): its job ended: NODE_FAIL",
    }
    assert (made.makespan_seconds, made.causes["load"]) == (90.0, 5.0)


def test_a_retry_shows_the_scores_that_were_archived_before(tmp_path):
    state, paths = leave_ended(tmp_path, nodes=1)
    assert archive_ended(paths)
    assert not list(paths.scores.glob("*.json"))
    state.ending.phase, state.ending.ended_at = Phase.RUNNING, None
    shown = summary_now(state, paths, 1.0)
    assert [[score.value for score in task.scores] for task in shown.tasks] == [[0.5]] * 60


def test_what_hangs_or_is_not_run_by_the_holder_of_the_work_folder_reads_stopped(tmp_path):
    """Its coordinator signs its journal: a held lock alone says nothing of it. No journal is read for that."""
    state = under_way(1, 2)
    paths = paths_of(tmp_path, state)
    paths.journal.write_bytes(b"no event")
    assert write_summary(paths, summary_of(state, 5.0))
    seen = Summaries(Config(work_dir=tmp_path))
    seen.look(0.0)
    (summary,) = seen.open
    lock, now = WorkLock(WorkPaths(tmp_path).lock), time.time()
    lock.acquire()
    for ahead in (0.0, 3600.0, -3600.0):  # of its host's clock over the file server's
        WorkPaths(tmp_path).lease.touch()
        os.utime(WorkPaths(tmp_path).lease, (now + ahead, now + ahead))
        for silent in (0.0, SILENT_SECONDS + 1):
            signed_at = now + ahead - silent
            os.utime(paths.journal, (signed_at, signed_at))
            halt = halt_of(summary, paths)
            assert (halt is None) == (silent == 0.0)
    lock.release()
    assert (halt.word, halt.since) == ("stopped", pytest.approx(signed_at))
