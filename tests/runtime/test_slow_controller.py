"""A controller that answers late, or not at all: the loop goes on, and its answers count once they come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from dev_cluster.testing import wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, until
from support.simulated.parts import record

from coordinator.allocation import demand
from coordinator.cluster import Job, JobState, NodeState
from coordinator.errors import RetryError
from coordinator.evaluation.events import JobStarted
from coordinator.runtime import cluster_calls, wiring
from coordinator.runtime.cluster_calls import ClusterCalls
from coordinator.runtime.loop import Coordinator

NODES = [fake_node(f"n{i}", gpus=2, memory_mb=64_000) for i in range(3)]


@dataclass(slots=True, kw_only=True)
class Gated(FakeCluster):
    """Each method answers once its gate is open; `asked` counts the calls."""

    gates: dict[str, threading.Event] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    one: threading.Lock = field(default_factory=threading.Lock)

    def _wait(self, method: str) -> None:
        with self.one:
            self.asked[method] = self.asked.get(method, 0) + 1
        gate = self.gates.get(method)
        assert gate is None or gate.wait(60), f"the test has not opened {method}"

    def submit(self, job: Job) -> str:
        self._wait("submit")
        with self.one:
            return FakeCluster.submit(self, job)

    def jobs(self) -> list[JobState]:
        listed = FakeCluster.jobs(self)
        self._wait("jobs")
        return listed

    def nodes(self) -> list[NodeState]:
        self._wait("nodes")
        return FakeCluster.nodes(self)

    def cancel(self, job_ids: Sequence[str]) -> None:
        self._wait("cancel")
        FakeCluster.cancel(self, job_ids)


def slow(work: Path, *methods: str) -> tuple[Coordinator, Gated]:
    """A coordinator that waits for no answer, and its cluster; the gates of `methods` are closed."""
    cluster = Gated(fleet=NODES, gates={name: threading.Event() for name in methods})
    coordinator = coordinator_on(work, cluster)
    coordinator.calls = coordinator.performer.calls = ClusterCalls(0.0)
    coordinator.performer.at_once = 8
    return coordinator, cluster


@pytest.mark.parametrize("method", ["jobs", "nodes", "submit"])
def test_the_loop_goes_on_while_a_call_has_no_answer(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is asked once at a time, and named; the same jobs come of it once it is answered."""
    monkeypatch.setattr(cluster_calls, "SAID_SECONDS", 0.0)
    coordinator, cluster = slow(tmp_path, method)
    running = coordinator.accept(record())
    until(coordinator, lambda: cluster.asked.get(method, 0) > 0)
    before = cluster.asked[method]
    for _ in range(20):
        coordinator.tick()
    assert method == "submit" or cluster.asked[method] == before == 1
    assert "the cluster has not answered" in coordinator.trouble
    cluster.gates[method].set()
    until(coordinator, lambda: len([j for j in cluster.submitted if j.purpose == "stage"]) == 3)
    until(coordinator, lambda: all(i.phase == "submitted" for i in running.state.jobs.by_name.values()))
    names = [job.name for job in cluster.submitted]
    assert len(names) == len(set(names))


def test_a_job_that_a_listing_shows_before_its_submission_is_answered_is_taken_over(tmp_path: Path) -> None:
    coordinator, cluster = slow(tmp_path, "answer")
    answered = cluster.gates["answer"]

    def late(job: Job) -> str:
        job_id = FakeCluster.submit(cluster, job)
        assert answered.wait(60)
        return job_id

    coordinator.performer.cluster = _With(cluster, submit=late)  # type: ignore[assignment]
    running = coordinator.accept(record())
    builds = [i for i in running.state.jobs.by_name.values() if i.job.purpose == "build"]
    until(coordinator, lambda: all(i.phase == "submitted" for i in builds))
    ids = {i.job.name: i.job_id for i in builds}
    answered.set()
    until(coordinator, lambda: not coordinator.performer.submitting(running.state))
    assert {i.job.name: i.job_id for i in builds} == ids
    assert {m.state for m in cluster.members if m.job.purpose == "build"} <= {"PENDING", "RUNNING"}


def test_a_cancellation_that_has_no_answer_holds_up_nothing(tmp_path: Path) -> None:
    coordinator, cluster = slow(tmp_path, "cancel")
    running = coordinator.accept(record())
    until(coordinator, lambda: all(i.phase == "submitted" for i in running.state.jobs.by_name.values()))
    coordinator.cancel(running.state.evaluation_id, "by a person")
    until(coordinator, lambda: cluster.asked.get("cancel", 0) > 0)
    coordinator.tick()
    cluster.gates["cancel"].set()
    until(coordinator, lambda: running.state.ended_at is not None)


def test_a_listing_of_nodes_from_before_a_trial_began_does_not_offer_its_gpus(tmp_path: Path) -> None:
    """It may show them as free, and the loop knows that they are used: they would be offered twice."""
    coordinator, _cluster = slow(tmp_path)
    running = coordinator.accept(record())
    until(coordinator, lambda: running.state.nodes.by_name.keys() >= {"n0"})
    job = next(i for i in running.state.jobs.by_name.values() if i.job.node == "n0")
    until(coordinator, lambda: job.phase == "submitted")
    asked_at = job.changed_at + 1.0
    assert demand.started_since([running.state], asked_at) == set()
    running.take([JobStarted(at=asked_at + 1.0, job=job.job.name, index=0, node="n0")])
    assert demand.started_since([running.state], asked_at) == {"n0"}


def test_redis_waits_for_the_controllers_place_and_the_loop_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for once at a time, and not again once it is known."""
    asked, answered = [], threading.Event()

    def controller_host() -> str:
        asked.append(1)
        assert answered.wait(60)
        return "127.0.0.1"

    monkeypatch.setattr(wiring, "controller_host", controller_host)
    calls = ClusterCalls(0.0)
    bind = wiring._towards_controller(calls)
    for _ in range(3):
        with pytest.raises(RetryError):
            bind()
    answered.set()

    def known() -> bool:
        with contextlib.suppress(RetryError):
            return bind() == "127.0.0.1"
        return False

    wait_until(known, "the place is known")
    assert bind() == "127.0.0.1"
    assert len(asked) == 1


@given(seconds=st.lists(st.floats(0.0, 2.0), min_size=1), patience=st.floats(0.0, 1.0))
def test_a_turn_waits_for_all_its_calls_together_no_longer_than_for_one(
    seconds: list[float], patience: float
) -> None:
    """However many calls it makes one after the other, and however long each takes."""
    now = [100.0]
    calls = ClusterCalls(patience)

    class Answer(threading.Event):
        """Set after `takes` seconds."""

        takes = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += min(self.takes, timeout)
            if self.takes <= timeout:
                self.set()
            return self.is_set()

    with mock.patch.object(cluster_calls, "time", SimpleNamespace(monotonic=lambda: now[0])):
        for _turn in range(2):
            calls.new_turn()
            began = now[0]
            for each in seconds:
                call = calls.begin("a call", lambda: None)
                call.ended = late = Answer()
                late.takes = each
                calls.wait([call])
            assert now[0] - began <= patience + 1e-9


def test_an_interrupt_in_a_call_of_the_loops_own_thread_is_no_answer() -> None:
    """Ctrl-C ends the loop at once, wherever it comes."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ClusterCalls().begin("a call", interrupted)


class _With:
    """`cluster` with some of its methods replaced."""

    def __init__(self, cluster: FakeCluster, **methods: Any) -> None:
        self._cluster = cluster
        self.__dict__ |= methods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)
