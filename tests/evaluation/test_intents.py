"""Jobs are decided once: what the journal says of them stands, whatever the rules would decide today."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import SITE, Faults
from support.simulated.world import World, replay

from coordinator.evaluation import events as ev
from coordinator.evaluation import job_specs, nodes, step, time_limits
from coordinator.evaluation.records import JobName
from coordinator.evaluation.state import IllegalEventError
from evaljobs.contract.names import LaneId, ShardId
from evaljobs.contract.specs import FrameRef

FAULTS = Faults(kill=0.02, submit_timeout=0.05, stage_fails=0.1, overrun=0.05, slow_outcome=0.2)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), ticks=st.integers(1, 60))
def test_a_journal_gives_the_same_jobs_under_other_rules(seed: int, ticks: int) -> None:
    """With other time limits, memory and attempt rules: the same names, nodes, trials and resources."""
    world = World(seed, FAULTS)
    for _ in range(ticks):
        if world.state.ended_at is None:
            world.tick()
    with (
        mock.patch.multiple(job_specs, MIB=1),
        mock.patch.multiple(time_limits, SHORTEST_LIMIT_SECONDS=7, ENDING_SECONDS=1),
        mock.patch.object(nodes, "MAX_PRECURSORS", 1),
    ):
        again = replay(world.journal)
    assert {n: (i.job, i.trials) for n, i in again.jobs.by_name.items()} == {
        n: (i.job, i.trials) for n, i in world.state.jobs.by_name.items()
    }


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_jobs_whose_intents_were_not_written_are_decided_anew(seed: int) -> None:
    """The process dies between an event and its intents: after a restart the same jobs are intended."""
    world = World(seed, Faults(slow_outcome=0.2))
    world.run()
    for place, event in enumerate(world.journal):
        if isinstance(event, ev.JobIntended) and not isinstance(world.journal[place - 1], ev.JobIntended):
            state = replay(world.journal[:place])
            found = step.step(state, SITE, ev.Restarted(at=event.at)).intents
            assert event.job.name in {intent.job.name for intent in found}


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_an_evaluation_ends_wherever_its_coordinator_died_in_a_write(seed: int) -> None:
    """A part of what an event decided is in the journal, also that a task has failed: no entry is left without a job."""
    world = World(seed, Faults(torn=0.3, metric_fails=0.5, kill=0.02, slow_outcome=0.2))
    world.run()
    world.assert_nothing_left()


def test_an_illegal_event_changes_nothing() -> None:
    """Also where only its last part is illegal."""
    world = World(1, Faults())
    for _ in range(50):
        if not world.claims:
            world.tick()
    before = copy.deepcopy(world.state)
    frame = FrameRef(file="t.frames", offset=0, length=1)
    shards = ((next(iter(world.claims)), frame), ("no such|0|1", frame))
    with pytest.raises(IllegalEventError):
        step.step(world.state, SITE, ev.ShardsDumped(at=world.now, shards=shards))
    assert world.state == before


@given(
    task=st.text(min_size=1),
    first=st.integers(0),
    end=st.integers(0),
    cut=st.sampled_from(["", "4", "fast-8192-8"]),
    node=st.text(),
    number=st.integers(0),
)
def test_names_of_shards_and_lanes_are_read_back(
    *, task: str, first: int, end: int, cut: str, node: str, number: int
) -> None:
    """Whatever stands in them."""
    assert ShardId.parse(str(ShardId(task, first, end, cut))) == ShardId(task, first, end, cut)
    assert LaneId.parse(str(LaneId(node, number))) == LaneId(node, number)


@given(
    kind=st.sampled_from(["build", "stage", "trial", "metric"]),
    detail=st.text(min_size=1),
    attempt=st.integers(0),
)
def test_names_of_jobs_are_read_back(kind: str, detail: str, attempt: int) -> None:
    """Whatever node or task they are for."""
    name = JobName.of("step-1-suite-12345678", kind, detail, attempt)
    assert JobName.parse(str(name)) == name
