"""A coordinator on a cluster of plain values, with a Redis of its own or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.allocation.allocate import Limits
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake.from_settings import own_version
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator, Pace
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
from support.fake_cluster import FakeCluster


class NoRedis:
    def ensure(self) -> object:
        return None

    def stop(self) -> None: ...


def coordinator_on(work: Path, cluster: FakeCluster, *, redis: bool = False) -> Coordinator:
    """A coordinator without a Redis, or with a server of its own; all that waits is submitted in one tick."""
    site = Site(work_dir=str(work), trial_command=("python",), worker_command=("python",))
    return Coordinator(
        performer=Performer(site=site, cluster=cluster, lm_eval_version=own_version, observations=work / "o"),
        cluster=cluster,
        keeper=RedisServer(WorkPaths(work)) if redis else NoRedis(),
        limits=Limits(),
        pace=Pace(tick=0.0, jobs=0.0, nodes=0.0, redis=0.1 if redis else 0.0, share=60.0),
        grace=Grace(),
    )


@contextmanager
def serving(work: Path, cluster: FakeCluster) -> Iterator[Coordinator]:
    """A coordinator in charge of a work folder, with a Redis of its own, which ends with it."""
    coordinator = coordinator_on(work, cluster, redis=True)
    with coordinator.in_charge():
        yield coordinator
    coordinator.keeper.stop()


def another(base: EvaluationRecord, number: int) -> EvaluationRecord:
    update = {"evaluation_id": f"e{number}-suite-0000000{number}", "accepted_at": float(number)}
    return base.model_copy(update=update)


def until(coordinator: Coordinator, done: Callable[[], object]) -> None:
    """Tick until it is so."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, coordinator.trouble
        coordinator.tick()
