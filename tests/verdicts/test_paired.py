"""Paired comparison: its numbers are scipy's and those of small examples by hand; its verdicts keep their error rate; which
scores have one, and what a gate's rules make of them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coordinator.errors import OperatorError
from coordinator.report.comparisons import comparison
from coordinator.report.verdicts import add_verdicts
from coordinator.verdicts.gate import Policy, judge, outcome_of
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


# --- which scores have a verdict, and why another has none -----------------------------------------------------------


def results(score, requests="r", scoring="s", mode="exact", task="sums"):
    """results.json of an evaluation with one task, in a group of its own."""
    return {
        "results": {task: {"acc,none": score}},
        "groups": {"all": {"acc,none": score}},
        "group_subtasks": {"all": [task]},
        "higher_is_better": {task: {"acc": True}},
        "n-samples": {task: {"effective": 100}},
        "evalspan": {
            "mode": mode,
            "keys": {task: {"asks": requests, "requests": requests, "score": scoring}},
        },
    }


def documents(right, count=100):
    values = np.zeros(count)
    values[:right] = 1.0
    return {
        "doc_id": np.arange(count),
        "doc_hash": np.array([str(i) for i in range(count)]),
        "acc,none": values,
    }


@pytest.mark.parametrize(
    ("other", "columns", "mixed", "verdict"),
    [
        (results(0.3), documents(30), False, "worse"),
        (results(0.7), documents(70), False, "better"),
        (results(0.49), documents(49), False, "no evidence"),
        (results(0.3, requests="x"), documents(30), True, "not comparable: asked with other prompts or settings"),
        (results(0.3, scoring="x"), documents(30), True, "not comparable: scored in another way"),
        (results(0.3, mode="fast"), documents(30), False, "not comparable: computed in another mode; --mixed compares them all the same"),
        (results(0.3, mode="fast"), documents(30), True, "worse"),
        (results(0.3), None, False, "not comparable: its samples were removed"),
        (results(7.3), documents(30), False, "not comparable: its score is no mean of its documents"),
        (results(0.3, task="others"), None, False, "not comparable: one has no score"),
    ],
)  # fmt: skip
def test_a_score_has_a_verdict_or_the_reason_why_not(other, columns, mixed, verdict):
    """Law: equal requests and scoring over the same documents, a mean of them, one mode (or --mixed): else the reason."""
    rows = comparison([results(0.5), other])
    add_verdicts(rows, lambda i, _task: columns if i else documents(50), mixed=mixed)
    row = next(r for r in rows if r["task"] == "sums")
    assert row["verdicts"][0]["words"].startswith(verdict)


def test_a_group_has_no_verdict_of_its_own():
    """Law: the correction counts leaf tasks alone, so a group names its tasks."""
    rows = comparison([results(0.5), results(0.3)])
    add_verdicts(rows, lambda i, _task: documents(30 if i else 50))
    assert [r["verdicts"][0]["verdict"] for r in rows if r["task"] == "all"] == ["not comparable"]


def test_documents_that_changed_are_left_out():
    """Law: pairs are documents of equal number and content."""
    before, after = documents(50), documents(30)
    after["doc_hash"] = np.array(["changed"] * 10 + [str(i) for i in range(10, 100)])
    rows = comparison([results(0.5), results(0.3)])
    add_verdicts(rows, lambda i, _task: after if i else before)
    (found,) = [r["verdicts"][0] for r in rows if r["task"] == "sums"]
    assert (found["documents"], found["lost"], found["gained"]) == (90, 20, 0)


# --- a gate's rules --------------------------------------------------------------------------------------------------


def row(
    task, before, after, stderr=0.01, *, documents=400, higher=True, leaves=(), metric="acc,none", why=""
):
    verdict = {"difference": after - before, "stderr": stderr, "documents": documents, "clusters": None}
    return {"task": task, "metric": metric, "values": [before, after], "documents": [documents, documents],
            "higher_is_better": higher, "leaves": list(leaves), "verdicts": [{"why": why} if why else verdict]}  # fmt: skip


def said(rows, **rule):
    return outcome_of(judge(Policy.model_validate({"rule": [rule]}), rows))


@pytest.mark.parametrize(
    ("rows", "rule", "outcome"),
    [
        ([row("a", 0.5, 0.5)], {"max_drop": 0.02}, "pass"),  # 0 ± 0.0165
        ([row("a", 0.5, 0.49)], {"max_drop": 0.02}, "undecidable"),
        ([row("a", 0.5, 0.45)], {"max_drop": 0.02}, "regression"),
        ([row("a", 0.5, 0.49)], {"max_drop": 0.02, "confidence": 0.8}, "pass"),
        ([row("a", 9.0, 9.5, 0.1, higher=False)], {"max_drop": 0.2}, "regression"),  # perplexity rises
        ([row("a", 9.5, 9.0, 0.1, higher=False)], {"max_drop": 0.2}, "pass"),
        ([row("a", 0.5, 0.5, why="other prompts")], {"max_drop": 0.02}, "undecidable"),
        ([row("a", 0.5, 0.4)], {"at_least": 0.4}, "pass"),
        ([row("a", 0.5, 0.39)], {"at_least": 0.4}, "regression"),
        ([row("a", 0.5, 9.0, higher=False)], {"at_least": 8.0}, "regression"),
        ([row("a", 0.5, 0.5)], {"min_documents": 400}, "pass"),
        ([row("a", 0.5, 0.5)], {"min_documents": 401}, "undecidable"),
        ([row("a", 0.5, 0.39)], {"at_least": 0.4, "min_documents": 401}, "regression"),  # the worst counts
    ],
)
def test_a_rule_passes_is_broken_or_cannot_be_decided(rows, rule, outcome):
    """Law: an interval on one side of the limit decides; one that holds the limit, or none at all, does not."""
    assert said(rows, task="a", **rule) == outcome


def test_a_group_is_judged_over_the_documents_of_its_tasks():
    """Law: a group's error is that of all documents; a group whose score is another mean is not decidable."""
    leaves = [row("a", 0.5, 0.46, 0.02, documents=100), row("b", 0.5, 0.5, 0.02, documents=300)]
    assert said([*leaves, row("g", 0.5, 0.49, leaves=("a", "b"))], task="g", max_drop=0.05) == "pass"
    assert said([*leaves, row("g", 0.5, 0.40, leaves=("a", "b"))], task="g", max_drop=0.05) == "undecidable"
    assert said([leaves[0], row("g", 0.5, 0.49, leaves=("a", "b"))], task="g", max_drop=0.05) == "undecidable"


