"""Paired comparison: its numbers are scipy's and those of small examples by hand; its verdicts keep their error rate; which
scores have one, and what a gate's rules make of them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.trainings import compared

from coordinator.decide.verdicts.gate import Policy, judge_rows, outcome_of
from coordinator.decide.verdicts.paired import (
    FEW_CLUSTERS,
    Paired,
    adjusted_verdicts,
    compare_paired,
    confidence_interval,
    pool_differences,
)
from coordinator.errors import OperatorError
from coordinator.results.report.row_verdicts import overall_difference

RNG = np.random.default_rng(7)


def values(count, correlation=0.7):
    before = RNG.normal(size=count)
    return before, correlation * before + math.sqrt(1 - correlation**2) * RNG.normal(size=count)


@pytest.mark.parametrize("count", [20, 57, 500])
def test_without_clusters_it_is_the_paired_t_test(count):
    """Law: from FEW documents on, p and interval are those of scipy's paired t test, for any values."""
    for _ in range(50):
        before, after = values(count)
        found, known = compare_paired(before, after), stats.ttest_rel(after, before)
        ends = known.confidence_interval(0.95)
        assert found.test == "paired t"
        assert found.p == pytest.approx(known.pvalue, abs=1e-9)
        assert confidence_interval(found, 0.975) == pytest.approx((ends.low, ends.high), abs=1e-9)


def test_equal_clusters_are_tested_by_their_means():
    """Law: CR2 over clusters of one size is the t test of the clusters' means, with as many degrees of freedom."""
    for size, clusters in ((2, 30), (7, 100)):
        before, after = values(size * clusters)
        names = np.arange(size * clusters) % clusters
        means = [(after - before)[names == g].mean() for g in range(clusters)]
        found = compare_paired(before, after, names)
        assert (found.test, found.clusters) == ("clustered t", clusters)
        assert found.p == pytest.approx(stats.ttest_1samp(means, 0.0).pvalue, abs=1e-9)
        assert found.stderr == pytest.approx(stats.sem(means), abs=1e-12)
        assert found.degrees == pytest.approx(clusters - 1)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8))
def test_few_documents_are_tested_by_all_their_signs(differences):
    """Law: below FEW, p is the share of all 2^n signs whose sum is as far from 0 as the one seen."""
    seen = abs(sum(differences))
    sums = [abs(sum(map(math.prod, zip(differences, signs, strict=True))))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    found = compare_paired(np.zeros(len(differences)), np.array(differences, dtype=float))
    assert len(differences) < FEW_CLUSTERS
    assert found.test == "signs"
    assert found.p == pytest.approx(sum(s >= seen for s in sums) / len(sums), abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0))), min_size=2, max_size=60))
def test_the_other_way_round_it_says_the_opposite(pairs):
    """Law: exchanged checkpoints give the opposite difference and flips, the same p, and the opposite verdict."""
    before, after = np.array(pairs).T
    one, other = compare_paired(before, after), compare_paired(after, before)
    assert (one.difference, one.p, one.mcnemar) == pytest.approx((-other.difference, other.p, other.mcnemar))
    assert (one.gained, one.lost) == (other.lost, other.gained)
    opposite = {"better": "worse", "worse": "better", "no evidence": "no evidence"}
    assert adjusted_verdicts([(one, True)])[0][0] == opposite[adjusted_verdicts([(other, True)])[0][0]]
    assert adjusted_verdicts([(one, True)])[0][0] == opposite[adjusted_verdicts([(one, False)])[0][0]]


def test_verdicts_are_corrected_for_their_number():
    """Law: one p of 0.03 is a verdict; among 40 scores without an effect it is none (Benjamini-Hochberg by scipy)."""
    one = compare_paired(np.zeros(100), np.array([1.0] * 62 + [-1.0] * 38) * 0.1)
    assert 0.01 < one.p < 0.05
    none = compare_paired(np.zeros(100), np.array([1.0, -1.0] * 50))
    assert adjusted_verdicts([(one, True)])[0][0] == "better"
    said = adjusted_verdicts([(one, True)] + [(none, True)] * 39)
    assert {verdict for verdict, *_ in said} == {"no evidence"}
    assert [p for _, p, _ in said] == pytest.approx(stats.false_discovery_control([one.p] + [none.p] * 39))


