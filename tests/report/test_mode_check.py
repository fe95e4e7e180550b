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


def test_flips_are_documents_by_what_the_task_has() -> None:
    """A metric may flip without an argmax; rolling likelihoods have no argmax, and generation has answers alone."""

    def texts(*answers: str) -> list[dict[str, Any]]:
        return [{"doc_id": n, "resps": [[text]]} for n, text in enumerate(answers)]

    before = [sample(n, [-1.0, -2.0]) for n in range(3)]
    after = [sample(0, [-2.0, -1.0], acc=0.0), sample(1, [-1.0, -2.0], acc=0.5), sample(2, [-1.25, -2.0])]
    for kind, exact, fast, found in (
        ("multiple_choice", before, after, (3, 1.0, 1, 2, None)),
        ("loglikelihood_rolling", texts("-10.5"), texts("-10.0"), (1, 0.5, None, 0, None)),
        ("generate_until", texts("42", "42", "42"), texts("4", "2", "42"), (3, None, None, 0, 2)),
    ):
        made = task_check("t", kind, list(zip(exact, fast, strict=True)))
        assert (made.documents, made.worst, made.argmax, made.metrics, made.answers) == found


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
