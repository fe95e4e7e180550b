"""Laws of evaluations side by side: what is not comparable is marked."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.trainings import point, results

from coordinator.report.comparisons import comparison, heads_of, show_comparison, show_series
from coordinator.report.learning_curves import make_series, scores_of


@given(
    chosen=st.lists(
        st.tuples(
            st.sampled_from([None, 100, 200]),
            st.sampled_from(["/runs/a", "/runs/b/", "/c"]),
            st.sampled_from(["mini", "core"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_heading_names_one_evaluation(chosen):
    """By step and name; the training, the suite or the digest are added where two would be alike."""
    points = [
        point(step, 0.5, checkpoint=f"{parent}/step-{step}", suite=suite, evaluation_id=f"x-{i:08x}")
        for i, (step, parent, suite) in enumerate(chosen)
    ]
    heads = heads_of(points)
    assert len(set(heads)) == len(heads) == len(points)
    for head, one in zip(heads, points, strict=True):
        assert str(one.step if one.step is not None else "step-None") in head
    if len({step for step, _, _ in chosen}) == len(points) and all(step for step, _, _ in chosen):
        assert heads == [f"step {step}" for step, _, _ in chosen]


def test_compare_marks_a_drop_where_a_learning_curve_does():
    """Without a standard error, or where lm-eval does not say which way is better, as on the curve."""
    before, after = results(0.55), results(0.31)
    for one in (before, after):
        one["higher_is_better"] = {
            task: dict.fromkeys(ways) for task, ways in one["higher_is_better"].items()
        }
    marked = {row["metric"]: row["regressed"] for row in comparison([before, after])}
    assert marked == {"exact_match,none": True, "word_perplexity,none": False}
    assert not any(row["regressed"] for row in comparison([after, before]))


def test_what_is_not_comparable_is_marked_and_said_once_with_its_reason():
    """Other prompts, version, n-shot or documents, in `compare` and on a curve; no drop is marked there. What has no
    standard error is named, too.
    """

    def of(value, key, version, shots, count):
        counted = {"n-samples": {"add": {"effective": count}}}
        made = results(value, versions={"add": version}, **{"n-shot": {"add": shots}}, **counted)
        return {**made, "evalspan": {"keys": {"add": {"requests": key, "score": "s"}}}}

    columns = [of(0.9, "a", 2.0, 5, 8), of(0.1, "b", 3.0, 0, 8), of(0.1, "c", 2.0, 5, 12)]
    out = io.StringIO()
    console = Console(file=out, width=200)
    show_comparison(console, ["step 1", "step 2", "step 3"], ["id-1", "id-2", "id-3"], comparison(columns))
    points = [point(i + 1, 0.5, scores=scores_of(each)) for i, each in enumerate(columns)]
    show_series(console, make_series(points))
    text = out.getvalue()
    assert text.count("0.1000~") == 4
    assert "!" not in text
    assert text.count("is not comparable with") == 4
    for said in ("version 3.0, not 2.0; 0-shot, not 5-shot", "over 12 documents, not 8"):
        assert said in text
    assert text.count("never marked: pages/word_perplexity") == 2
