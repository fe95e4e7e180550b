"""Laws of `eval --check-fast`: what differs between two samples of one document is counted, with all digits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coordinator.report.mode_check import ModeCheck, ScoreCheck, show, task_check

LIKELIHOODS = st.lists(st.floats(-100, 0), min_size=2, max_size=5)


def sample(document: int, values: list[float], acc: float = 1.0) -> dict[str, Any]:
    """As lm-eval writes it: numbers as text."""
    resps = [[[str(value), "False"]] for value in values]
    return {"doc_id": document, "resps": resps, "metrics": ["acc"], "acc": acc}


@given(st.lists(st.tuples(LIKELIHOODS, st.floats(-1, 1)), min_size=1, max_size=8))
def test_differences_are_those_of_each_request(documents: list[tuple[list[float], float]]) -> None:
    """A shift of all choices alike shows in worst and mean, and changes no argmax."""
    pairs = [
        (sample(n, values), sample(n, [v + shift for v in values]))
        for n, (values, shift) in enumerate(documents)
    ]
    made = task_check("t", "multiple_choice", pairs)
    assert made.documents == len(documents)
    assert made.worst == pytest.approx(max(abs(shift) for _, shift in documents), abs=1e-9)
    assert made.mean is not None
    assert made.mean <= (made.worst or 0.0)
    assert made.metrics == 0
    assert made.answers is None


def test_flips_are_documents_and_a_metric_may_flip_without_them() -> None:
    pairs = [
        (sample(0, [-1.0, -2.0]), sample(0, [-2.0, -1.0], acc=0.0)),
        (sample(1, [-1.0, -2.0]), sample(1, [-1.0, -2.0], acc=0.5)),
        (sample(2, [-1.0, -2.0]), sample(2, [-1.25, -2.0])),
    ]
    made = task_check("t", "multiple_choice", pairs)
    assert (made.argmax, made.metrics, made.worst) == (1, 2, 1.0)


def test_rolling_likelihoods_have_no_argmax_and_generation_has_answers_alone() -> None:
    rolling = ({"doc_id": 0, "resps": [["-10.5"]]}, {"doc_id": 0, "resps": [["-10.0"]]})
    made = task_check("pages", "loglikelihood_rolling", [rolling])
    assert (made.worst, made.argmax, made.answers) == (0.5, None, None)
    texts = [
        ({"doc_id": n, "resps": [["42"]]}, {"doc_id": n, "resps": [[text]]}) for n, text in enumerate("42")
    ]
    texts.append(({"doc_id": 2, "resps": [["42"]]}, {"doc_id": 2, "resps": [["42"]]}))
    made = task_check("sums", "generate_until", texts)
    assert (made.worst, made.argmax, made.answers, made.documents) == (None, None, 2, 3)


def test_the_table_says_what_is_not_there() -> None:
    out = io.StringIO()
    tasks = (task_check("t", "multiple_choice", []),)
    scores = (ScoreCheck(name="t/acc", exact=0.5, fast=0.25), ScoreCheck(name="u/acc", exact=0.5, fast=None))
    made = ModeCheck(evaluations={"exact": "a", "fast": "b"}, tasks=tasks, scores=scores)
    show(Console(file=out, width=80, color_system=None), made)
    text = out.getvalue()
    assert "-0.2500" in text
    assert "u/acc" in text
    assert "exact: a" in text
