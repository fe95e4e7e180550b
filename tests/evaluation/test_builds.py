"""How many jobs build the request sets of a suite, and which trials load meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.simulated.parts import Faults, ended, limited
from support.simulated.world import World

from coordinator.evaluation.job_ends import MAX_DEATHS
from evaljobs.contract.names import LaneId

FEW, MANY = st.sampled_from([1, 8, 100]), st.sampled_from([None, 101, 0.5])


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
    world = World(1, rec=limited([100] * 4, groups=True, build_jobs=4, early_trials=True), builds_from=100.0)
    world.tick()
    assert len(world.state.live_jobs("build")) == 4
    assert early_trials(world) == 0


def test_a_trial_that_gave_up_waiting_for_request_sets_costs_its_node_nothing() -> None:
    """However many do: there was no queue yet, and another waits in its place."""
    world = World(1, rec=limited([8, 8], early_trials=True), builds_from=100.0)
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
    assert gone > MAX_DEATHS
    assert world.state.trials.deaths == 0
    assert all(node.deaths == 0 for node in world.state.nodes.by_name.values())
    world.run_to_scores()


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
    world = World(1, rec=limited(limits, early_trials=early), builds_from=100.0)
    assert early_trials(world) == running
    world.run_to_scores()
