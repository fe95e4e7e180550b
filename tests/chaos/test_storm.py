"""When the storm of `scripts/chaos daemon` strikes."""

from __future__ import annotations

from itertools import pairwise

from chaos_lib.faults import FAULTS, GAP_S, schedule
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), minutes=st.floats(0.5, 30))
def test_the_seed_says_when_and_which_and_no_fault_comes_again_before_all_have(
    seed: int, minutes: float
) -> None:
    """In order, within the time, at the gaps; every hand of faults is all of them."""
    plan = schedule(seed, 60 * minutes, list(FAULTS))
    assert plan == schedule(seed, 60 * minutes, list(reversed(FAULTS)))
    times = [at for at, _ in plan]
    assert all(GAP_S[0] <= b - a <= GAP_S[1] for a, b in pairwise([0.0, *times]))
    assert not times or times[-1] < 60 * minutes
    hand = len(FAULTS)
    for begin in range(0, len(plan), hand):
        names = [name for _, name in plan[begin : begin + hand]]
        assert len(set(names)) == len(names)
