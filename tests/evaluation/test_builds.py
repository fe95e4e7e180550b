"""How many jobs build the request sets of a suite."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World

FEW, MANY = st.sampled_from([1, 8, 100]), st.sampled_from([None, 101, 0.5])


@given(few=st.lists(FEW, max_size=4), many=st.lists(MANY, max_size=4), jobs=st.integers(1, 5))
def test_entries_with_few_documents_share_one_build_job(
    few: list[int], many: list[float | None], jobs: int
) -> None:
    """Each other entry has a job of its own, up to the setting. Every entry is in exactly one job."""
    assume(few or many)
    limits = [*few, *many]
    made = record(entries=len(limits), build_jobs=jobs)
    tasks = [t.model_copy(update={"limit": n}) for t, n in zip(made.suite.tasks, limits, strict=True)]
    suite = made.suite.model_copy(update={"tasks": tuple(tasks)})
    world = World(1, Faults(), made.model_copy(update={"suite": suite}))
    world.tick()
    built = [info.entries for info in world.state.live_jobs("build")]
    assert len(built) == min(jobs, len(many) + bool(few))
    assert sorted(index for entries in built for index in entries) == list(range(len(limits)))