def test_nothing_that_could_be_compared_gives_no_comparison():
    """Law: one document, or a cluster with half of them, says nothing; equal documents are no evidence of any effect."""
    assert compare_paired(np.array([0.0]), np.array([1.0])) == "too few documents"
    for largest, said in ((30, "100 %"), (20, "67 %"), (15, "50 %")):
        names = ["a"] * largest + [str(i) for i in range(30 - largest)]
        assert (
            compare_paired(np.zeros(30), np.ones(30), names) == f"one cluster holds {said} of the documents"
        )
    equal = compare_paired(np.ones(30), np.ones(30))
    assert (equal.p, equal.gained, adjusted_verdicts([(equal, True)])) == (
        1.0,
        0,
        [("no evidence", 1.0, None)],
    )


def test_the_stated_difference_is_the_one_that_the_correction_finds():
    """Law: among m scores a lone change needs p below 5 % / m, so the stated one grows as Student's quantile does."""
    one = compare_paired(*values(200))
    for count in (1, 5, 60):
        (_, _, stated), *_ = adjusted_verdicts([(one, True)] * count)
        law = stats.t(199)
        expected = (law.ppf(1 - 0.025 / count) + law.ppf(0.8)) * one.stderr
        assert stated == pytest.approx(expected)


# --- intervals -------------------------------------------------------------------------------------------------------


def estimate(count, gained, lost, **more):
    difference = (gained - lost) / count
    variance = ((gained + lost) / count - difference**2) / (count - 1)
    return Paired(count, difference, variance, count - 1, 1.0, gained, lost, **more)


def share(count, gained, lost, holds):
    """Probability of the pairs of flips for which `holds`, where documents flip with these probabilities."""
    found = 0.0
    for up in range(int(stats.binom.isf(1e-7, count, gained)) + 2 if gained else 1):
        law = stats.binom(count - up, lost / (1 - gained))
        for down in range(int(law.isf(1e-7)) + 2 if lost else 1):
            if holds(up, down):
                found += stats.binom.pmf(up, count, gained) * law.pmf(down)
    return found


@pytest.mark.parametrize("count", [18, 40, 100, 135, 164, 250])
@pytest.mark.parametrize("gained", [0.0, 0.02])
def test_few_flips_are_no_proof_of_a_small_drop(count, gained):
    """Law: a true drop just beyond the limit passes in at most 6 %, exactly computed, also where documents flip one way."""

    def passes(up, down):
        return confidence_interval(estimate(count, up, down), 0.95)[0] >= -0.02

    assert share(count, gained, gained + 0.021, passes) <= 0.06


@pytest.mark.parametrize(("gained", "lost"), [(0.025, 0.025), (0.0, 0.05), (0.04, 0.01)])
def test_an_interval_of_few_documents_covers_the_truth(gained, lost):
    """Law: with 18 documents of which 5 % flip, the 95 % interval holds the true difference in at least 93 %."""

    def covers(up, down):
        low, high = confidence_interval(estimate(18, up, down), 0.975)
        return low <= gained - lost <= high

    assert share(18, gained, lost, covers) >= 0.93


def test_where_no_document_differs_an_interval_has_a_width():
    """Law: of n independent values or clusters none differs by chance in 5 %, if 1 - 0.05^(1/n) of all do, each by the span."""
    same = np.linspace(0, 4, 100)
    assert confidence_interval(compare_paired(same, same), 0.95) == pytest.approx(
        (-4 * (1 - 0.05**0.01), 4 * (1 - 0.05**0.01))
    )
    right, names = np.tile([0.0, 1.0], 100), np.arange(200) % 20
    alone, alike = (
        confidence_interval(compare_paired(right, right, which), 0.95)[1] for which in (None, names)
    )
    assert alone == pytest.approx(1.653**2 / (200 + 1.653**2), rel=1e-3)
    assert alike == pytest.approx(1.729**2 / (20 + 1.729**2), rel=1e-3)


@given(st.integers(2, 300), st.integers(0, 300), st.integers(0, 300))
def test_an_interval_holds_the_difference_and_is_symmetrical(count, gained, lost):
    """Law: exchanged checkpoints give the opposite interval; it holds what was seen, and no less confidence is wider."""
    gained = min(gained, count)
    lost = min(lost, count - gained)
    low, high = confidence_interval(estimate(count, gained, lost), 0.95)
    assert confidence_interval(estimate(count, lost, gained), 0.95) == pytest.approx((-high, -low), abs=1e-9)
    assert -1 <= low <= (gained - lost) / count <= high <= 1
    wider = confidence_interval(estimate(count, gained, lost), 0.99)
    assert wider[0] <= low + 1e-9
    assert wider[1] >= high - 1e-9


