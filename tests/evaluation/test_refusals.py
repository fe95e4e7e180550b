"""What a refused submission costs: its node where the node is the reason, time where a limit is, else the evaluation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.cluster import JobState
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import jobs, nodes
from coordinator.evaluation.job_ends import MAX_SUBMISSIONS

UNFIT = "Requested node configuration is not available"
LIMIT = "QOSMaxSubmitJobPerUserLimit; Batch job submission failed: Job violates accounting/QOS policy"


class Site(World):
    """A cluster that refuses jobs of some nodes or kinds, and takes only so many at a time."""

    unfit: frozenset[str] = frozenset()  # nodes whose jobs are refused
    refused: frozenset[str] = frozenset()  # purposes that are refused there; empty: all
    banned = ""  # purpose of jobs that are refused everywhere
    most = 1 << 20  # jobs that this user may have
    array_size = 1 << 20  # most members of a job array

    def submit(self, action: do.SubmitJob) -> list[ev.AnyEvent]:
        job, info = action.job, self.state.jobs.by_name[action.job.name]
        if info.phase != "intended" or info.released_at is not None:
            return super().submit(action)
        if job.node in self.unfit and (not self.refused or job.purpose in self.refused):
            return [ev.JobNotSubmitted(at=self.now, job=job.name, error=UNFIT, refused=True, of_node=True)]
        if job.purpose == self.banned:
            error = "Invalid qos specification"
            return [ev.JobNotSubmitted(at=self.now, job=job.name, error=error, refused=True)]
        assert job.count <= self.array_size, f"{job.name} is an array of {job.count}"
        if self.members() + job.count > self.most:
            self.refusals.setdefault(job.name, []).append(self.now)
            return [ev.JobNotSubmitted(at=self.now, job=job.name, error=LIMIT, limited=True)]
        return super().submit(action)

    @property
    def refusals(self) -> dict[str, list[float]]:
        return self.__dict__.setdefault("_refusals", {})  # type: ignore[no-any-return]

    def members(self) -> int:
        return sum(x.phase != "ended" for j in self.jobs.values() for x in j.members.values())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3))
def test_no_job_array_is_larger_than_the_site_takes(seed: int, size: int) -> None:
    """Trials and metric workers come in several jobs, and all is scored; 1: there are no arrays."""
    world = Site(seed, Faults(kill=0.02), record(entries=4, workers=4, array_size=size), gpus=4)
    world.array_size = size
    world.run_to_scores()


def test_as_many_metric_workers_come_in_small_arrays_as_in_one() -> None:
    """At once, in several jobs."""
    world = World(1, Faults(), record(entries=8, workers=4, array_size=2))
    while not world.state.live_jobs("metric"):
        world.state.plan.workers = 3
        world.tick()
    assert sorted(info.job.count for info in world.state.live_jobs("metric")) == [1, 2]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), purposes=st.sampled_from([(), ("stage",), ("trial",)]))
def test_a_refusal_that_one_node_causes_is_that_nodes_alone(seed: int, purposes: tuple[str, ...]) -> None:
    """Whichever of its jobs are refused, all is scored on the other node, and the refused one rests with the reason."""
    world = Site(seed, Faults(submit_waits=0.2, restart=0.02), record(entries=4))
    world.unfit, world.refused = frozenset({"n0"}), frozenset(purposes)
    world.run_to_scores()
    node = world.state.nodes.by_name["n0"]
    if node.back_offs:
        assert UNFIT in node.why
        assert any("n0 is in back-off" in w and UNFIT in w for w in world.state.warnings)
    assert not any(UNFIT in w and "n1" in w for w in world.state.warnings)


@pytest.mark.parametrize("seed", range(5))
def test_where_no_node_takes_its_jobs_an_evaluation_ends_with_the_last_reason(seed: int) -> None:
    """After the rests of the existing rule, half an hour; what is refused everywhere ends it at once."""
    world = Site(seed, Faults(), record(entries=2))
    world.unfit = frozenset(world.node_names)
    world.run()
    assert all(e.status == "failed" and UNFIT in e.error for e in world.state.entries), world.summary()
    assert 60.0 * (2**nodes.MAX_ALL_BACKED_OFF - 1) <= world.now <= 3600.0
    world.assert_nothing_left()
    barred = Site(seed, Faults(), record(entries=2))
    barred.banned = "stage"
    barred.run()
    assert "Invalid qos" in barred.state.ending.reason
    assert barred.now < 300.0


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), most=st.integers(5, 8), cancelled=st.none() | st.integers(0, 60))
def test_a_job_that_a_limit_keeps_out_is_tried_again_with_growing_pauses_and_blames_no_node(
    seed: int, most: int, cancelled: int | None
) -> None:
    """However often it is kept out: no submission is counted, no node rests, all is scored or, once cancelled, ended."""
    world = Site(seed, Faults(restart=0.02, submit_waits=0.2), record(entries=4, workers=2))
    world.most = most
    for tick in range(3000):
        if world.state.ended_at is not None:
            break
        if tick == cancelled:
            world.take([ev.CancelAsked(at=world.now, reason="asked")])
        world.tick()
        for name, held in world.state.jobs.held.items():
            assert LIMIT in held.why
            assert held.due_at > world.now or name in {a.job.name for a in world.called}
    assert world.state.ended_at is not None, world.summary()
    assert cancelled is not None or all(e.status == "scored" for e in world.state.entries), world.summary()
    assert not any(n.back_offs or n.failures for n in world.state.nodes.by_name.values())
    assert not any(info.submissions for info in world.state.jobs.by_name.values())
    for times in world.refusals.values():
        for number, (before, after) in enumerate(pairwise(times)):
            assert after - before >= min(jobs.HELD_SECONDS * 2**number, jobs.MAX_HELD_SECONDS)
    world.assert_nothing_left()


def test_more_refusals_of_a_limit_than_submissions_are_counted_end_nothing() -> None:
    """Kept out for four hours, the evaluation waits, and is scored once the limit has room."""
    world = Site(1, Faults(), record(entries=2))
    world.most = 0
    for _ in range(4 * 720):
        world.tick()
    assert max(len(times) for times in world.refusals.values()) > MAX_SUBMISSIONS
    assert world.state.jobs.held
    assert not world.state.ending.reason
    world.most = 1 << 20
    world.run_to_scores()


NEVER = "PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit"


@pytest.mark.parametrize(
    ("purpose", "never"),
    [
        *((purpose, NEVER[0]) for purpose in ("build", "stage", "trial", "metric")),
        *(("trial", r) for r in NEVER[1:]),
    ],
)
def test_a_job_that_slurm_will_never_start_was_refused(purpose: str, never: str) -> None:
    """Such a reason of a pending job ends the evaluation with its words; the job is cancelled."""
    world = World(1, Faults(), record(entries=2))
    listing = world.listing

    def shown() -> list[JobState]:
        return [
            replace(row, reason=never) if row.phase == "pending" and f"-{purpose}-" in row.name else row
            for row in listing()
        ]

    world.listing = shown  # type: ignore[method-assign]
    starts = world.starts
    world.starts = lambda job, member: job.job.purpose != purpose and starts(job, member)  # type: ignore[method-assign]
    world.run()
    assert never in world.state.ending.reason
    assert any(e.status == "failed" and never in e.error for e in world.state.entries), world.summary()
    world.assert_nothing_left()
