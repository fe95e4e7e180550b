"""Paired comparison: its numbers are scipy's and those of small examples by hand; its verdicts keep their error rate."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coordinator.verdicts.paired import FEW, paired, verdicts

RNG = np.random.default_rng(7)


def values(count, correlation=0.7):
    before = RNG.normal(size=count)
    return before, correlation * before + math.sqrt(1 - correlation**2) * RNG.normal(size=count)


@pytest.mark.parametrize("count", [20, 57, 500])
def test_without_clusters_it_is_the_paired_t_test(count):
    """Law: from FEW documents on, p and interval are those of scipy's paired t test, for any values."""
    for _ in range(50):
        before, after = values(count)
        found, known = paired(before, after), stats.ttest_rel(after, before)
        interval = known.confidence_interval(0.95)
        assert found.test == "paired t"
        assert found.p == pytest.approx(known.pvalue, abs=1e-9)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_equal_clusters_are_tested_by_their_means():
    """Law: CR1 over clusters of one size is the t test of the clusters' means, with as many degrees of freedom."""
    for size, clusters in ((2, 30), (7, 100)):
        before, after = values(size * clusters)
        names = np.arange(size * clusters) % clusters
        means = [(after - before)[names == g].mean() for g in range(clusters)]
        found = paired(before, after, names)
        assert (found.test, found.clusters) == ("clustered t", clusters)
        assert found.p == pytest.approx(stats.ttest_1samp(means, 0.0).pvalue, abs=1e-9)
        assert found.stderr == pytest.approx(stats.sem(means), abs=1e-12)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8))
def test_few_documents_are_tested_by_all_their_signs(differences):
    """Law: below FEW, p is the share of all 2^n signs whose sum is as far from 0 as the one seen."""
    seen = abs(sum(differences))
    sums = [abs(sum(map(math.prod, zip(differences, signs, strict=True))))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    found = paired(np.zeros(len(differences)), np.array(differences, dtype=float))
    assert len(differences) < FEW
    assert found.test == "signs"
    assert found.p == pytest.approx(sum(s >= seen for s in sums) / len(sums), abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0))), min_size=2, max_size=60))
def test_the_other_way_round_it_says_the_opposite(pairs):
    """Law: exchanged checkpoints give the opposite difference and flips, the same p, and the opposite verdict."""
    before, after = np.array(pairs).T
    one, other = paired(before, after), paired(after, before)
    assert (one.difference, one.p, one.mcnemar) == pytest.approx((-other.difference, other.p, other.mcnemar))
    assert (one.gained, one.lost) == (other.lost, other.gained)
    opposite = {"better": "worse", "worse": "better", "no evidence": "no evidence"}
    assert verdicts([(one, True)])[0][0] == opposite[verdicts([(other, True)])[0][0]]
    assert verdicts([(one, True)])[0][0] == opposite[verdicts([(one, False)])[0][0]]


def test_verdicts_are_corrected_for_their_number():
    """Law: one p of 0.03 is a verdict; among 40 scores without an effect it is none (Benjamini-Hochberg by scipy)."""
    one = paired(np.zeros(100), np.array([1.0] * 62 + [-1.0] * 38) * 0.1)
    assert 0.01 < one.p < 0.05
    none = paired(np.zeros(100), np.array([1.0, -1.0] * 50))
    assert verdicts([(one, True)])[0][0] == "better"
    said = verdicts([(one, True)] + [(none, True)] * 39)
    assert {verdict for verdict, _ in said} == {"no evidence"}
    assert [p for _, p in said] == pytest.approx(stats.false_discovery_control([one.p] + [none.p] * 39))


def test_nothing_that_could_be_compared_gives_no_comparison():
    """Law: one document, or one cluster, says nothing; equal documents are no evidence, and no effect could be named."""
    assert paired(np.array([0.0]), np.array([1.0])) is None
    assert paired(np.zeros(30), np.ones(30), ["a"] * 30) is None
    equal = paired(np.ones(30), np.ones(30))
    assert (equal.p, equal.detectable, equal.gained) == (1.0, None, 0)


@pytest.mark.parametrize(
    ("clusters", "lowest", "highest"), [(None, 0.02, 0.08), (120, 0.02, 0.08), (12, 0.01, 0.085)]
)
def test_without_an_effect_one_in_twenty_is_rejected(clusters, lowest, highest):
    """Law: 400 drawn pairs without an effect are rejected at about 5 %, also where documents of a cluster move together."""
    rng, rejected = np.random.default_rng(1), 0
    for _ in range(400):
        names = None if clusters is None else rng.integers(0, clusters, 600)
        shared = 0.0 if names is None else rng.normal(size=clusters)[names]
        rejected += paired(np.zeros(600), rng.normal(size=600) + shared, names).p < 0.05
    assert lowest <= rejected / 400 <= highest
