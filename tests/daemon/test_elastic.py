"""GPUs that come free on a node are used there, and what one evaluation was promised is not promised to the next."""

from __future__ import annotations

from pathlib import Path

from world_parts import record

from coordinator.allocation.allocate import Limits
from coordinator.cluster import ClusterError, Job
from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.errors import RetryError
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake.from_settings import own_version
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator, Pace


class _NoRedis:
    def ensure(self) -> object:
        return None

    def stop(self) -> None: ...


def coordinator_on(tmp_path: Path, cluster: FakeCluster) -> Coordinator:
    site = Site(work_dir=str(tmp_path), trial_command=("python",), worker_command=("python",))
    performer = Performer(
        site=site, cluster=cluster, lm_eval_version=own_version, observations=tmp_path / "o"
    )
    # all that is called for is submitted in one tick, however slow the disk
    pace = Pace(tick=0.0, jobs=0.0, nodes=0.0, redis=0.0, submit=60.0)
    return Coordinator(
        performer=performer, cluster=cluster, keeper=_NoRedis(), limits=Limits(), pace=pace, grace=Grace()
    )


def another(base: EvaluationRecord, number: int) -> EvaluationRecord:
    update = {"evaluation_id": f"e{number}-suite-0000000{number}", "accepted_at": float(number)}
    return base.model_copy(update=update)


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


class _LateRedis(_NoRedis):
    """It is not known where Redis shall listen until the controller answers, at the third question."""

    asked = 0

    def ensure(self) -> object:
        self.asked += 1
        if self.asked < 3:
            raise RetryError("scontrol show config: Unable to contact slurm controller")
        return None


def test_a_coordinator_that_starts_while_the_controller_is_away_stays(tmp_path: Path) -> None:
    """It takes charge, says what is missing, and asks again; nobody would start it a second time."""
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