@pytest.mark.parametrize(
    ("clusters", "largest", "lowest", "highest"),
    [(None, 0, 0.02, 0.08), (120, 0, 0.02, 0.08), (12, 0, 0.01, 0.085), (60, 0.33, 0.01, 0.085)],
)
def test_without_an_effect_one_in_twenty_is_rejected(clusters, largest, lowest, highest):
    """Law: 400 drawn pairs without an effect are rejected at about 5 %, also where documents of a cluster move together, and
    where one cluster has a third of them.
    """
    rng, rejected = np.random.default_rng(1), 0
    for _ in range(400):
        names = None if clusters is None else rng.integers(0, clusters, 600)
        if largest:
            names[: int(largest * 600)] = 0
        shared = 0.0 if names is None else rng.normal(size=clusters)[names]
        rejected += compare_paired(np.zeros(600), rng.normal(size=600) + shared, names).p < 0.05
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
            "keys": {task: {"asks": requests, "score": scoring}},
        },
    }


def documents(right, count=100):
    values = np.zeros(count)
    values[:right] = 1.0
    return {
        "doc_id": np.arange(count),
        "doc_hash": np.arange(count),
        "acc,none": values,
    }


@pytest.mark.parametrize(
    ("other", "columns", "mixed", "verdict"),
    [
        (results(0.3), documents(30), False, "worse"),
        (results(0.7), documents(70), False, "better"),
        (results(0.49), documents(49), False, "no evidence"),
        (results(0.3, requests="x"), documents(30), True, "not comparable: run with different prompts or settings"),
        (results(0.3, scoring="x"), documents(30), True, "not comparable: scored differently"),
        (results(0.3, mode="fast"), documents(30), False, "not comparable: computed in another mode; --mixed compares them anyway"),
        (results(0.3, mode="fast"), documents(30), True, "worse"),
        (results(0.3), None, False, "not comparable: its samples were removed"),
        (results(7.3), documents(30), False, "not comparable: its score is not a mean over its documents"),
        (results(0.3, task="others"), None, False, "not comparable: one has no score"),
    ],
)  # fmt: skip
def test_a_score_has_a_verdict_or_the_reason_why_not(other, columns, mixed, verdict):
    """Law: equal requests and scoring over the same documents, a mean of them, one mode (or --mixed): else the reason."""
    rows = compared(
        results(0.5), other, documents=lambda i, _task: columns if i else documents(50), mixed=mixed
    )
    row = next(r for r in rows if r["task"] == "sums")
    assert row["verdicts"][0]["words"].startswith(verdict)


@pytest.mark.parametrize(
    ("group", "after", "verdict", "change"),
    [
        ({0: 0.45, 1: 0.35}, 40, "worse", -0.1),  # tasks alike
        ({0: 0.425, 1: 0.325}, 40, "worse", -0.1),  # by documents
        ({0: 0.45, 1: 0.5}, 40, "not comparable: its score is not a mean over its tasks", None),
        ({0: 0.45, 1: 0.35}, None, "not comparable: small: its samples were removed", None),
    ],
)
def test_a_group_is_compared_by_the_mean_of_its_tasks_as_its_score_weighs_them(group, after, verdict, change):
    """Law: the change that is tested is the one that is printed; a task without a verdict leaves its group without one."""
    sizes = {"small": 100, "large": 300}
    means = [{"small": 0.5, "large": 0.4}, {"small": 0.4, "large": 0.3}]

    def of(i):
        leaves = {task: {"acc,none": mean} for task, mean in means[i].items()}
        counts = {task: {"effective": size} for task, size in sizes.items()}
        subtasks = {"all": [*sizes], **{task: [] for task in sizes}}
        groups = {"all": {"acc,none": group[i]}}
        return {"results": leaves | groups, "groups": groups, "group_subtasks": subtasks, "n-samples": counts}

    def columns(i, task):
        return (
            None
            if after is None and task == "small"
            else documents(round(means[i][task] * sizes[task]), sizes[task])
        )

    rows = compared(of(0), of(1), documents=columns)
    (found,) = next(r for r in rows if r["task"] == "all")["verdicts"]
    assert found["words"] == verdict
    assert found.get("difference") == (None if change is None else pytest.approx(change))


