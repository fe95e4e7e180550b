"""A gate's rules: what passes, what is a regression, what cannot be decided, and which policies are refused."""

import pytest

from coordinator.errors import OperatorError
from coordinator.verdicts.gate import Policy, judge, outcome_of


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
