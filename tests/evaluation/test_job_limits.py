"""An evaluation ends with its scores however few jobs its user may run: its own idle jobs give way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated.parts import FakeJob, FakeMember, Faults, record
from support.simulated.world import World

from coordinator.cluster import JobState
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev

REASON = "QOSMaxJobsPerUserLimit"


class Limited(World):
    """Slurm starts only so many jobs of this user at a time, or takes only so many."""

    most = 1 << 20  # that run
    most_submitted = 1 << 20

    def starts(self, job: FakeJob, member: FakeMember) -> bool:
        running = sum(m.phase == "running" for j in self.jobs.values() for m in j.members.values())
        return running < self.most and super().starts(job, member)

    def listing(self) -> list[JobState]:
        return [replace(r, reason=REASON) if r.phase == "pending" else r for r in super().listing()]

    def submit(self, action: do.SubmitJob) -> list[ev.AnyEvent]:
        job, info = action.job, self.state.jobs.by_name[action.job.name]
        living = sum(m.phase != "ended" for j in self.jobs.values() for m in j.members.values())
        if info.released_at is None and info.phase == "intended" and living + job.count > self.most_submitted:
            return [ev.JobNotSubmitted(at=self.now, job=job.name, error=REASON, limited=True)]
        return super().submit(action)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("most", "nodes"), [(2, 2), (2, 4), (3, 3), (3, 8), (4, 2)])
def test_precursors_make_way_for_the_jobs_that_they_serve(seed: int, most: int, nodes: int) -> None:
    """Where they hold all places of a limit, nodes are given up, until a trial runs beside the last of them."""
    world = Limited(seed, Faults(restart=0.01), record(entries=4), nodes)
    world.most = most
    world.run_to_scores()
    if nodes > most:
        assert any("given up for a while" in w and REASON in w for w in world.state.warnings)


@pytest.mark.parametrize("seed", range(6))
def test_precursors_that_fill_the_limit_on_submissions_make_way(seed: int) -> None:
    world = Limited(seed, Faults(restart=0.01), record(entries=4), 3, 1)
    world.most_submitted = 3
    world.run_to_scores()
