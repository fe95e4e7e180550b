"""The loop and a cluster that answers late, in part, or not at all: it goes on, asks once, and each answer counts once it comes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import NoRedis, another, coordinator_on, until
from support.simulated.parts import record

from coordinator.base import clock
from coordinator.decide.allocation import demand
from coordinator.decide.allocation.allocate import Limits
from coordinator.decide.evaluation import jobs, nodes
from coordinator.decide.evaluation.actions import SubmitJob
from coordinator.decide.evaluation.events import JobStarted
from coordinator.decide.evaluation.job_specs import worker_job
from coordinator.decide.evaluation.state import NodeUse
from coordinator.decide.planning.make_plan import hardware_of
from coordinator.errors import RetryError
from coordinator.runtime import cluster_calls, effects, gpu_names, registry
from coordinator.runtime.cluster_calls import ClusterCalls
from coordinator.site.cluster import ClusterError, Job
from evaljobs.contract.outcomes import Staged
from evaljobs.contract.specs import JudgeConfig, TaskEntry
from evaljobs.contract.storage import write_outcome
from evaljobs.staging.capacity import gpu_name

A100 = "NVIDIA A100-SXM4-80GB"


@dataclass(slots=True, kw_only=True)
class Gated(FakeCluster):
    """Each method answers once its gate is open ("submitted": after the submission); `asked` counts the calls."""

    gates: dict[str, threading.Event] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    one: threading.Lock = field(default_factory=threading.Lock)

    def _wait(self, method):
        with self.one:
            self.asked[method] = self.asked.get(method, 0) + 1
        gate = self.gates.get(method)
        assert gate is None or gate.wait(60), f"the test has not opened {method}"

    def submit(self, job):
        self._wait("submit")
        with self.one:
            job_id = FakeCluster.submit(self, job)
        self._wait("submitted")
        return job_id

    def jobs(self):
        listed = FakeCluster.jobs(self)
        self._wait("jobs")
        return listed

    def nodes(self):
        self._wait("nodes")
        return FakeCluster.nodes(self)

    def cancel(self, job_ids):
        self._wait("cancel")
        FakeCluster.cancel(self, job_ids)

    def names(self, purpose=""):
        return [job.name for job in self.submitted if purpose in job.purpose]


def on(work, *fleet, closed=()):
    """A coordinator and its cluster of these numbers of GPUs on nodes n0, n1, …; with gates closed it waits for no answer."""
    made = [fake_node(f"n{i}", gpus=gpus, memory_mb=64_000) for i, gpus in enumerate(fleet)]
    cluster = Gated(fleet=made, gates={name: threading.Event() for name in closed})
    coordinator = coordinator_on(work, cluster)
    if closed:
        coordinator.calls = coordinator.performer.calls = ClusterCalls(0.0)
        coordinator.performer.at_once = 2
    return coordinator, cluster


def lanes_of(running):
    return {name: node.lanes for name, node in running.state.nodes.by_name.items()}


def ticks(coordinator, number=3):
    for _ in range(number):
        coordinator.tick()


# --- a controller that answers late ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["jobs", "nodes", "submit"])
def test_the_loop_goes_on_while_a_call_has_no_answer(tmp_path, method, monkeypatch):
    """A question is asked once at a time, and named; two submissions wait side by side. Once they are answered the same jobs
    come of it, each known by its own id.
    """
    monkeypatch.setattr(cluster_calls, "SAID_SECONDS", 0.0)
    coordinator, cluster = on(tmp_path, 2, 2, 2, closed=[method])
    running = coordinator.evaluations.accept(record())
    at_once = 2 if method == "submit" else 1
    until(coordinator, lambda: cluster.asked.get(method, 0) == at_once)
    ticks(coordinator, 20)
    assert cluster.asked[method] == at_once
    assert "the cluster has not answered" in coordinator.evaluations.trouble
    cluster.gates[method].set()
    until(coordinator, lambda: len(cluster.names("stage")) == 3)
    until(coordinator, lambda: all(i.phase == "submitted" for i in running.state.jobs.by_name.values()))
    assert len(cluster.names()) == len(set(cluster.names()))
    ids = {member.job.name: member.job_id for member in cluster.members}
    assert {name: info.job_id for name, info in running.state.jobs.by_name.items()} == ids


def test_a_job_that_a_listing_shows_before_its_submission_is_answered_is_taken_over(tmp_path):
    """And a cancellation that has no answer holds up nothing."""
    coordinator, cluster = on(tmp_path, 2, closed=["submitted", "cancel"])
    running = coordinator.evaluations.accept(record())
    builds = [i for i in running.state.jobs.by_name.values() if i.job.purpose == "build"]
    coordinator.performer.at_once = len(builds) + 1
    until(coordinator, lambda: all(i.phase == "submitted" for i in builds))
    ids = {i.job.name: i.job_id for i in builds}
    cluster.gates["submitted"].set()
    until(coordinator, lambda: not coordinator.performer.submitting(running.state))
    assert {i.job.name: i.job_id for i in builds} == ids
    assert {m.state for m in cluster.members if m.job.purpose == "build"} <= {"PENDING", "RUNNING"}
    coordinator.evaluations.cancel(running.state.evaluation_id, "by a person")
    until(coordinator, lambda: cluster.asked.get("cancel", 0) > 0)
    ticks(coordinator)
    cluster.gates["cancel"].set()
    until(coordinator, lambda: running.state.ended_at is not None)


def test_a_listing_of_nodes_from_before_a_trial_began_does_not_offer_its_gpus(tmp_path):
    """It may show them as free, and the loop knows that they are used: they would be offered twice."""
    coordinator, _ = on(tmp_path, 2, 2, 2)
    running = coordinator.evaluations.accept(record())
    until(coordinator, lambda: "n0" in running.state.nodes.by_name)
    job = next(i for i in running.state.jobs.by_name.values() if i.job.node == "n0")
    until(coordinator, lambda: job.phase == "submitted")
    asked_at = job.changed_at + 1.0
    assert demand.started_since([running.state], asked_at) == set()
    running.take([JobStarted(at=asked_at + 1.0, job=job.job.name, index=0, node="n0")])
    assert demand.started_since([running.state], asked_at) == {"n0"}


@given(seconds=st.lists(st.floats(0.0, 2.0), min_size=1), patience=st.floats(0.0, 1.0))
def test_a_turn_waits_for_all_its_calls_together_no_longer_than_for_one(seconds, patience):
    """However many calls it makes one after the other, and however long each takes."""
    now = [100.0]
    calls, takes = ClusterCalls(patience), {}

    def waited(of, timeout):
        now[0] += min(max(takes[call] for call in of), timeout)
        for call in of:
            if takes[call] <= timeout:
                call.set_result(None)

    clock_of_test = SimpleNamespace(monotonic=lambda: now[0])
    with mock.patch.multiple(cluster_calls, time=clock_of_test, wait=waited):
        for _turn in range(2):
            calls.new_turn()
            began = now[0]
            for each in seconds:
                with mock.patch.object(cluster_calls.threading.Thread, "start"):
                    call = calls.begin("a call", lambda: None)
                takes[call] = each
                calls.wait([call])
            assert now[0] - began <= patience + 1e-9


def test_an_interrupt_in_a_call_of_the_loops_own_thread_is_no_answer():
    """Ctrl-C ends the loop at once, wherever it comes."""

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ClusterCalls().begin("a call", interrupted)


def test_a_coordinator_that_starts_while_the_controller_is_away_stays(tmp_path):
    """It takes charge, says what is missing, and asks again: a daemon that exits is not started again. It is not known where
    Redis shall listen until the third question.
    """
    coordinator, _ = on(tmp_path)
    coordinator.keeper, asked = NoRedis(), []

    def ensure():
        asked.append(1)
        if len(asked) < 3:
            raise RetryError("scontrol show config: Unable to contact slurm controller")

    coordinator.keeper.ensure = ensure
    with coordinator.in_charge():
        assert "Unable to contact" in coordinator.evaluations.trouble
        while len(asked) < 3:
            coordinator.tick()


# --- submissions -----------------------------------------------------------------------------------------------------


def test_what_is_left_at_the_deadline_waits_for_its_turn(tmp_path):
    """Nothing after it; later the rest, but what nothing needs any more or what was found meanwhile."""
    coordinator, cluster = on(tmp_path, *[2] * 6)
    running = coordinator.evaluations.accept(record())
    running.submit(time.monotonic() - 1.0)
    assert not cluster.submitted
    found, unneeded = (running.state.jobs.by_name[n] for n in sorted(running.state.jobs.live))
    found.phase, found.job_id = "submitted", cluster.submit(found.job)
    unneeded.released_at = 1.0
    running.submit(time.monotonic() + 30.0)
    assert cluster.names().count(found.job.name) == 1
    assert unneeded.job.name not in cluster.names()
    assert unneeded.phase == "ended"


def test_a_wave_that_the_disk_stops_is_found_by_name(tmp_path, monkeypatch):
    """One of six specs cannot be written: what was submitted beside it is taken over, nothing is submitted twice."""
    coordinator, cluster = on(tmp_path, *[2] * 6)
    coordinator.evaluations.grace.uncertain = 0.0
    coordinator.evaluations.accept(record())
    write, refused = effects.write_atomic, []

    def full(path, data):
        if "-stage-n3" in path.name and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(effects, "write_atomic", full)
    monkeypatch.setattr(registry, "PARKED_SECONDS", 0.1)
    coordinator.tick()
    assert refused
    until(coordinator, lambda: len(set(cluster.names("stage"))) == 6)
    assert len(cluster.names()) == len(set(cluster.names()))


def test_a_worker_of_a_judge_suite_gets_the_key_and_the_environment_of_workers(tmp_path):
    """No other job of the evaluation gets the key."""
    coordinator, cluster = on(tmp_path, 8)
    env = {"HF_HOME": "/data"}
    performer = coordinator.performer
    performer.site = replace(performer.site, trial_env=env, worker_env=env)
    made = record(1, suite={"tasks": (TaskEntry(name="t0", judge=True),)})
    judge = JudgeConfig(url="http://judge", model="m", api_key_env="JUDGE_KEY")
    running = coordinator.evaluations.accept(made.model_copy(update={"judge": judge}))
    coordinator.tick()
    event = worker_job(running.state, performer.site, 1, 0.0)
    jobs.job_intended(running.state, event)
    performer.submit(running.state, [SubmitJob(job=event.job)])
    given = {job.purpose: (job.secrets, dict(job.env)) for job in cluster.submitted}
    assert given.pop("metric") == (("JUDGE_KEY",), env)
    assert given.keys() >= {"build", "stage"}
    assert set(map(str, given.values())) == {str(((), env))}


def test_jobs_that_go_together_are_cancelled_by_one_command(tmp_path):
    """The one command fails: none of the builds is cancelled yet; at the next look all are."""
    coordinator, cluster = on(tmp_path, 4)
    running = coordinator.evaluations.accept(record(entries=4))
    coordinator.tick()
    builds = [running.state.jobs.by_name[name].job_id for name in cluster.names("build")]
    assert len(builds) > 1
    cluster.fail("cancel", ClusterError("away"), times=1)
    coordinator.evaluations.cancel(running.state.evaluation_id, "enough")
    assert all(cluster.member(job).phase != "ended" for job in builds)
    coordinator.tick()
    assert all(cluster.member(job).phase == "ended" for job in builds)


def test_evaluations_submit_in_the_order_in_which_they_are_served(tmp_path):
    """Priority, then age, whichever was accepted first."""
    coordinator, cluster = on(tmp_path, *[2] * 6)
    for number in (2, 1, 3):
        update = {"priority": number // 3}
        coordinator.evaluations.accept(another(record(), number).model_copy(update=update))
    coordinator.tick()
    whose = [name.split("-")[1] for name in cluster.names()]
    assert list(dict.fromkeys(whose)) == ["00000003", "00000001", "00000002"]


# --- GPUs that come and go -------------------------------------------------------------------------------------------


def test_gpus_that_come_free_on_its_node_are_lanes_and_are_promised_once(tmp_path):
    """With the weights that are there already. While the first evaluation stages, its GPUs look free; the second one is given
    them at its end.
    """
    coordinator, cluster = on(tmp_path, 8)
    busy = cluster.submit(Job(name="busy", argv=("x",), log="x", gpus=7, node="n0"))
    cluster.advance(1)
    first = coordinator.evaluations.accept(another(record(), 1))
    coordinator.tick()
    assert lanes_of(first) == {"n0": 1}
    cluster.end(busy)
    second = coordinator.evaluations.accept(another(record(), 2))
    ticks(coordinator)
    assert lanes_of(first) == {"n0": 8}
    assert len(cluster.names("stage")) == 1
    assert not any(lanes_of(second).values())
    coordinator.evaluations.cancel(first.state.evaluation_id, "enough")
    coordinator.tick()
    assert lanes_of(second) == {"n0": 8}


def test_what_an_evaluation_gives_back_is_offered_to_the_next_one_at_once(tmp_path):
    """And not when nodes are listed next, while settings let one of them work at a time."""
    coordinator, _ = on(tmp_path, 2, 2)
    coordinator.offers.limits = Limits(max_gpus=2)
    coordinator.offers.pace = replace(coordinator.offers.pace, nodes=3600.0)
    first, second = (coordinator.evaluations.accept(another(record(), number)) for number in (1, 2))
    ticks(coordinator)
    assert (lanes_of(first), lanes_of(second)) == ({"n0": 2}, {})
    coordinator.evaluations.cancel(first.state.evaluation_id, "enough")
    ticks(coordinator)
    assert sum(lanes_of(second).values()) == 2


def test_a_fault_of_a_node_is_learnt_once(tmp_path):
    """A trial saw no GPU there: the next evaluation gets the other node, also after the first one's end."""
    coordinator, _ = on(tmp_path, 4, 4)
    first = coordinator.evaluations.accept(another(record(), 1))
    coordinator.tick()
    node = first.state.nodes.by_name["n0"]
    first.take(nodes.back_off_node(node, "torch sees 0 of the 1 GPUs", clock.now(), at_fault=True))
    node.back_off_until = clock.now() + 60
    coordinator.tick()
    coordinator.evaluations.cancel(first.state.evaluation_id, "enough")
    coordinator.tick()
    second = coordinator.evaluations.accept(another(record(), 2))
    ticks(coordinator)
    assert set(lanes_of(second)) == {"n1"}
    node.back_off_until = clock.now() - 1
    third = coordinator.evaluations.accept(another(record(), 3))
    coordinator.evaluations.cancel(second.state.evaluation_id, "enough")
    ticks(coordinator)
    assert "n0" in lanes_of(third)


