"""How many jobs build the request sets of a suite, and which trials load meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.simulated.parts import FakeJob, FakeMember, Faults, ended, record
from support.simulated.world import World

from coordinator.cluster import Job, JobState
from coordinator.evaluation.nodes import MAX_FAILURES
from coordinator.evaluation.records import EvaluationRecord, Inputs
from evaljobs.contract.names import LaneId
from evaljobs.contract.specs import Sources

FEW, MANY = st.sampled_from([1, 8, 100]), st.sampled_from([None, 101, 0.5])


def limited(limits: Sequence[float | None], *, groups: bool = False, **options: Any) -> EvaluationRecord:
    """Tasks of these limits. `groups`: they may be groups of tasks."""
    made = record(entries=len(limits), **options)
    tasks = [t.model_copy(update={"limit": n}) for t, n in zip(made.suite.tasks, limits, strict=True)]
    names = tuple(t.name for t in tasks)
    inputs = Inputs(entries=tuple(Sources() for _ in tasks), single=() if groups else names)
    suite = made.suite.model_copy(update={"tasks": tuple(tasks)})
    return made.model_copy(update={"suite": suite, "inputs": inputs})


@given(few=st.lists(FEW, max_size=9), many=st.lists(MANY, max_size=4), jobs=st.integers(1, 5))
def test_entries_with_few_documents_share_one_build_job(
    few: list[int], many: list[float | None], jobs: int
) -> None:
    """Four of them at most. Each other entry has a job of its own, up to the setting. Every entry is in exactly one job."""
    assume(few or many)
    limits = [*few, *many]
    world = World(1, Faults(), limited(limits, build_jobs=jobs))
    world.tick()
    built = [info.entries for info in world.state.live_jobs("build")]
    assert len(built) == min(jobs, len(many) + -(-len(few) // 4))
    assert sorted(index for entries in built for index in entries) == list(range(len(limits)))


def test_a_limit_makes_no_group_a_small_one() -> None:
    """It holds for each of its tasks: mmlu with 100 documents has 5700. Nor does a trial wait for one."""
    world = SlowBuilds(1, Faults(), limited([100] * 4, groups=True, build_jobs=4, early_trials=True))
    world.tick()
    assert len(world.state.live_jobs("build")) == 4
    assert early_trials(world) == 0


def test_a_trial_that_gave_up_waiting_for_request_sets_costs_its_node_nothing() -> None:
    """However many do: there was no queue yet, and another waits in its place."""
    world = SlowBuilds(1, Faults(), limited([8, 8], early_trials=True))
    gone = 0
    while world.queue is None:
        for name, trial in list(world.state.trials.live.items()):
            job = world.jobs.get(trial.job)
            if job is not None and job.members[trial.member].phase == "running":
                lost = ended(LaneId.parse(trial.lane).node, name, "queue-lost")
                world.leave(lost.model_copy(update={"shards": 0}))
                world.end_member(job, trial.member, job.members[trial.member])
                gone += 1
        world.tick()
        assert world.state.ended_at is None
    assert gone > MAX_FAILURES
    assert world.state.trials.deaths_without_progress == 0
    assert all(node.failures == 0 for node in world.state.nodes.by_name.values())
    world.run_to_scores()


class SlowBuilds(World):
    """Building takes until the 20th tick: weights are staged long before."""

    def run_build(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.now >= 100:
            super().run_build(job, index, member)


def early_trials(world: World) -> int:
    """Trials that ran when the last task was planned and the queue was filled."""
    while world.queue is None:
        running = len(world.state.index.running)
        world.tick()
    return running


@pytest.mark.parametrize(
    ("limits", "early", "running"),
    [((8, 8), True, 4), ((8, 8), False, 0), ((8, None), True, 0), ((8, 0.5), True, 0)],
)
def test_trials_load_while_few_documents_are_built_where_no_gpu_is_held(
    limits: tuple[float | None, ...], early: bool, running: int
) -> None:
    """One for each lane. A GPU is held only to infer: without the option, no trial runs before the queue is filled."""
    world = SlowBuilds(1, Faults(), limited(limits, early_trials=early))
    assert early_trials(world) == running
    world.run_to_scores()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), entries=st.integers(1, 4), steal=st.booleans())
def test_early_trials_lose_no_work(seed: int, entries: int, steal: bool) -> None:
    """Whatever dies, fails or is forgotten meanwhile: every entry is scored, or says why not."""
    faults = Faults(kill=0.03, restart=0.05, wipe_queue=0.03, build_fails=0.2, slow_outcome=0.2, listing=0.1)
    world = World(seed, faults, limited([8] * entries, early_trials=True, steal=steal))
    world.run()
    assert all(e.status == "scored" or e.error for e in world.state.entries)
    world.assert_nothing_left()


def test_a_build_that_its_node_cannot_launch_is_made_on_another_after_a_pause() -> None:
    """It costs no attempt of its tasks, names no log, and the next job avoids the node."""
    world = Bad(1, Faults(), record(entries=3))
    world.bad = {"c1", "c2", "c3", "c4"}
    world.run_to_scores()
    builds = [j.job for j in world.jobs.values() if j.job.purpose == "build"]
    assert world.bad <= set(builds[-1].exclude) or not builds[-1].exclude
    assert world.paused == sorted(world.paused)
    assert any("could not launch" in w for w in world.state.warnings)


def test_where_no_node_can_launch_builds_the_tasks_fail_with_that_reason() -> None:
    world = Bad(1, Faults(), record(entries=3))
    world.bad = {f"c{i}" for i in range(60)}
    world.run()
    assert all("no node could launch its build job" in e.error for e in world.state.entries), world.summary()
    assert not any("log" in e.error for e in world.state.entries)
    assert world.now > 600.0


class Bad(World):
    """CPU nodes that cannot launch a job: Slurm ends it at once, and it has no log."""

    bad: frozenset[str] | set[str] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        self.ends: dict[str, str] = {}
        self.paused: list[float] = []
        super().__init__(*arguments)

    def run_build(self, job: FakeJob, index: int, member: FakeMember) -> None:
        left = sorted(self.bad - set(job.job.exclude))
        if not left:
            super().run_build(job, index, member)
            return
        self.ends[job.job.name] = left[0]
        self.paused.append(self.state.builds.due_at)
        member.word = "CANCELLED"
        self.end_member(job, index, member)

    def listing(self) -> list[JobState]:
        return [replace(row, node=self.ends.get(row.name)) for row in super().listing()]

    def began(self, job: Job, _index: int) -> bool:
        return job.name not in self.ends
