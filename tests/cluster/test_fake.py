"""Laws of the fake: it fails as asked for."""

from __future__ import annotations

import pytest

from coordinator.cluster import ClusterError, Job
from coordinator.cluster.fake import FakeCluster, fake_node

JOB = Job(name="es-a", argv=("x",), log="/l", gpus=1)


def test_a_submission_can_happen_and_time_out() -> None:
    late = FakeCluster(fleet=[fake_node("n1")])
    late.fail("submit", ClusterError("timed out"), done=True)
    with pytest.raises(ClusterError):
        late.submit(JOB)
    assert [j.name for j in late.jobs()] == ["es-a"]


def test_no_news_is_an_error_and_an_unknown_state_is_unknown() -> None:
    cluster = FakeCluster(fleet=[fake_node("n1")])
    job_id = cluster.submit(JOB)
    cluster.fail("jobs", ClusterError("garbage"), times=2)
    for _ in range(2):
        with pytest.raises(ClusterError):
            cluster.jobs()
    cluster.end(job_id, state="HIBERNATING")
    assert cluster.jobs()[0].phase == "unknown"
