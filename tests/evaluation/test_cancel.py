"""What carries out a cancellation: `scancel` that failed is repeated, and a Redis that ended with its job is no trouble."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import SITE
from support.simulated.world import World

from coordinator.cluster import ClusterError, Job
from coordinator.evaluation import events as ev
from coordinator.evaluation.actions import RemoveQueue, WithdrawShards
from coordinator.runtime.effects import Performer


def performer_on(cluster: FakeCluster, work: Path) -> Performer:
    site = replace(SITE, work_dir=str(work))
    return Performer(site=site, cluster=cluster, lm_eval_version=lambda: "0", observations=work / "o")


def test_a_cancellation_that_failed_is_made_up_for(tmp_path: Path) -> None:
    """However often it fails; and then never again, nor once the job is gone: its id may come to mean another job."""
    cluster = FakeCluster(fleet=[fake_node("n1")])
    performer = performer_on(cluster, tmp_path)
    job_id = cluster.submit(Job(name="es-x", argv=("true",), log="/dev/null"))
    cluster.advance()
    cluster.fail("cancel", ClusterError("away"), times=2)
    performer.cancel([job_id])
    performer.cancel_again(cluster.jobs())
    assert cluster.member(job_id).phase != "ended"
    performer.cancel_again(cluster.jobs())
    assert cluster.member(job_id).phase == "ended"
    cluster.fail("cancel", ClusterError("would be asked"), times=2)
    performer.cancel_again(cluster.jobs())
    performer.cancel(["4711"])
    performer.cancel_again(cluster.jobs())


@pytest.mark.parametrize("cancelled", [False, True])
def test_redis_that_ends_with_a_cancelled_evaluation_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cancelled: bool
) -> None:
    """`scancel` of the job of `eval` ends its Redis, too: advice on it would mislead. Else the log says that it is away."""
    world = World(1)
    world.tick()
    performer = performer_on(FakeCluster(fleet=[]), tmp_path)
    if cancelled:
        world.tell(ev.CancelAsked, reason="interrupted")
    caplog.set_level(logging.INFO)
    performer.perform(world.state, WithdrawShards(shards=("a|0|1",)))
    performer.perform(world.state, RemoveQueue())
    assert len(caplog.records) == (0 if cancelled else 2)
