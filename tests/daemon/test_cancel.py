"""A cancellation that the cluster could not be told is told once it listens again."""

from __future__ import annotations

from pathlib import Path

import pytest
from world_parts import SITE, record

from coordinator import machine
from coordinator import messages as m
from coordinator.cluster import ClusterError, Job
from coordinator.perform import Performer
from coordinator.testing import FakeCluster, fake_node


def test_a_cancellation_that_failed_is_made_up_for(tmp_path: Path) -> None:
    """However often it fails; and then never again, since the id may come to mean another job."""
    cluster = FakeCluster(fleet=[fake_node("n1")])
    performer = Performer(
        site=SITE, cluster=cluster, lm_eval_version=lambda: "0", observations=tmp_path / "o"
    )
    state, _ = machine.start(m.Accepted(at=0.0, record=record(1)))
    job_id = cluster.submit(Job(name="es-x", argv=("true",), log="/dev/null"))
    cluster.advance()
    cluster.fail("cancel", ClusterError("away"), times=2)
    assert performer.perform(state, m.CancelJob(job_id=job_id)) == []
    with pytest.raises(ClusterError):
        performer.cancel_again()
    assert cluster.member(job_id).phase != "ended"
    performer.cancel_again()
    assert cluster.member(job_id).phase == "ended"
    cluster.fail("cancel", ClusterError("would be told"))
    performer.cancel_again()
