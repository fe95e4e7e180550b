"""Laws of what is drawn: nothing is cut or wider than the terminal, and a table that does not fit becomes lines."""

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.trainings import point

from coordinator.interface.cli.app import Console as Terminal
from coordinator.results.report.comparisons import lane_table
from coordinator.results.report.learning_curves import make_series
from coordinator.results.report.series_screen import plot_curves
from coordinator.results.report.tables import Parts, Sheet, fold_parts, print_parts


def printed(width, *parts):
    out = io.StringIO()
    for part in parts:
        Console(file=out, width=width, color_system=None).print(part)
    return out.getvalue()


cells = st.from_regex(r"[a-zé/_]{1,12}( [0-9]{1,3}\.[0-9])?", fullmatch=True)


@given(
    rows=st.lists(st.tuples(cells, cells, cells, st.lists(cells, max_size=6)), min_size=1, max_size=5),
    width=st.integers(30, 120),
    turns=st.booleans(),
)
def test_a_sheet_has_each_cell_whole_and_fits(rows, width, *, turns):
    """At any width: as a table, turned, or as lines."""
    sheet = Sheet("", "name", "first", "second", "parts", turns=turns)
    for name, first, second, parts in rows:
        sheet.add(name, first, second, Parts(*parts))
    text = printed(width, sheet)
    assert max(map(len, text.splitlines())) <= width
    for name, *more, parts in rows:
        for part in (name.replace("/", "/ ", 1), *more, *parts):  # a name is folded there, beside other names
            assert all(word in text for word in part.split()), text


@given(
    names=st.lists(
        st.from_regex(r"[a-z]{1,9}([-_/][a-z0-9]{1,9}){0,12}", fullmatch=True), min_size=1, max_size=4
    ),
    width=st.integers(60, 120),
)
def test_a_long_name_is_broken_in_its_column_and_the_other_rows_stay_a_line(names, width):
    """At "-", "_" or "/", and nothing of it is lost; it no longer turns each row into lines."""
    sheet = Sheet("", "evaluation", "state", "scored")
    for name in names:
        sheet.add(name, "inference", "1/2")
    head, _, *rows = printed(width, sheet).splitlines()
    assert head.split() == ["evaluation", "state", "scored"]
    assert "".join(row.split()[0] for row in rows) == "".join(names)
    assert sum(row.endswith("inference     1/2") for row in rows) == len(names)
    assert all(len(row) <= width for row in rows)


def test_without_a_terminal_a_record_is_a_line_of_any_length_without_blanks_at_its_end():
    """In every command: the rule is in the table and in the command line's console."""
    sheet = Sheet("", "score", "value", "verdict", turns=True)
    words = [f"verdict {i} of many words" for i in range(60)]
    for i in (1, 22):
        sheet.add(f"task{i}", "0.5", Parts(*words[:i]))
    out = io.StringIO()
    print_parts(Terminal(file=out), sheet, ", ".join(["a note of `evalspan report ID`"] * 20))
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[2:4] == ["task1     0.5  verdict 0 of many words", f"task22    0.5  {', '.join(words[:22])}"]
    assert [line for line in lines if line != line.rstrip()] == []


@given(
    parts=st.lists(
        st.sampled_from(["makespan 45.7 s", "71 % in inference", "", "type `a b c`", "1.07 x of 3 h"])
    ),
    width=st.integers(20, 120),
)
def test_a_figure_and_its_unit_stay_on_one_line(parts, width):
    """As a command does; nothing is lost and nothing is wider."""
    lines = fold_parts(parts, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == ", ".join(filter(None, parts))
    assert not any(re.search(r"\d$", line) or line.strip() in ("s", "min", "%") for line in lines)
    assert all(line.count("`") % 2 == 0 for line in lines)


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")]), max_size=20),
    width=st.integers(20, 200),
    ascii_only=st.booleans(),
)
def test_a_chart_fits_and_needs_no_colour(values, width, *, ascii_only):
    """Any values, any width; fewer than two that are finite have no chart; in ASCII where the terminal has no more."""
    curves = make_series([point(i, v) for i, v in enumerate(values)]).curves[:1]
    lines = printed(width, *plot_curves(curves, width, ascii_only=ascii_only)).splitlines()
    assert bool(lines) == (sum(abs(v) < 1e9 for v in values) > 1)
    assert all(len(line) <= width for line in lines)
    assert not lines or sum(line.count("*") for line in lines[:-1]) >= 1
    assert not ascii_only or all(line.isascii() for line in lines)


def test_a_rising_curve_rises_and_the_legend_says_which_way_is_better():
    """By steps, or by order where a checkpoint has none."""
    series = make_series([point(i, i / 10) for i in range(5)])
    for curve in (
        series.curves[0],
        series.curves[0]._replace(points=tuple(p._replace(step=None) for p in series.curves[0].points)),
    ):
        lines = printed(60, *plot_curves([curve], 60)).splitlines()
        places = [line.index("*") for line in lines if "*" in line][:-1]
        assert places == sorted(places, reverse=True)
        assert len(places) > 5
    assert "pages/word_perplexity (lower is better)" in printed(80, *plot_curves([series.curves[1]], 80))


def test_gpus_with_the_same_data_sets_share_a_row():
    """A thousand GPUs are no thousand lines; how many shards each has is told."""
    lanes = [{"gpu": i, "shards": [{"dataset": "mmlu"}] * (3 + i % 2)} for i in range(1000)]
    lanes.append({"gpu": 1001, "shards": [{"dataset": "gsm8k"}]})
    rows = [line.split() for line in printed(80, lane_table(lanes)).splitlines()]
    assert rows[2:] == [["0-999", "3-4", "mmlu"], ["1001", "1", "gsm8k"]]
