"""A cancellation that failed is repeated once the cluster answers again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import SITE, Faults
from support.simulated.world import World, replay

from coordinator.cluster import ClusterError, Job
from coordinator.evaluation import events as ev
from coordinator.evaluation.actions import RemoveQueue, WithdrawShards
from coordinator.runtime.effects import Performer


def test_a_cancellation_that_failed_is_made_up_for(tmp_path: Path) -> None:
    """However often it fails; and then never again, nor once the job is gone: its id may come to mean another job."""
    cluster = FakeCluster(fleet=[fake_node("n1")])
    performer = Performer(
        site=SITE, cluster=cluster, lm_eval_version=lambda: "0", observations=tmp_path / "o"
    )
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
    world = World(1, Faults())
    world.tick()
    site = replace(SITE, work_dir=str(tmp_path))
    performer = Performer(
        site=site, cluster=FakeCluster(fleet=[]), lm_eval_version=lambda: "0", observations=tmp_path / "o"
    )
    if cancelled:
        world.take([ev.CancelAsked(at=world.now, reason="interrupted")])
    caplog.set_level(logging.INFO)
    performer.perform(world.state, WithdrawShards(shards=("a|0|1",)))
    performer.perform(world.state, RemoveQueue())
    assert len(caplog.records) == (0 if cancelled else 2)


def test_what_is_over_is_not_cancelled() -> None:
    """Its scores are written: a cancellation that comes too late changes no word of it."""
    world = World(1, Faults())
    world.run()
    before = replay(world.journal)
    world.take([ev.CancelAsked(at=world.now, reason="too late")])
    assert world.state == before


def test_a_job_that_was_never_asked_for_costs_no_try() -> None:
    """A coordinator that dies again and again before a submission's turn submits it all the same; a cluster that fails to
    do it eight times ends the evaluation, with its words."""
    world = World(1, Faults())
    world.called.clear()
    builds = sorted(world.state.jobs.live)
    for _ in range(20):
        world.restart()
        lost = [ev.JobNotSubmitted(at=world.now, job=n, error="it is in no listing") for n in builds]
        world.take(lost)
    assert not world.state.ending.reason
    for tried in range(8):
        assert not world.state.ending.reason, tried
        failed = ev.JobNotSubmitted(at=world.now, job=builds[0], error="no route", maybe_done=True)
        world.take([failed, ev.JobNotSubmitted(at=world.now, job=builds[0], error="no route")])
    assert "could not be submitted 8 times: no route" in world.state.ending.reason


def test_a_node_that_is_offered_after_its_weights_were_evicted_is_known_by_its_gpus() -> None:
    """Staged ahead it had no GPUs to tell of; what runs there is learnt under their name."""
    world = World(1, Faults())
    world.take([ev.MemoryOffered(at=1.0, nodes=("n9",))])
    world.take([ev.NodeWithdrawn(at=2.0, node="n9", reason="its memory is needed")])
    offer = ev.Offer(node="n9", gpus=2, memory_mb=512_000, gpu_type="h100")
    world.take([ev.NodesOffered(at=3.0, offers=(offer,))])
    node = world.state.nodes.by_name["n9"]
    assert (node.gpu_type, node.lanes) == ("h100", 2)