def test_the_overall_verdict_is_that_of_the_mean_of_tasks():
    """Law: each task counts alike, by its first score from 0 to 1 of which higher is better; the words say over how many. A
    difference that no task shows alone is seen by all; pages and perplexity do not count.
    """
    rng = np.random.default_rng(5)
    pairs = [(rng.random(40) < 0.5).astype(float) for _ in range(60)]
    flips = [np.where(rng.random(40) < 0.16, rng.random(40) < 0.66, one) for one in pairs]
    parts = [compare_paired(a, b) for a, b in zip(pairs, flips, strict=True)]
    scores = [(f"t{i}", True, (0.5, 0.5), one) for i, one in enumerate(parts)]
    more = [
        ("t0", True, (0.1, 0.1), parts[1]),
        ("pages", False, (0.5, 0.5), parts[1]),
        ("long", True, (7, 8), parts[1]),
    ]
    found = overall_difference([*scores, *more])
    assert (found["tasks"], found["of"], found["verdict"]) == (60, 60, "better")
    assert found["difference"] == pytest.approx(
        np.mean([b.mean() - a.mean() for a, b in zip(pairs, flips, strict=True)])
    )
    assert (found["gained"], found["lost"]) == tuple(
        sum(int((s * (b - a) > 0).sum()) for a, b in zip(pairs, flips, strict=True)) for s in (1, -1)
    )
    assert f"{found['difference']:+.4f} ± {found['reach']:.4f} over 60 tasks: better" == found["words"]
    assert overall_difference([*scores, ("z", True, (0.5, 0.5), None)])["words"].endswith(
        "over 60 of 61 tasks: better"
    )
    assert overall_difference([("z", True, (0.5, 0.5), None)])["verdict"] == "not comparable"


def test_one_task_pooled_is_the_one_sample_t_test():
    """Law: of one task p, degrees and interval are scipy's, of the differences."""
    before, after = values(80)
    found, expected = pool_differences([compare_paired(before, after)]), stats.ttest_1samp(after - before, 0)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.degrees == pytest.approx(79)
    assert confidence_interval(found, 0.975) == pytest.approx(
        tuple(expected.confidence_interval(0.95)), rel=1e-9
    )


@pytest.mark.parametrize("sizes", [(30, 30, 400, 2000), (25,) * 60, (164, 14_000)])
def test_pooled_tasks_of_unlike_size_are_rejected_once_in_twenty_without_an_effect(sizes):
    """Law: the size of the test, and what its interval covers, by simulation of tasks of unlike size and spread."""
    rng = np.random.default_rng(11)
    missed = 0
    for _ in range(2000):
        parts = []
        for k, size in enumerate(sizes):
            spread = 0.2 + k % 3
            # of `size` normal differences: their mean and variance
            variance = spread**2 * rng.chisquare(size - 1) / (size - 1) / size
            parts.append(
                Paired(size, rng.normal(0, spread / size**0.5), variance, size - 1.0, 1.0, None, None)
            )
        one = pool_differences(parts)
        low, high = confidence_interval(one, 0.975)
        assert (one.p < 0.05) == (not low <= 0 <= high)
        missed += one.p < 0.05
    assert 0.035 < missed / 2000 < 0.065


def test_documents_that_changed_are_left_out():
    """Law: pairs are documents of equal number and content."""
    before, after = documents(50), documents(30)
    after["doc_hash"] = np.where(np.arange(100) < 10, -1, np.arange(100))
    rows = compared(results(0.5), results(0.3), documents=lambda i, _task: after if i else before)
    (found,) = [r["verdicts"][0] for r in rows if r["task"] == "sums"]
    assert (found["documents"], found["lost"], found["gained"]) == (90, 20, 0)


# --- a gate's rules --------------------------------------------------------------------------------------------------


def row(
    task, before, after, stderr=0.01, *, documents=400, higher=True, leaves=(), metric="acc,none", why=""
):
    verdict = {"difference": (after or 0) - before, "stderr": stderr, "documents": documents, "clusters": None,
               "degrees": documents - 1, "span": 1.0, "gained": None, "lost": None}  # fmt: skip
    return {"task": task, "metric": metric, "values": [before, after], "documents": [documents, documents],
            "higher_is_better": higher, "leaves": list(leaves), "verdicts": [{"why": why} if why else verdict],
            "not_asked": [False, False]}  # fmt: skip


