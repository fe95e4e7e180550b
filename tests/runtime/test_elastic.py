"""GPUs that come free on a node are used there, and what one evaluation was promised is not promised to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.fake_cluster import FakeCluster, fake_node
from support.loops import NoRedis, another, coordinator_on, until
from support.simulated.parts import record

from coordinator.base import clock
from coordinator.cluster import ClusterError, Job, JobState
from coordinator.errors import RetryError
from coordinator.evaluation import nodes


def test_an_evaluation_grows_on_its_own_node(tmp_path: Path) -> None:
    """One GPU is free at first, then all eight: they are its lanes, with the weights that are there already."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=8, memory_mb=64_000)])
    busy = cluster.submit(Job(name="busy", argv=("x",), log="x", gpus=7, node="n1"))
    cluster.advance(1)
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record())
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].lanes == 1
    cluster.end(busy)
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].lanes == 8
    assert sum(j.purpose == "stage" for j in cluster.submitted) == 1


def test_a_promised_gpu_is_not_promised_again(tmp_path: Path) -> None:
    """While the first evaluation stages, its GPUs look free; the second one is not given them."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=4, memory_mb=64_000)])
    coordinator = coordinator_on(tmp_path, cluster)
    first, second = (coordinator.accept(another(record(), n)) for n in (1, 2))
    for _ in range(3):
        coordinator.tick()
    assert first.state.nodes.by_name["n1"].lanes == 4
    assert not any(n.lanes for n in second.state.nodes.by_name.values())
    coordinator.cancel(first.state.evaluation_id, "enough")
    coordinator.tick()
    assert second.state.nodes.by_name["n1"].lanes == 4


def test_a_fault_of_a_node_is_learnt_once(tmp_path: Path) -> None:
    """A trial saw no GPU there: the next evaluation gets the other node, also after the first one's end."""
    cluster = FakeCluster(fleet=[fake_node(name, gpus=4, memory_mb=64_000) for name in ("n1", "n2")])
    coordinator = coordinator_on(tmp_path, cluster)
    first = coordinator.accept(another(record(), 1))
    coordinator.tick()
    node = first.state.nodes.by_name["n1"]
    (event,) = nodes.back_off(node, "torch sees 0 of the 1 GPUs", clock.now(), at_fault=True)
    first.take([event])
    node.back_off_until = clock.now() + 60
    coordinator.tick()
    coordinator.cancel(first.state.evaluation_id, "enough")
    coordinator.tick()
    second = coordinator.accept(another(record(), 2))
    for _ in range(3):
        coordinator.tick()
    assert set(second.state.nodes.by_name) == {"n2"}
    node.back_off_until = clock.now() - 1
    third = coordinator.accept(another(record(), 3))
    coordinator.cancel(second.state.evaluation_id, "enough")
    for _ in range(3):
        coordinator.tick()
    assert "n1" in third.state.nodes.by_name


class _Limited(FakeCluster):
    """Once it is full, what is pending waits for a limit on this user's jobs."""

    full = False

    def jobs(self) -> list[JobState]:
        return [
            replace(job, reason="QOSMaxJobsPerUserLimit") if self.full and job.phase == "pending" else job
            for job in super().jobs()
        ]

    def start(self, *purposes: str) -> None:
        for member in self.members:
            if member.job.purpose in purposes and member.phase == "pending":
                member.state = "RUNNING"


def test_nothing_is_staged_ahead_of_an_evaluation_that_waits_for_a_limit(tmp_path: Path) -> None:
    """Two precursors hold all places, and the first one's builds wait: the second one's makes way, until nothing waits."""
    cluster = _Limited(fleet=[fake_node(name, gpus=1, memory_mb=64_000) for name in ("n1", "n2")])
    coordinator = coordinator_on(tmp_path, cluster)
    first, second = (coordinator.accept(another(record(max_trials=1), n)) for n in (1, 2))
    staging = lambda: [j.node for j in cluster.submitted if j.purpose == "stage"]  # noqa: E731
    until(coordinator, lambda: len(staging()) == 2)
    cluster.start("stage")
    cluster.full = True
    until(coordinator, lambda: second.state.nodes.by_name["n2"].status == "withdrawn")
    for _ in range(3):
        coordinator.tick()
    assert first.state.nodes.by_name["n1"].status == "staging"
    assert len(staging()) == 2
    cluster.start("build")
    until(coordinator, lambda: len(staging()) == 3)


class _LateRedis(NoRedis):
    """It is not known where Redis shall listen until the controller answers, at the third question."""

    asked = 0

    def ensure(self) -> object:
        self.asked += 1
        if self.asked < 3:
            raise RetryError("scontrol show config: Unable to contact slurm controller")
        return None


def test_a_coordinator_that_starts_while_the_controller_is_away_stays(tmp_path: Path) -> None:
    """It takes charge, says what is missing, and asks again: a daemon that exits is not started again."""
    coordinator = coordinator_on(tmp_path, FakeCluster(fleet=[]))
    coordinator.keeper = keeper = _LateRedis()
    with coordinator.in_charge():
        assert "Unable to contact" in coordinator.trouble
        while keeper.asked < 3:
            coordinator.tick()


def test_jobs_that_go_together_are_cancelled_by_one_command(tmp_path: Path) -> None:
    """The one command fails: none of the builds is cancelled yet; at the next look all are."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=4, memory_mb=64_000)])
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record(entries=4))
    coordinator.tick()
    builds = [running.state.jobs.by_name[j.name].job_id for j in cluster.submitted if j.purpose == "build"]
    assert len(builds) > 1
    cluster.fail("cancel", ClusterError("away"), times=1)
    coordinator.cancel(running.state.evaluation_id, "enough")
    assert all(cluster.member(job).phase != "ended" for job in builds)
    coordinator.tick()
    assert all(cluster.member(job).phase == "ended" for job in builds)
