"""Several evaluations under a limit on this user's jobs: what one stages ahead never keeps the work of another out."""

from __future__ import annotations

import random

import pytest
from support.simulated.parts import FakeJob, Faults
from support.simulated.shared import Shared, Tenant

from coordinator.cluster import JobState

REASON = "QOSMaxJobsPerUserLimit"
PLACES = 3  # MaxJobsPerUser=4, of which the daemon's own job has one


class Limited(Shared):
    """Three nodes; of all evaluations together so many jobs run, the one that was submitted first before the others."""

    def __init__(self, seed: int, evaluations: int, share: float) -> None:
        super().__init__(seed, Faults())
        self.names, self.gpus, self.memory, self.share = ["n0", "n1", "n2"], 2, 3000, share
        self.foreign = dict.fromkeys(self.names, 0)
        self.contention = self.outages = self.releases = 0.0
        self.limits = type(self.limits)()
        self.arrivals = [0.0] * evaluations
        self.seed, self.order = seed, list[FakeJob]()

    def arrives(self) -> Tenant:
        return Tenant(self.seed, self, len(self.tenants))

    def living(self, phase: str) -> list[FakeJob]:
        jobs = (job for tenant in self.tenants for job in tenant.jobs.values())
        return [job for job in jobs for member in job.members.values() if member.phase == phase]

    def starts(self, job: FakeJob, _dice: random.Random) -> bool:
        self.order += [j for j in self.living("pending") if j not in self.order]
        waiting = [j for j in self.order if any(m.phase == "pending" for m in j.members.values())]
        full = len(self.living("running")) >= PLACES
        return not full and job is waiting[0]

    def kept_out(self) -> dict[str, str]:
        full = len(self.living("running")) >= PLACES
        return {j.job.name: REASON for j in self.living("pending")} if full else {}


def seconds(seed: int, evaluations: int, share: float) -> float:
    """From the arrival of all to the last one's end."""
    world = Limited(seed, evaluations, share)
    world.run(2000)
    for tenant in world.tenants:
        tenant.assert_scored()
        tenant.assert_nothing_left()
    return world.now


def test_a_job_that_waits_for_a_limit_is_known_by_its_reason() -> None:
    from coordinator.allocation.job_limits import kept_out

    rows = [
        JobState(job_id="1", name="a", index=0, phase="pending", state="PENDING", reason=REASON),
        JobState(job_id="2", name="b", index=0, phase="pending", state="PENDING", reason="Resources"),
        JobState(job_id="3", name="c", index=0, phase="running", state="RUNNING", reason=REASON),
    ]
    assert kept_out(rows) == {"a": REASON}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_three_equal_evaluations_take_no_longer_than_one_after_the_other(seed: int, share: float) -> None:
    """Under the limit each waits at most for those before it: none holds its places with weights that are not used."""
    assert seconds(seed, 3, share) <= 3 * seconds(seed, 1, share)