def said(rows, **rule):
    return outcome_of(judge_rows(Policy.model_validate({"rule": [rule]}), rows))


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
        ([row("a", 0.5, 0.46)], {"max_relative_drop": 0.2}, "pass"),  # 0.1
        ([row("a", 0.1, 0.06)], {"max_relative_drop": 0.2}, "regression"),  # 0.02
        ([row("a", 0.5, 0.46)], {"max_relative_drop": 0.2, "max_drop": 0.02}, "regression"),  # both must hold
        ([row("a", 0.5, 0.5)], {"required": True}, "pass"),
        ([row("a", 0.5, None)], {"max_drop": 0.02}, "missing"),
        ([row("a", 0.5, math.nan)], {"at_least": 0.0}, "missing"),
        ([row("a", 0.5, 0.39)], {"max_drop": 0.02, "tier": "supporting"}, "pass"),
        ([row("a", 0.5, None)], {"at_least": 0.0, "tier": "advisory"}, "pass"),
    ],
)
def test_a_rule_passes_is_broken_or_cannot_be_decided(rows, rule, outcome):
    """Law: an interval on one side of the limit decides; one that holds the limit, or none at all, does not."""
    assert said(rows, task="a", **rule) == outcome


@pytest.mark.parametrize(
    ("after", "rule", "line", "failed"),
    [
        (None, {}, "missing: a acc: no score; the baseline has 0.5000", False),
        (None, {"required": True}, "missing: a acc: no score; the baseline has 0.5000", True),
        (None, {"required": True, "tier": "supporting"}, "warning: missing: a acc", False),
        (0.39, {}, "regression: a acc: -0.1100, from -0.1265 to -0.0903 (one-sided 95 %; upper end: 1 of 2 scores, corrected)", True),
        (0.39, {"tier": "supporting"}, "warning: regression: a acc", False),
        (0.39, {"tier": "advisory"}, "advisory: regression: a acc", False),
    ],
)  # fmt: skip
def test_a_score_of_a_glob_is_never_passed_over(after, rule, line, failed):
    """Law: what the baseline has and the checkpoint lacks is said; it fails where it is required; critical rules alone fail."""
    rows = [row("a", 0.5, after), row("b", 0.5, 0.5)]
    rulings = judge_rows(Policy.model_validate({"rule": [{"task": "*", "max_drop": 0.02, **rule}]}), rows)
    assert rulings[0].line.startswith(line)
    assert [one.has_failed for one in rulings] == [failed, False]


def test_a_glob_over_equal_scores_seldom_says_regression():
    """Law: of equal checkpoints at most 5 % have a false regression in any of 60 scores of a rule, at the strictest limit."""
    rng = np.random.default_rng(3)
    policy, false = Policy.model_validate({"rule": [{"task": "*", "max_drop": 0.0}]}), 0
    for _ in range(100):
        rows = [row(str(i), 0.5, 0.5 + 0.01 * rng.normal()) for i in range(60)]
        false += outcome_of(judge_rows(policy, rows)) == "regression"
    assert false <= 10


def test_a_group_is_judged_by_its_own_verdict_and_no_glob_means_the_mean_of_a_suites_group():
    """Law: what `compare` says of a group is what a rule asks; one that cannot be compared is not decidable, and says why."""
    rows = [
        row("a", 0.5, 0.5),
        row("g", 0.5, 0.47, leaves=("a",)),
        row("own", 0.5, 0.3, leaves=("a",), metric="mean,none"),
    ]
    assert said(rows, task="g", max_drop=0.05) == "pass"
    assert said(rows, task="*", max_drop=0.05) == "pass"
    assert said(rows, task="own", max_drop=0.05) == "regression"
    unlike = row("g", 0.5, 0.49, leaves=("a",), why="its score is not a mean over its tasks")
    (ruling,) = judge_rows(Policy.model_validate({"rule": [{"task": "g", "max_drop": 0.05}]}), [unlike])
    assert (ruling.outcome, ruling.why) == (
        "undecidable",
        "not comparable: its score is not a mean over its tasks",
    )


def test_rules_name_scores_by_globs_and_metrics():
    """Law: a rule holds for each task of its glob, and for the metric that it names, with or without a filter."""
    rows = [row("m_x", 0.5, 0.5), row("m_y", 0.5, 0.5), row("z", 0.5, 0.5, metric="exact_match,strict")]
    assert [
        r.task for r in judge_rows(Policy.model_validate({"rule": [{"task": "m_*", "at_least": 0}]}), rows)
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
