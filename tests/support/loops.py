"""A coordinator on a cluster of plain values, with a Redis of its own or none."""

import time
from contextlib import contextmanager

from coordinator.decide.allocation.allocate import Limits
from coordinator.decide.evaluation.job_specs import Site
from coordinator.intake.from_settings import own_version
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.node_offers import Pace
from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths


class NoRedis:
    def ensure(self):
        return None

    def stop(self): ...


def coordinator_on(work, cluster, *, redis=False):
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
def serving(work, cluster):
    """A coordinator in charge of a work folder, with a Redis of its own, which ends with it."""
    coordinator = coordinator_on(work, cluster, redis=True)
    with coordinator.in_charge():
        yield coordinator
    coordinator.keeper.stop()


def another(base, number):
    update = {"evaluation_id": f"e{number}-suite-0000000{number}", "accepted_at": float(number)}
    return base.model_copy(update=update)


def until(coordinator, done):
    """Tick until it is so."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, coordinator.evaluations.trouble
        coordinator.tick()
