"""Laws of evaluations side by side and of a plan's lanes: nothing is cut, a drop is marked."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.trainings import results

from coordinator.report.comparisons import comparison, lane_table, show_comparison

NAMES = ["step-1-mini-1a2b3c4d", "step-2-mini-5e6f7a8b"]


@pytest.mark.parametrize("width", [40, 80])
def test_every_figure_is_whole_and_a_drop_is_marked(width):
    """Values, changes and names at any width; `!` where the last is worse than the first beyond two standard errors."""
    out = io.StringIO()
    rows = comparison([results(0.55), results(0.31)])
    show_comparison(Console(file=out, width=width), NAMES, rows)
    text = out.getvalue()
    for part in ("exact_match,none", "0.5500", "0.3100", "-0.2400 !", "word_perplexity,none", "9.6900"):
        assert part in text
    assert max(map(len, text.splitlines())) <= width


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
