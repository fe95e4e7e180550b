"""Who is a straggler: a rule on numbers alone."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.allocation.stragglers import (
    LEAST_SECONDS,
    LEAST_SHARDS,
    LEAST_SIGMA,
    SIGMAS,
    Pace,
    stragglers,
)

SIGMA = st.floats(0.0, 0.5)
# so many times as long as predicted, each of the others
OTHERS = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=30)


def pace(times: float, predicted: float = 1e5) -> Pace:
    return Pace(took=times * predicted, predicted=predicted, shards=5)


def paces(others: list[float], **named: float) -> dict[str, Pace]:
    return {f"t{i}": pace(times) for i, times in enumerate(others)} | {t: pace(x) for t, x in named.items()}


@given(others=OTHERS, prior=st.floats(0.01, 100.0), sigma=SIGMA, slow=st.floats(1.0, 50.0))
def test_a_prior_that_is_off_for_all_names_no_trial(others, prior, sigma, slow):
    """What all trials take is multiplied by the same: the same ones are stragglers, by the same factor."""
    one = stragglers(paces(others, slow=slow), sigma)
    scaled = stragglers(paces([x * prior for x in others], slow=slow * prior), sigma)
    assert one.keys() == scaled.keys()
    assert all(scaled[t] == pytest.approx(one[t]) for t in one)


@given(others=st.lists(st.floats(0.95, 1.05), min_size=3, max_size=30), sigma=SIGMA)
def test_one_that_is_slower_by_more_than_three_sigma_is_named(others, sigma):
    """Above the spread by a tenth it is named with its factor, below it is not; the others never are."""
    limit = exp(SIGMAS * max(sigma, LEAST_SIGMA))
    # of 0.05 on both sides, the others' own spread is below the least that counts
    found = stragglers(paces(others, slow=1.2 * limit), sigma)
    assert found.keys() == {"slow"}
    assert found["slow"] == pytest.approx(1.2 * limit, rel=0.06)
    assert not stragglers(paces(others, slow=0.9 * limit), sigma)


@given(others=OTHERS, sigma=SIGMA, slow=st.floats(0.1, 100.0))
def test_stragglers_are_few_and_the_slowest(others, sigma, slow):
    """Never half of the trials, and no trial that is not named is slower than one that is."""
    all_ = paces(others, slow=slow)
    found = stragglers(all_, sigma)
    assert 2 * len(found) < len(all_) + 1
    rest = [p.log for t, p in all_.items() if t not in found]
    assert all(all_[t].log >= max(rest) for t in found)


@given(slow=st.floats(1.0, 1000.0))
def test_little_evidence_names_no_trial(slow):
    """One shard, or seconds that are noise, or too few others to compare with."""
    assert not stragglers(paces([1.0] * 2, slow=slow), 0.1)
    one = Pace(took=slow * 1000, predicted=1000.0, shards=LEAST_SHARDS - 1)
    assert not stragglers(paces([1.0] * 9) | {"slow": one}, 0.1)
    short = Pace(took=LEAST_SECONDS / 2, predicted=LEAST_SECONDS / 2 / slow, shards=9)
    assert not stragglers(paces([1.0] * 9) | {"slow": short}, 0.1)


@given(elapsed=st.floats(0, 1000), predicted=st.floats(0.1, 1000), done=st.integers(0, 8))
def test_a_claimed_shard_counts_only_against_its_trial(elapsed, predicted, done):
    """It never makes a trial look faster than the shards that it has done, and counts what must be over by now."""
    before = pace(1.0)
    after = before.and_in_hand(elapsed, predicted, done, 8)
    assert after.log >= before.log
    late = elapsed > predicted * min(1.0, (done + 1) / 8)
    assert (after.shards == before.shards + 1) == late