def test_the_mean_of_a_suites_group_has_no_max_drop():
    """Law: a glob leaves the mean of a suite's own group out; under its name it can be held to at_least, and says so."""
    rows = [row("a", 0.5, 0.5), row("g", 0.5, 0.5, leaves=("a",), metric="mean,none", why="a group")]
    assert said(rows, task="*", max_drop=0.02) == "pass"
    assert said(rows, task="g", at_least=0.4) == "pass"
    (ruling,) = judge(Policy.model_validate({"rule": [{"task": "g", "max_drop": 0.02}]}), rows)
    assert ruling.outcome == "undecidable"
    assert "only at_least can be asked of it" in ruling.why


def test_rules_name_scores_by_globs_and_metrics():
    """Law: a rule holds for each task of its glob, and for the metric that it names, with or without a filter."""
    rows = [row("m_x", 0.5, 0.5), row("m_y", 0.5, 0.5), row("z", 0.5, 0.5, metric="exact_match,strict")]
    assert [
        r.task for r in judge(Policy.model_validate({"rule": [{"task": "m_*", "at_least": 0}]}), rows)
    ] == ["m_x", "m_y"]
    for metric in (None, "exact_match", "exact_match,strict"):
        assert said(rows, task="z", metric=metric, at_least=0.4) == "pass"


@pytest.mark.parametrize(
    "rule", [{"task": "nothing", "at_least": 0}, {"task": "a", "metric": "f1", "at_least": 0}, {"task": "a"}]
)
def test_a_rule_that_can_hold_nothing_is_refused(rule):
    """Law: a rule without a score, or without a demand, is bad input: it would pass for ever."""
    with pytest.raises(OperatorError):
        said([row("a", 0.5, 0.5)], **rule)
