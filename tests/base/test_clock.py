"""A clock that jumps an hour, either way, changes nothing that the coordinator does."""

from __future__ import annotations

import time

import pytest
from support.simulated.parts import Faults
from support.simulated.world import World

from coordinator.base import clock
from coordinator.base.throttle import Throttle


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_set_clock_makes_nothing_due_sooner_or_later(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """What is done every ten seconds is neither done at once nor in an hour."""
    throttle, wall = Throttle(), time.time
    assert throttle.due("jobs", 10.0, clock.now())
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert not throttle.due("jobs", 10.0, clock.now())
    assert throttle.due("jobs", 10.0, clock.now() + 10.0)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_coordinator_that_returns_an_hour_earlier_or_later_finishes(jump: float) -> None:
    """Restarted in the middle of its inference with another time of day, an evaluation waits for no hour to pass."""
    world = World(5, Faults(submit_timeout=0.3, vanish=0.3))
    while not world.claims:
        world.tick()
    before = world.now
    world.now += jump
    world.restart()
    world.run_to_scores()
    assert world.now - (before + jump) < 1800


def test_what_follows_a_journal_is_not_before_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started after the machine's clock was set back, it goes on where the journal ends; the past changes nothing."""
    monkeypatch.setattr(clock, "_start", clock._start)
    later = clock.now() + 3600.0
    clock.not_before(later)
    assert later <= clock.now() < later + 60.0
    clock.not_before(later - 7200.0)
    assert clock.now() >= later
