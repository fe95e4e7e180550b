"""Laws of the fake: it fails as asked for, and a seed gives the same run again."""

from __future__ import annotations

import math

import pytest

from coordinator.cluster import ClusterError, Job, JobState
from coordinator.cluster.fake import FakeCluster, FakeFaults, fake_node

JOB = Job(name="es-a", argv=("x",), log="/l", gpus=1)


def test_a_submission_can_happen_and_time_out_or_be_acknowledged_and_lost() -> None:
    late = FakeCluster(fleet=[fake_node("n1")])
    late.fail("submit", ClusterError("timed out", maybe_done=True), done=True)
    with pytest.raises(ClusterError):
        late.submit(JOB)
    assert [j.name for j in late.jobs()] == ["es-a"]
    lost = FakeCluster(fleet=[fake_node("n1")], faults=FakeFaults(submit_lost=1.0))
    assert lost.submit(JOB)
    assert lost.jobs() == []


def test_a_lost_jobs_id_can_come_again() -> None:
    """As after a SIGKILL of slurmctld: an id alone is no identity."""
    cluster = FakeCluster(fleet=[fake_node("n1")])
    first = cluster.submit(JOB)
    cluster.lose(first, reuse_id=True)
    assert cluster.submit(JOB) == first


def test_no_news_is_an_error_and_an_unknown_state_is_unknown() -> None:
    cluster = FakeCluster(fleet=[fake_node("n1")])
    job_id = cluster.submit(JOB)
    cluster.fail("jobs", ClusterError("garbage"), times=2)
    for _ in range(2):
        with pytest.raises(ClusterError):
            cluster.jobs()
    cluster.end(job_id, state="HIBERNATING")
    assert cluster.jobs()[0].phase == "unknown"


def test_a_node_that_goes_takes_its_jobs_along() -> None:
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=1), fake_node("n2", gpus=1)])
    for _ in range(3):
        cluster.submit(JOB)
    cluster.advance()
    assert [j.node for j in cluster.jobs()] == ["n1", "n2", None]
    cluster.take_down("n1")
    cluster.advance()
    assert [(j.state, j.node) for j in cluster.jobs()] == [
        ("NODE_FAIL", "n1"),
        ("RUNNING", "n2"),
        ("PENDING", None),
    ]
    assert [n.usable for n in cluster.nodes()] == [False, True]
    cluster.bring_up("n1")
    cluster.advance()
    assert cluster.jobs()[2].node == "n1"


def run(seed: int) -> list[list[JobState]]:
    faults = FakeFaults(submit_times_out=0.2, submit_fails=0.2, no_news=0.2, death=0.2, vanishes=0.5)
    cluster = FakeCluster(
        fleet=[fake_node("n1")], faults=faults, seed=seed, seconds=lambda _, index: 3.0 + index
    )
    listings = []
    for _ in range(20):
        for call in (lambda: cluster.submit(JOB), lambda: listings.append(cluster.jobs())):
            try:
                call()
            except ClusterError:
                listings.append([])
        cluster.advance(1.0)
    return listings


def test_a_seed_replays() -> None:
    assert run(1) == run(1)
    assert run(1) != run(2)
    assert math.isinf(FakeCluster(fleet=[fake_node("n1")]).seconds(JOB, 0))
