"""A coordinator killed between two events: its successor says again whatever may not have been heard."""

from __future__ import annotations

import pytest
from support.simulated.parts import SITE, Faults
from support.simulated.world import World, replay

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine


@pytest.mark.parametrize("seed", range(6))
def test_after_any_event_a_restart_repeats_what_ends_jobs(seed: int) -> None:
    """A holder that was to be released is told so, and workers whose work is over; else they would be waited for."""
    world = World(seed, Faults(slow_outcome=0.2))
    world.run()
    said = 0
    for end in range(1, len(world.journal)):
        state = replay(world.journal[:end])
        released = {i.job.name for i in state.live_jobs("stage") if i.released_at is not None}
        over = all(e.terminal for e in state.entries) and state.ended_at is None
        actions = machine.step(state, SITE, ev.Restarted(at=1e6)).actions
        told = {a.job for a in actions if isinstance(a, do.ReleasePrecursor)}
        assert released <= told, f"after event {end}"
        if over:
            assert any(isinstance(a, do.StopWorkers) for a in actions), f"after event {end}"
            assert told == {i.job.name for i in state.live_jobs("stage")}
        said += len(released)
    assert said, "no moment between a release and its end"