def test_evaluations_that_plan_share_no_turn(tmp_path):
    """A plan takes tenths of a second: twenty in one turn held up the loop. Each node is still offered once."""
    coordinator, _ = on(tmp_path, *[1] * 6)
    coordinator.offers.pace = replace(coordinator.offers.pace, nodes=1e9, share=0.0)
    running = [coordinator.evaluations.accept(another(record(max_trials=2), number)) for number in (1, 2, 3)]
    for planned in ([2, 0, 0], [2, 2, 0], [2, 2, 2]):
        coordinator.tick()
        assert [len(lanes_of(each)) for each in running] == planned
    assert len({node for each in running for node in lanes_of(each)}) == 6


# --- nodes whose Gres names no GPU type ------------------------------------------------------------------------------


@pytest.mark.parametrize("gres", ["", "a100"])
def test_the_name_that_a_precursor_reports_is_kept_for_later_evaluations(tmp_path, gres):
    """A job without GPUs reads it from the driver. Where Gres has a type, that one stays the key, and nothing is kept; where
    there is no name at all, it is a GPU still, and a slot of a CPU is none.
    """
    (folder := tmp_path / "0000:07:00.0").mkdir()
    (folder / "information").write_text(f"Model: \t\t {A100}\nIRQ:   \t\t 139\nGPU UUID: \t GPU-1\n")
    assert (gpu_name(tmp_path), gpu_name(tmp_path / "no-driver")) == (A100, "")
    slot = NodeUse(name="n1", lanes=1, gpu_type="cpu-slot")
    assert [hardware_of([each]) for each in (replace(slot, gpu_type=""), slot)] == ["gpu", "cpu"]
    coordinator, cluster = on(tmp_path, 2)
    cluster.fleet = [replace(cluster.fleet[0], gpu_type=gres)]
    running = coordinator.evaluations.accept(record())
    coordinator.tick()
    (precursor,) = cluster.names("stage")
    told = {"node": "n0", "path": "/s", "rung": "shm", "bytes": 1, "storage_bytes": 1, "seconds": 1}
    write_outcome(running.paths, Staged(name=precursor, gpu_name=A100, **told))
    coordinator.tick()
    assert hardware_of(running.state.nodes.by_name.values()) == (gres or A100)
    path = coordinator.performer.site.paths.gpu_names
    gpu_names.record_gpu_names(path, running.state)
    assert gpu_names.read_gpu_names(path) == ({} if gres else {"n0": A100})
    coordinator.evaluations.cancel(running.state.evaluation_id, "done with")
    for job in cluster.members:
        job.state = "CANCELLED"
    later = coordinator.evaluations.accept(another(record(), 1))
    until(coordinator, lambda: lanes_of(later))
    assert later.state.nodes.by_name["n0"].gpu_type == (gres or A100)
