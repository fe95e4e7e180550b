"""Laws of screening: which documents are asked first, and what those asked say of all."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from coordinator.decide.verdicts import screening
from coordinator.decide.verdicts.screening import (
    WORST_FLIPS,
    asking_order,
    detectable_change,
    documents_needed,
    judge_screening,
)
from evaljobs.contract.specs import ScreenOptions

TWO_POINTS = ScreenOptions(max_drop=0.02)
STRATA = st.lists(st.sampled_from("abcde"), min_size=1, max_size=200)


def flips(count, share, change):
    """Differences of `count` documents of which `share` differ, in no order."""
    gained, lost = round(count * (share + change) / 2), round(count * (share - change) / 2)
    return np.repeat([1.0, -1.0, 0.0], [gained, lost, count - gained - lost])


@given(STRATA, st.integers(0, 2**40))
def test_the_order_is_a_permutation_that_the_seed_fixes(strata, seed):
    order = asking_order(strata, seed)
    assert sorted(order) == list(range(len(strata)))
    assert order == asking_order(list(strata), seed)


def test_the_order_is_the_same_on_each_machine_and_another_with_another_seed():
    strata = [number % 3 for number in range(12)]
    assert asking_order(strata, 1) == [4, 11, 9, 1, 2, 0, 7, 5, 6, 10, 8, 3]
    assert asking_order(strata, 1) != asking_order(strata, 2)


@given(STRATA, st.integers(0, 2**40))
def test_each_prefix_has_nearly_its_share_of_each_stratum(strata, seed):
    order, count = asking_order(strata, seed), len(strata)
    for stratum in set(strata):
        share = strata.count(stratum) / count
        seen = np.cumsum([strata[number] == stratum for number in order])
        off = np.abs(seen - share * np.arange(1, count + 1)).max()
        assert off <= 1 + len(set(strata)) * share


def test_each_document_is_in_a_prefix_as_often_as_any_other():
    strata, asked = [0] * 10 + [1] * 80 + [*range(2, 12)], np.zeros(100)
    for seed in range(2000):
        asked[asking_order(strata, seed)[:40]] += 1
    assert np.abs(asked / 2000 - 0.4).max() < 5 * math.sqrt(0.4 * 0.6 / 2000)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=300), st.sampled_from([0.005, 0.02, 0.1])
)
def test_a_whole_set_is_exact(values, max_drop):
    said = judge_screening(np.array(values), len(values), ScreenOptions(max_drop=max_drop))
    assert said.low == said.high == said.difference == pytest.approx(np.mean(values))
    assert said.is_settled
    assert (said.verdict == "not worse") == (said.difference >= -max_drop)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=100), st.integers(1, 5000))
def test_the_interval_is_symmetric_and_stays_open_to_the_documents_left(values, left):
    some = np.array(values)
    one, other = (judge_screening(sign * some, len(values) + left, TWO_POINTS) for sign in (1, -1))
    assert (one.low, one.high, one.difference) == pytest.approx((-other.high, -other.low, -other.difference))
    assert one.low < one.difference < one.high


def test_more_documents_and_fewer_looks_make_a_narrower_interval():
    some = np.random.default_rng(1).permutation(flips(5000, 0.1, 0.0))

    def width(asked, apart=1):
        said = judge_screening(some[:asked], 5000, TWO_POINTS, apart=apart)
        return said.high - said.low

    widths = [width(asked) for asked in (50, 200, 1000, 2500, 4900, 5000)]
    assert widths == sorted(widths, reverse=True)
    assert width(1000, apart=250) < width(1000, apart=50) < width(1000)


@pytest.mark.parametrize("size", [50.0, 800.0, 20_000.0])
def test_the_edge_is_where_the_normal_mixture_is_one_in_alpha(size):
    """Ville: the mixture of exp(l S - l^2 v / 2) over normal l is a martingale, which exceeds 20 with probability 1/20."""
    sharpest, alpha = 900.0, 0.05
    edge = screening._reach(size, size, alpha, sharpest) * size
    wide = math.log(1 / alpha**2)
    prior = sharpest / (wide + math.log(1 + wide))
    spread = 1 / math.sqrt(prior)
    mixture, _ = integrate.quad(
        lambda tilt: math.exp(tilt * edge - tilt**2 * size / 2) * stats.norm.pdf(tilt, 0, spread),
        edge / size - 12 / math.sqrt(size),
        edge / size + 12 / math.sqrt(size),
        epsabs=1e-10,
    )
    assert mixture == pytest.approx(1 / alpha, rel=1e-5)


def test_the_sequence_is_sharpest_where_it_is_told_to_be():
    def above_fixed(sharpest):
        return screening._reach(1000.0, 1000.0, 0.05, sharpest)

    best = optimize.minimize_scalar(lambda log: above_fixed(math.exp(log)), bounds=(0, 15), method="bounded")
    assert math.exp(best.x) == pytest.approx(1000, rel=0.15)


def verdicts(values, looks, draws, question=TWO_POINTS, seed=1):
    """(first verdict that is not open, is each interval over the truth?, documents asked) of `draws` orders."""
    rng, count = np.random.default_rng(seed), len(values)
    apart, found = math.ceil(count / looks), []
    for _ in range(draws):
        some = rng.permutation(values)
        said = [
            judge_screening(some[:asked], count, question, apart=apart)
            for asked in [*range(apart, count, apart), count]
        ]
        first = next((one for one in said if one.verdict != "open"), said[-1])
        held = all(one.low - 1e-12 <= values.mean() <= one.high + 1e-12 for one in said)
        found.append((first.verdict, held, first.asked))
    return found


@pytest.mark.parametrize(("change", "false"), [(-0.0215, "not worse"), (-0.0185, "worse")])
def test_a_verdict_at_the_edge_is_false_no_more_often_than_its_level(change, false):
    found = verdicts(flips(2000, 0.12, change), 20, 400)
    assert sum(verdict == false for verdict, *_ in found) <= stats.binom.ppf(0.99, 400, 0.05)


def test_all_intervals_together_hold_the_truth_as_often_as_said():
    found = verdicts(flips(3000, 0.15, -0.01), 30, 400, seed=3)
    assert stats.binom.ppf(0.005, 400, 0.95) <= sum(held for _, held, _ in found) <= 0.99 * 400


def test_where_nothing_changed_a_large_set_is_asked_in_part_and_a_small_one_is_not_called_worse():
    large = verdicts(flips(8000, 0.1, 0.0), 40, 40)
    assert {verdict for verdict, *_ in large} == {"not worse"}
    assert np.mean([asked for *_, asked in large]) < 0.3 * 8000
    rng = np.random.default_rng(2)
    drawn = [rng.choice([-1.0, 0.0, 1.0], 164, p=[0.06, 0.88, 0.06]) for _ in range(300)]
    worse = sum(judge_screening(one, 164, TWO_POINTS).verdict == "worse" for one in drawn)
    assert worse <= stats.binom.ppf(0.99, 300, 0.05)


def test_documents_that_agree_so_far_are_not_told_to_agree_for_ever():
    """1 % of documents are lost, all of them at the end of the order: the first hundreds do not settle 0.5 %."""
    said = judge_screening(np.zeros(150), 10_000, ScreenOptions(max_drop=0.005))
    assert said.verdict == "open"
    assert said.low < -0.01


def test_clusters_that_move_together_are_no_evidence_of_a_drop():
    """Ten of 300 documents are lost: beyond chance one by one, and not if they are one passage."""
    values, one_passage = np.zeros(300), np.arange(300)
    values[:10], one_passage[:10] = -1, 0
    assert judge_screening(values, 300, TWO_POINTS).verdict == "worse"
    assert judge_screening(values, 300, TWO_POINTS, clusters=one_passage).verdict == "open"


@pytest.mark.parametrize("bad", [{"max_drop": 0}, {"max_drop": -1}, {"level": 0.6}, {"power": 1}])
def test_a_question_that_has_no_answer_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ScreenOptions(**{"max_drop": 0.01, **bad})


def test_more_differences_than_documents_are_refused():
    with pytest.raises(ValueError, match="11 differences of 10 documents"):
        judge_screening(np.zeros(11), 10, TWO_POINTS)
    assert judge_screening(np.zeros(0), 10, TWO_POINTS).verdict == "open"


@pytest.mark.parametrize("share", [0.05, 0.2, WORST_FLIPS])
@pytest.mark.parametrize("change", [0.01, 0.04])
def test_documents_needed_are_those_of_the_normal_power_of_mcnemars_test(change, share):
    """Connor (1987): root-finding on the power of the score test with the variance of the alternative."""

    def power(count):
        error = math.sqrt((share - change**2) / count)
        return stats.norm.sf(stats.norm.isf(0.025) - change / error)

    needed = documents_needed(change, share)
    assert needed == pytest.approx(optimize.brentq(lambda count: power(count) - 0.8, 2, 1e7), rel=1e-9)
    assert detectable_change(round(needed), share) == pytest.approx(change, rel=1e-3)


def test_documents_needed_find_the_change_as_often_as_said():
    rng = np.random.default_rng(5)
    count = round(documents_needed(0.03, 0.15))
    draws = rng.multinomial(count, [0.09, 0.06, 0.85], 4000)
    change = (draws[:, 0] - draws[:, 1]) / count
    errors = np.sqrt(((draws[:, 0] + draws[:, 1]) / count - change**2) / (count - 1))
    assert np.mean(np.abs(change / errors) > stats.norm.isf(0.025)) == pytest.approx(0.8, abs=0.025)


@settings(max_examples=50)
@given(st.floats(0.001, 0.3), st.floats(0.001, 0.5), st.floats(0.5, 0.98))
def test_smaller_changes_more_flips_and_more_power_need_more_documents(change, share, power):
    needed = documents_needed(change, share, power=power)
    assert needed <= documents_needed(change, share, power=power + 0.01)
    assert needed <= documents_needed(change, share * 1.1, power=power)
    assert needed <= documents_needed(change / 1.1, share, power=power)
    assert detectable_change(200, share) >= detectable_change(220, share)
