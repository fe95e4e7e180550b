"""Since when a score is worse: drops are dated, chance is no drop, and what was said stays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.decide.verdicts.series import ALPHA, MIN_CHECKPOINTS, cusum_heights, find_worse, yardsticks

LEVEL = ALPHA / 40 / 60  # of one of 40 tasks in 60 checkpoints


def drawn(rng, count, length, *, documents=0.5, rise=3.0, alike=0.0):
    """(scores, variances of paired differences): a rising curve with jitter; `documents`: their share of the variance;
    `alike`: correlation of neighbours' jitter.
    """
    curve = rise * (1 - np.exp(-np.arange(length) / 8))
    jitter = rng.normal(size=(count, length))
    for i in range(1, length if alike else 0):
        jitter[:, i] = alike * jitter[:, i - 1] + np.sqrt(1 - alike**2) * jitter[:, i]
    if alike:
        jitter = np.sqrt(1 - documents) * jitter + np.sqrt(documents) * rng.normal(size=(count, length))
    return curve + jitter, np.full((count, length), 2 * documents)


def test_a_lasting_drop_is_found_and_dated():
    """Law: of drops of two detectable differences most are found by the second checkpoint after, at the right one."""
    rng, found = np.random.default_rng(1), []
    for at in range(15, 45):
        values, documents = drawn(rng, 4, at + 3)
        values[:, at:] -= 2 * 2.8 * np.sqrt(2)
        for said in find_worse(values, documents, LEVEL):
            found.append(len(said) == 1 and said[0].found >= at)
            if found[-1]:
                assert said[0].low <= said[0].since <= said[0].high <= said[0].found
                assert abs(said[0].since - at) <= 1
                assert values[0, at - 8 : at].min() - 4 < said[0].mean < values[0, :at].max() + 4
    assert sum(found) / len(found) >= 0.8


@pytest.mark.parametrize(
    ("documents", "alike", "length", "horizon"),
    [(0.0, 0, 60, 60), (0.5, 0, 60, 60), (1.0, 0, 60, 60), (0.0, 0.6, 200, 100), (0.5, 0.6, 200, 100)],
)
def test_few_series_without_a_drop_are_ever_worse(documents, alike, length, horizon):
    """Law: up to twice the horizon at most ALPHA of the series say so by chance, whatever part of the scatter is documents',
    and where neighbours scatter alike by 0.6.
    """
    values, sampling = drawn(np.random.default_rng(2), 1000, length, documents=documents, alike=alike)
    assert (cusum_heights(values, sampling, ALPHA / horizon) > 1).any(-1).mean() <= ALPHA


def test_a_score_that_was_just_learnt_and_is_lost_is_worse_at_once():
    """Law: a steep rise is no scatter, so it hides no fall to where the score began."""
    rng = np.random.default_rng(3)
    steps, middle = np.arange(15), rng.uniform(5, 8, (100, 1))
    values = 0.9 / (1 + np.exp(-2 * (steps - middle))) + 0.02 * rng.normal(size=(100, 15))
    values[:, 12:] = 0.14 + 0.02 * rng.normal(size=(100, 3))
    said = find_worse(values, np.full((100, 15), 2 * 0.02**2), LEVEL)
    assert np.mean([any(one.found == one.since == 12 for one in its) for its in said]) >= 0.9


def test_a_small_drop_that_lasts_is_found_however_old_it_is():
    """Law: a drop of 3 standard deviations, too small for the first ten checkpoints after it, is found and dated later."""
    values, documents = drawn(np.random.default_rng(8), 40, 200)
    values[:, 80:] -= 3
    said = find_worse(values, documents, ALPHA / 60 / 100)
    assert np.mean([bool(one) for one in said]) >= 0.95
    assert max(one[0].found for one in said if one) > 90
    assert np.mean([one[0].low <= 80 <= one[0].high for one in said if one]) >= 0.8


def test_forty_documents_without_a_drop_are_never_worse():
    """Law: coarse scores, most of whose differences are 0, are no proof of a small scatter."""
    rng = np.random.default_rng(3)
    right = rng.random((200, 60, 40)) < np.where(rng.random((200, 1, 40)) < 0.9, 0.98, 0.5)
    values = right.mean(-1)
    flips = np.diff(right.astype(float), axis=1)
    sampling = np.concatenate([np.zeros((200, 1)), flips.var(-1, ddof=1) / 40], 1)
    assert (cusum_heights(values, sampling, LEVEL) > 1).sum() <= 1


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.integers(8, 30), st.floats(2, 30))
def test_a_later_checkpoint_changes_no_verdict(seed, at, drop):
    """Law: what a series says up to a checkpoint is what it said at that checkpoint."""
    values, documents = drawn(np.random.default_rng(seed), 1, 40)
    values[:, at:] -= drop
    (all_of_it,) = find_worse(values, documents, 1e-3)
    for length in (6, 9, 12, 20, 21, 22, 31):
        (then,) = find_worse(values[:, :length], documents[:, :length], 1e-3)
        assert then == [one for one in all_of_it if one.found < length]


def test_the_first_checkpoints_have_no_verdict():
    """Law: with fewer than FEWEST earlier checkpoints there is neither a verdict nor a yardstick, however far a score falls."""
    values = np.array([[0.5, 0.51, 0.5, 0.52, 0.51, 0.0, 0.0]])
    assert find_worse(values[:, :MIN_CHECKPOINTS], np.zeros((1, MIN_CHECKPOINTS)), LEVEL) == [[]]
    means, errors = yardsticks(values, np.zeros((1, 7)))
    assert np.isnan(means[0, :MIN_CHECKPOINTS]).all()
    assert np.isfinite((means[0, MIN_CHECKPOINTS], errors[0, MIN_CHECKPOINTS])).all()


def test_where_nothing_ever_differed_there_is_no_yardstick():
    """Law: equal scores without a known error prove nothing, so a first change is no verdict."""
    values = np.full((1, 20), 0.5)
    assert find_worse(values, np.zeros((1, 20)), LEVEL) == [[]]
    values[:, 12:] = 0.4
    assert find_worse(values, np.zeros((1, 20)), LEVEL) == [[]]


@settings(max_examples=8)
@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-50, 50))
def test_another_unit_says_the_same(seed, unit, shift):
    """Law: verdicts do not depend on the metric's unit or zero, and the yardstick has its unit."""
    values, documents = drawn(np.random.default_rng(seed), 1, 25)
    values[:, 18:] -= 9
    one, other = (
        yardsticks(v, d)[1] for v, d in ((values, documents), (unit * values + shift, unit**2 * documents))
    )
    assert other == pytest.approx(unit * one, rel=1e-5, nan_ok=True)
    said, again = (
        find_worse(values, documents, LEVEL),
        find_worse(unit * values + shift, unit**2 * documents, LEVEL),
    )
    assert [(v.found, v.since, v.low, v.high) for v in said[0]] == [
        (v.found, v.since, v.low, v.high) for v in again[0]
    ]


def test_the_yardstick_holds_both_variances():
    """Law: never below the documents' error; a tenfold jitter of checkpoints shows in it, a straight trend does not."""
    rng = np.random.default_rng(5)
    values, documents = drawn(rng, 200, 40, documents=1.0, rise=0)
    for more, factor in ((0.0, 1.0), (9.0, 81.0)):
        errors = yardsticks(values + more * rng.normal(size=values.shape), documents)[1][:, 30:]
        assert (errors >= np.sqrt(2) - 1e-9).all()
        assert np.median(errors) == pytest.approx(np.sqrt(2 * (1 + factor)) if more else np.sqrt(2), rel=0.25)
    trend = 100 * np.arange(40.0)
    assert yardsticks(values + trend, documents)[1] == pytest.approx(
        yardsticks(values, documents)[1], rel=1e-6, nan_ok=True
    )


def test_after_a_verdict_a_series_begins_anew():
    """Law: a second drop is found, too, once FEWEST checkpoints have passed since the first."""
    values, documents = drawn(np.random.default_rng(6), 1, 60)
    values[:, 20:] -= 15
    values[:, 45:] -= 15
    assert [v.since for v in find_worse(values, documents, LEVEL)[0]] == [20, 45]
