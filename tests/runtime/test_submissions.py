"""Submissions: side by side, in turns with everything else, each once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.loops import another, coordinator_on
from support.simulated.parts import record

from coordinator.cluster import Job
from coordinator.evaluation import jobs
from coordinator.evaluation.actions import SubmitJob
from coordinator.evaluation.job_specs import worker_job
from coordinator.runtime import effects, registry
from coordinator.runtime.cluster_calls import ClusterCalls
from evaljobs.contract.specs import JudgeOptions, TaskEntry

NODES = [fake_node(f"n{i}", gpus=2, memory_mb=64_000) for i in range(6)]


@dataclass(slots=True, kw_only=True)
class _Slow(FakeCluster):
    """A controller that answers once two submissions wait for it."""

    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    one: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, job: Job) -> str:
        self.together.wait(timeout=30)
        with self.one:
            return FakeCluster.submit(self, job)


def test_a_slow_controller_is_asked_for_several_at_once(tmp_path: Path) -> None:
    """Two builds and six precursors, two side by side; each is submitted once and known by its own id."""
    cluster = _Slow(fleet=NODES)
    coordinator = coordinator_on(tmp_path, cluster)
    coordinator.performer.at_once, coordinator.performer.calls = 2, ClusterCalls(30.0)
    running = coordinator.accept(record())
    coordinator.tick()
    staged = [i for i in running.state.jobs.by_name.values() if i.job.purpose == "stage"]
    assert len(staged) == 6
    ids = {m.job.name: m.job_id for m in cluster.members}
    assert {i.job.name: i.job_id for i in staged} == {n: j for n, j in ids.items() if "-stage-" in n}
    assert len({i.job_id for i in staged}) == 6


def test_what_is_left_at_the_deadline_waits_for_its_turn(tmp_path: Path) -> None:
    """Nothing after it; later the rest, but what nothing needs any more or what was found meanwhile."""
    cluster = FakeCluster(fleet=NODES)
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record())
    running.submit(time.monotonic() - 1.0)
    assert not cluster.submitted
    found, unneeded = (running.state.jobs.by_name[n] for n in sorted(running.state.jobs.live))
    job_id = cluster.submit(found.job)
    found.phase, found.job_id = "submitted", job_id
    unneeded.released_at = 1.0
    running.submit(time.monotonic() + 30.0)
    names = [j.name for j in cluster.submitted]
    assert names.count(found.job.name) == 1
    assert unneeded.job.name not in names
    assert unneeded.phase == "ended"


def test_evaluations_submit_in_the_order_in_which_they_are_served(tmp_path: Path) -> None:
    """Priority, then age, whichever was accepted first."""
    cluster = FakeCluster(fleet=NODES)
    coordinator = coordinator_on(tmp_path, cluster)
    late = another(record(), 2)
    urgent = another(record(), 3).model_copy(update={"priority": 1})
    for each in (late, another(record(), 1), urgent):
        coordinator.accept(each)
    coordinator.tick()
    whose = [j.name.split("-")[1] for j in cluster.submitted]
    assert list(dict.fromkeys(whose)) == ["00000003", "00000001", "00000002"]


def test_a_wave_that_the_disk_stops_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six specs cannot be written: what was submitted beside it is taken over, nothing is submitted twice."""
    cluster = FakeCluster(fleet=NODES)
    coordinator = coordinator_on(tmp_path, cluster)
    coordinator.grace.uncertain = 0.0
    coordinator.accept(record())
    write, refused = effects.write_atomic, []

    def full(path: Path, data: bytes) -> None:
        if "-stage-n3" in path.name and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(effects, "write_atomic", full)
    monkeypatch.setattr(registry, "PARKED_SECONDS", 0.1)
    coordinator.tick()
    assert refused
    deadline = time.monotonic() + 60
    while len({j.name for j in cluster.submitted if j.purpose == "stage"}) < 6:
        assert time.monotonic() < deadline
        coordinator.tick()
    names = [j.name for j in cluster.submitted]
    assert len(names) == len(set(names))


def test_a_worker_of_a_judge_suite_gets_the_key_and_the_environment_of_workers(tmp_path: Path) -> None:
    """No other job of the evaluation gets the key."""
    cluster = FakeCluster(fleet=[fake_node("n1")])
    coordinator = coordinator_on(tmp_path, cluster)
    env = {"HF_HOME": "/data"}
    coordinator.performer.site = replace(coordinator.performer.site, trial_env=env, worker_env=env)
    judge = JudgeOptions(url="http://judge", model="m", api_key_env="JUDGE_KEY")
    tasks = (TaskEntry(name="t0", judge=True),)
    base = record(1)
    made = base.model_copy(update={"judge": judge, "suite": base.suite.model_copy(update={"tasks": tasks})})
    running = coordinator.accept(made)
    coordinator.tick()
    event = worker_job(running.state, coordinator.performer.site, 1, 0.0)
    jobs.intended(running.state, event)
    coordinator.performer.submit(running.state, [SubmitJob(job=event.job)])
    given = {job.purpose: (job.secrets, dict(job.env)) for job in cluster.submitted}
    assert given.pop("metric") == (("JUDGE_KEY",), env)
    assert given.keys() >= {"build", "stage"}
    assert set(map(str, given.values())) == {str(((), env))}


def test_evaluations_that_plan_share_no_turn(tmp_path: Path) -> None:
    """A plan takes tenths of a second: twenty in one turn held up the loop. Each node is still offered once."""
    cluster = FakeCluster(fleet=[replace(n, gpus=1, gpus_free=1) for n in NODES])
    coordinator = coordinator_on(tmp_path, cluster)
    coordinator.pace = replace(coordinator.pace, nodes=1e9, share=0.0)
    base = record()
    base = base.model_copy(update={"options": base.options.model_copy(update={"max_trials": 2})})
    running = [coordinator.accept(another(base, number)) for number in (1, 2, 3)]
    taken = []
    for _turn in running:
        coordinator.tick()
        taken.append([len(each.state.nodes.by_name) for each in running])
    assert taken == [[2, 0, 0], [2, 2, 0], [2, 2, 2]]
    assert len({node for each in running for node in each.state.nodes.by_name}) == 6
