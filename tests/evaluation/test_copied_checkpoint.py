"""Answers for a checkpoint with equal samples: used once a precursor has said that its content is equal, too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World, replay

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import nodes
from evaljobs.contract.outcomes import Staged


class Copied(World):
    """Earlier answers are of a checkpoint with equal samples and other content. `hashes`: precursors say the content."""

    hashes = True

    def effect(self, action: do.Action) -> list[ev.AnyEvent]:
        if isinstance(action, do.FindResponses):
            return [ev.ResponsesFound(at=self.now, alike=self.state.nodes.content is None)]
        return super().effect(action)

    def leave(self, outcome: Any) -> None:
        if isinstance(outcome, Staged) and self.hashes:
            outcome = outcome.model_copy(update={"content": "c"})
        super().leave(outcome)

    def searches(self) -> list[bool]:
        """Of each search for answers, whether the content was unknown."""
        return [e.alike for e in self.journal if isinstance(e, ev.ResponsesFound)]


def first_trial(world: World) -> int:
    return next(
        place
        for place, event in enumerate(world.journal)
        if isinstance(event, ev.JobIntended) and event.job.purpose == "trial"
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_trial_starts_before_answers_were_sought_with_the_content(seed: int) -> None:
    """Once more where the requests were built before the first copy was whole."""
    world = Copied(seed, Faults())
    world.run_to_scores()
    assert world.searches() in ([True, False], [False])
    last = max(i for i, e in enumerate(world.journal) if isinstance(e, ev.ResponsesFound))
    staged = min(
        i for i, e in enumerate(world.journal) if isinstance(e, ev.OutcomeSeen) and e.outcome.kind == "staged"
    )
    assert staged < last < first_trial(world)


@pytest.mark.parametrize("stage", [True, False])
def test_an_evaluation_whose_content_no_precursor_says_is_planned_all_the_same(stage: bool) -> None:
    """Staging is off, or every precursor fails and trials read storage."""
    world = Copied(1, Faults(stage_fails=float(stage)), record(stage=stage))
    world.run_to_scores()
    assert world.searches() == [True]


def test_hosts_stage_while_they_hold_gpus_and_are_not_waited_for() -> None:
    assert nodes.content_to_come(World(1, Faults()).state)
    assert not nodes.content_to_come(World(1, Faults(), record(host_trials=True)).state)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3), hashes=st.booleans())
def test_waiting_for_the_content_ends_whatever_dies(seed: int, count: int, hashes: bool) -> None:
    """Killed precursors, restarts and late news: everything is scored, and a replay gives the same state."""
    faults = Faults(
        kill=0.01, submit_lost=0.05, restart=0.05, node_down=0.01, stage_fails=0.3, slow_outcome=0.3
    )
    world = Copied(seed, faults, nodes=count)
    world.hashes = hashes
    world.run()
    lost = [e for e in world.state.entries if e.status != "scored"]
    assert not lost or world.state.ending.reason or any("times" in e.error for e in lost), world.summary()
    world.assert_nothing_left()
    assert replay(world.journal) == world.state
