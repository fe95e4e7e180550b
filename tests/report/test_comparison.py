"""Laws of evaluations side by side and of a plan's lanes: nothing is cut, a drop is marked."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.trainings import point, results

from coordinator.report.comparisons import comparison, heads_of, lane_table, show_comparison, show_series
from coordinator.report.learning_curves import make_series, scores_of


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_every_figure_is_whole_and_a_drop_is_marked(width, count):
    """Values, changes, headings and ids at any width; `!` where the last is worse than the first beyond two
    standard errors.
    """
    out = io.StringIO()
    points = [point(1000 * step, 0.5) for step in range(count)]
    rows = comparison([results(0.55), *[results(0.4 + i / 100) for i in range(count - 2)], results(0.31)])
    ids = [p.evaluation_id for p in points]
    show_comparison(Console(file=out, width=width), heads_of(points), ids, rows)
    text = out.getvalue()
    for part in ("exact_match", "0.5500", "0.3100", "-0.2400 !", "word_perplexity", "9.6900", *ids):
        assert part in text
    assert all(f"step {1000 * step}" in text for step in range(count))
    assert max(map(len, text.splitlines())) <= width


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


def test_gpus_with_the_same_data_sets_share_a_row():
    """A thousand GPUs are no thousand lines; how many shards each has is told."""
    lanes = [{"gpu": i, "shards": [{"dataset": "mmlu"}] * (3 + i % 2)} for i in range(1000)]
    lanes.append({"gpu": 1001, "shards": [{"dataset": "gsm8k"}]})
    table = lane_table(lanes)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["0-999", "1001"], ["3-4", "1"], ["mmlu", "gsm8k"]]


def test_a_column_that_is_not_comparable_says_what_lm_eval_says_of_it():
    """The mark stands at the value; version and n-shot are named where they differ, below with the task."""

    def of(value, key, version, shots):
        made = results(value, versions={"add": version}, **{"n-shot": {"add": shots}})
        return {**made, "evalspan": {"keys": {"add": {"requests": key, "score": "s"}}}}

    out = io.StringIO()
    rows = comparison([of(0.9, "a", 2.0, 5), of(0.1, "b", 3.0, 0)])
    show_comparison(Console(file=out, width=120), ["step 1", "step 2"], ["id-1", "id-2"], rows)
    text = out.getvalue()
    assert "0.1000~" in text
    assert "!" not in text, "no regression: other prompts"
    assert "in step 2 add (version 3.0, not 2.0; 0-shot, not 5-shot) was asked with other prompts" in text
    assert "pages" not in text[text.index("in step 2") : text.index("no standard error")]


def test_what_is_said_of_several_tasks_is_in_the_plural():
    """As of one in the singular."""

    def of(key):
        keys = {task: {"requests": key, "score": "s"} for task in ("add", "pages")}
        return {**results(0.5), "evalspan": {"keys": keys}}

    out = io.StringIO()
    rows = comparison([of("a"), of("b")])
    show_comparison(Console(file=out, width=200), ["step 1", "step 2"], ["id-1", "id-2"], rows)
    assert "in step 2 add, pages were asked with other prompts" in out.getvalue()


def test_a_column_over_other_documents_says_how_many():
    """In `compare` and on a learning curve; what has no standard error is named, since no drop of it is marked."""

    def of(count, key):
        made = results(0.5, **{"n-samples": {"add": {"effective": count}}})
        return {**made, "evalspan": {"keys": {"add": {"requests": key, "score": "s"}}}}

    columns, out = [of(8, "a"), of(12, "b")], io.StringIO()
    console = Console(file=out, width=200)
    show_comparison(console, ["step 1", "step 2"], ["id-1", "id-2"], comparison(columns))
    points = [point(i + 1, 0.5, scores=scores_of(each)) for i, each in enumerate(columns)]
    show_series(console, make_series(points))
    text = out.getvalue()
    assert "~ in step 2 add is over other documents: 12, and 8 in step 1: not comparable" in text
    assert "~ at 2 add/exact_match is over other documents: 12, and 8 at 1: not comparable" in text
    assert text.count("no standard error, so a drop is never marked: pages/word_perplexity") == 2
