"""Verdicts beside scores: which scores have one, and why another has none."""

import numpy as np
import pytest

from coordinator.report.comparisons import comparison
from coordinator.report.verdicts import add_verdicts


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
