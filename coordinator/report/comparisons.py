"""Scores of several evaluations in a terminal: learning curves, `compare`, and the lanes of `plan`.

Rule: ASCII only, so that a pipe, a log file and a terminal without UTF-8 show the same. Figures are
never cut: where columns do not fit, a row becomes lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.base.words import first_of
from coordinator.report.learning_curves import (
    Curve,
    Point,
    Series,
    difference,
    is_regression,
    keys_of,
    labels,
    mode_of,
    scores_of,
)
from coordinator.report.render import folded, seconds
from coordinator.report.scores import fits, natural_width, plain_table

WHAT: Mapping[str, str] = {
    "mode": "was computed in another mode",
    "requests": "was asked with other prompts or settings",
    "score": "was scored in another way (gold answers, filters or metrics)",
}
ERRORLESS = "no standard error, so a drop is never marked: "
LOWER = " (lower is better)"
SEVERAL = "="  # a place of a plot where curves meet
MARK = "~"  # stands beside a value that is not comparable with its neighbour
MARKS = "*o+x#@%&"
AXIS = 9  # columns of the axis of values
HEIGHT = 12
FEWEST = 3  # checkpoints; where fewer fit beside each other, a curve becomes lines


class Row(NamedTuple):
    """A score of several evaluations, as shown."""

    name: str  # task/metric
    cells: list[str]
    regressed: bool


def plot(curves: Sequence[Curve], width: int, height: int = HEIGHT) -> list[str]:
    """Lines of a chart of up to len(MARKS) curves, with axis and legend; x: training step, or order.

    Points whose value is not finite are not drawn.
    """
    curves = [c for c in curves if c.points][: len(MARKS)]
    values = [p.value for c in curves for p in c.points if isfinite(p.value)]
    if not values:
        return []
    low, high = min(values), max(values)
    if len({p.label for c in curves for p in c.points}) < 2:
        return []  # a score of one checkpoint is in the table
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    places = _places(curves)
    first, last = min(places.values()), max(places.values())
    columns = max(10, width - AXIS - 1)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for point in (p for p in curve.points if isfinite(p.value)):
            x = (places[point.label] - first) / ((last - first) or 1.0)
            y = (point.value - low) / (high - low)
            cells, column = grid[height - 1 - round(y * (height - 1))], round(x * (columns - 1))
            cells[column] = mark if cells[column] in (" ", mark) else SEVERAL
    lines = []
    for row, cells in enumerate(grid):
        share = row / (height - 1)
        value = high * (1 - share) + low * share  # exact at both ends
        value = 0.0 if abs(value) < 1e-9 * (high - low) else value
        axis = f"{value:>{AXIS - 2}.3g} |" if row % 3 == 0 or row == height - 1 else " " * (AXIS - 1) + "|"
        lines.append(axis + "".join(cells).rstrip())
    lines.append(" " * (AXIS - 1) + "+" + "-" * columns)
    labels = sorted(places, key=lambda label: places[label])
    left, right = labels[0], labels[-1]
    lines.append(" " * AXIS + left + " " * max(1, columns - len(left) - len(right)) + right)
    named = zip(MARKS, curves, strict=False)
    legend = [line for mark, c in named for line in textwrap.wrap(f"{mark} {_shown(c)}", width - 4)]
    if any(SEVERAL in cells for cells in grid):
        legend.append(f"{SEVERAL} several")
    return [*(line[:width] for line in lines), *(f"  {line}" for line in legend)]


def _shown(curve: Curve) -> str:
    return curve.name + ("" if curve.higher_is_better else LOWER)


def _places(curves: Sequence[Curve]) -> dict[str, float]:
    """Label -> x: its step where all points have one, else its place in order."""
    points = [p for c in curves for p in c.points]
    if all(p.step is not None for p in points):
        return {p.label: float(p.step or 0) for p in points}
    return {label: float(i) for i, label in enumerate(dict.fromkeys(p.label for p in points))}


def without_step(points: Sequence[Point]) -> str:
    """A line on the points without a training step, and how one is given; "" where each has one."""
    labels = [p.label for p in points if p.step is None]
    if not labels or len(points) == 1:
        return ""
    return (
        f"x is the order of the checkpoints: {len(labels)} of {len(points)} have no training step ({first_of(labels)}). "
        "A step comes from the folder's name (step-300), or from --step at the first `eval` or `submit`"
    )


def _by_scale(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Curves by axis: those between 0 and 1 share one; others (perplexity) have one per metric."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        share = all(0 <= p.value <= 1 for p in curve.points if isfinite(p.value))
        groups.setdefault("" if share else curve.metric, []).append(curve)
    return list(groups.values())


def show_scores(console: Console, curves: Sequence[Curve], title: str) -> None:
    """Print a row per curve: its checkpoints, and the change over all.

    `!` marks a regression, `~` a point whose requests or scoring differ from the point before. Where
    not all checkpoints fit, the last ones are shown and the others named; where hardly any fits,
    each curve is a few lines.
    """
    shown = {
        (curve.name, p.label): f"{p.value:.4f}{'!' if p.regressed else MARK if p.differs else ''}"
        for curve in curves
        for p in curve.points
    }
    steps = list(dict.fromkeys(p.label for c in curves for p in c.points))
    most = min(len(steps), console.width // 8)  # a figure and its gap take 8 columns
    for count in range(most, min(len(steps), FEWEST) - 1, -1):
        last = steps[len(steps) - count :]
        rows = [
            Row(c.name, [*(shown.get((c.name, x), "-") for x in last), _change(c)], c.points[-1].regressed)
            for c in curves
        ]
        table = _figure_table(console, ["score", *last, "change"], rows, title)
        if table is not None:
            break
    else:
        _show_score_lines(console, curves, shown, title)
        return
    console.print(table)
    left = steps[: len(steps) - count]
    if left:
        which = ", ".join(left) if len(left) <= 4 else f"{left[0]} to {left[-1]} ({len(left)} checkpoints)"
        _say(console, f"left out: {which}; a wider terminal shows more, --csv all", "yellow")


def _figure_table(
    console: Console, heads: Sequence[str], rows: Sequence[Row], title: str | None = None
) -> Table | None:
    """A table that fits, with names folded after their task where that helps; None where none does."""

    def made(width: int) -> Table:
        table = plain_table(title)
        table.add_column(heads[0], overflow="fold", min_width=width, max_width=width)
        for head in heads[1:]:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            name = row.name if len(row.name) <= width else row.name.replace("/", "/\n", 1)
            table.add_row(name, *row.cells, style="red" if row.regressed else "")
        return table

    longest = max((len(row.name) for row in rows), default=0)
    fold = longest - max(0, natural_width(console, made(longest)) - console.width)
    return made(fold) if fold >= min(longest, max(12, console.width // 3)) else None


def _change(curve: Curve) -> str:
    return f"{curve.points[-1].value - curve.points[0].value:+.4f}" if len(curve.points) > 1 else "-"


def _show_score_lines(
    console: Console, curves: Sequence[Curve], shown: Mapping[tuple[str, str], str], title: str
) -> None:
    console.print(Text(title, style="italic"))
    for curve in curves:
        style = "red" if curve.points[-1].regressed else ""
        console.print(Text(curve.name, style=style))
        parts = [f"{p.label}: {shown[curve.name, p.label]}" for p in curve.points]
        lines = folded([*parts, f"change {_change(curve)}"], console.width - 2)
        console.print(Text(f"  {lines}".replace("\n", "\n  "), style=style))


def show_costs(console: Console, series: Series) -> None:
    """Print a row per checkpoint: makespan, what it leaves out, GPU time, cost at the given price."""
    rows = []
    for point in series.points:
        gpu = "-" if point.gpu_seconds is None else f"{point.gpu_seconds:.1f}"
        cost = "-" if point.cost is None else f"{point.cost:.2f}" if point.cost >= 1 else f"{point.cost:.4f}"
        paused = seconds(point.paused_seconds) if point.paused_seconds else ""
        rows.append(
            (point.label, point.suite, point.status, seconds(point.makespan_seconds), paused, gpu, cost)
        )
    wanted = {
        "step": True,
        "suite": len({p.suite for p in series.points}) > 1,
        "status": any(p.status != "done" for p in series.points),
        "makespan": True,
        "paused": any(p.paused_seconds for p in series.points),
        "GPU s": True,
        "cost": series.gpu_hour_price is not None,
    }
    heads = [head for head, kept in wanted.items() if kept]
    cells = [[cell for cell, kept in zip(row, wanted.values(), strict=True) if kept] for row in rows]
    table = plain_table("Checkpoints")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    if fits(console, table):
        console.print(table)
        return
    for row in cells:
        parts = (f"{head} {cell}" for head, cell in zip(heads, row, strict=True) if cell)
        console.print(Text(folded(parts, console.width)))


def _show_differences(console: Console, series: Series) -> None:
    """Print a line per checkpoint and reason: scores not comparable with the checkpoint before."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for curve in series.curves:
        for before, point in zip(curve.points, curve.points[1:], strict=False):
            if point.differs:
                what = _other(point.differs, before.documents, point.documents, f"at {before.label}")
                alike.setdefault((before.label, point.label, what), []).append(curve.name)
    for (_, label, what), names in alike.items():
        _say(console, f"{MARK} at {label} {_stated(names, what)}: not comparable", "yellow")


def _other(what: str, before: int | None, after: int | None, where: str) -> str:
    """How a score differs from the one `where`. `before`, `after`: documents."""
    if what == "requests" and before is not None and after is not None and before != after:
        return f"is over other documents: {after}, and {before} {where}"
    return f"{WHAT[what]} than {where}"


def show_series(console: Console, series: Series) -> None:
    """Print what each checkpoint took, then curves, scores, and drops or breaks in them."""
    show_costs(console, series)
    for suite in dict.fromkeys(p.suite for p in series.points):
        curves = [c for c in series.curves if c.suite == suite]
        lines = [
            line
            for alike in _by_scale(curves)
            for first in range(0, len(alike), len(MARKS))
            for line in plot(alike[first : first + len(MARKS)], console.width)
        ]
        if lines:
            console.print(Text(f"{suite}: learning curves", style="bold"))
        for line in lines:
            console.print(Text(line), no_wrap=True, crop=True)
        if curves:
            show_scores(console, curves, f"{suite}: scores by step")
    for curve in series.curves:
        for before, point in zip(curve.points, curve.points[1:], strict=False):
            if point.regressed:
                change = f"{before.value:.4f} at {before.label} -> {point.value:.4f} at {point.label}"
                _say(console, f"regression: {curve.name} {change}, beyond two standard errors", "red")
    _show_differences(console, series)
    _show_errorless(console, [c.name for c in series.curves if len(c.points) > 1 and not c.has_errors])
    if series.superseded:
        many = "evaluations are" if series.superseded > 1 else "evaluation is"
        _say(
            console,
            f"{series.superseded} earlier {many} left out: a later one has the same checkpoint and suite",
            "dim",
        )


def comparison(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per task and metric of `results.json` columns: each one's value, last minus first, "real drop?".

    A drop is real as on a learning curve, and only where requests and scoring are the same.
    `differs`: how each evaluation differs from the first ("mode", "requests" or "score").
    """
    modes = [mode_of(column) for column in columns]
    scores = [{(s.task, f"{s.metric},{s.filter}"): s for s in scores_of(column)} for column in columns]
    names = dict.fromkeys(name for column in scores for name in column)
    tasks = list(dict.fromkeys(task for task, _ in names))
    rows = []
    for task, metric in sorted(names, key=lambda name: tasks.index(name[0])):
        found = [column.get((task, metric)) for column in scores]
        first, last = found[0], found[-1]
        keys = [keys_of(column, task) for column in columns]
        differs = [
            "mode" if mode != modes[0] else difference(keys[0], key)
            for key, mode in zip(keys, modes, strict=True)
        ]
        change, regressed = None, False
        if first is not None and last is not None:
            change = last.value - first.value
            regressed = not differs[-1] and is_regression(first.value, first.stderr, last)
        rows.append(
            {
                "task": task,
                "metric": metric,
                "values": [None if score is None else score.value for score in found],
                "change": change,
                "regressed": regressed,
                "differs": differs,
                "documents": [None if score is None else score.documents for score in found],
                "stderrs": [None if score is None else score.stderr for score in found],
                "versions": [None if score is None else score.version for score in found],
                "n_shot": [None if score is None else score.n_shot for score in found],
            }
        )
    return rows


def heads_of(points: Sequence[Point]) -> list[str]:
    """A short heading for each evaluation, unique among them."""
    names = labels(points)
    plain = all(p.step is not None and name == p.label for p, name in zip(points, names, strict=True))
    return [f"step {name}" for name in names] if plain else names


def show_comparison(
    console: Console, heads: Sequence[str], ids: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print a row per score: a column per evaluation, and the change overall; then the evaluations' ids."""
    cells = [_cells(row) for row in rows]
    table = _figure_table(console, ["score", *heads, "change"], cells)
    if table is not None:
        console.print(table)
    for row in [] if table is not None else cells:
        parts = [f"{head}: {value}" for head, value in zip([*heads, "change"], row.cells, strict=True)]
        lines = folded(parts, console.width - 4).replace("\n", "\n    ")
        console.print(Text(f"{row.name}\n    {lines}", style="red" if row.regressed else ""))
    for head, evaluation in zip(heads, ids, strict=True):
        _say(console, f"{head}: {evaluation}")
    _show_columns_that_differ(console, heads, rows)
    errorless = [row for row in rows if row["change"] is not None and None in row["stderrs"]]
    _show_errorless(console, [f"{row['task']}/{row['metric'].partition(',')[0]}" for row in errorless])


def _show_columns_that_differ(
    console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print a line per evaluation and kind of difference from the first one: the tasks concerned."""
    alike: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for i, (name, differs) in enumerate(zip(names, row["differs"], strict=True)):
            if differs:
                what = _other(differs, row["documents"][0], row["documents"][i], f"in {names[0]}")
                alike.setdefault((name, what), {})[row["task"] + _other_facts(row, i)] = None
    for (name, what), tasks in alike.items():
        _say(console, f"{MARK} in {name} {_stated(tasks, what)}: not comparable", "yellow")


def _stated(names: Collection[str], what: str) -> str:
    """A sentence of the names and `what`, which begins with "is" or "was"."""
    verb, _, rest = what.partition(" ")
    return f"{', '.join(names)} {({'is': 'are', 'was': 'were'}[verb]) if len(names) > 1 else verb} {rest}"


def _show_errorless(console: Console, names: Sequence[str]) -> None:
    if names:
        _say(console, f"{ERRORLESS}{first_of(names)}", "dim")


def _other_facts(row: Mapping[str, Any], i: int) -> str:
    """Version and n-shot of column `i` where they are known and not those of the first one, in brackets."""
    parts = []
    for facts, text in ((row["versions"], "version {}, not {}"), (row["n_shot"], "{}-shot, not {}-shot")):
        if None not in (facts[0], facts[i]) and facts[0] != facts[i]:
            parts.append(text.format(facts[i], facts[0]))
    return f" ({'; '.join(parts)})" if parts else ""


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, highlight=False, markup=False)


def _cells(row: Mapping[str, Any]) -> Row:
    marks = [MARK if what else "" for what in row["differs"]]
    values = ["-" if v is None else f"{v:.4f}{mark}" for v, mark in zip(row["values"], marks, strict=True)]
    change = "-" if row["change"] is None else f"{row['change']:+.4f}"
    name = f"{row['task']}/{row['metric'].removesuffix(',none')}"
    return Row(name, [*values, change + (" !" if row["regressed"] else "")], row["regressed"])


def lane_table(lanes: Sequence[Mapping[str, Any]]) -> Table:
    """A row per group of GPUs that run the same data sets, with each GPU's number of shards."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for lane in lanes:
        names = tuple(dict.fromkeys(str(s["dataset"]) for s in lane["shards"]))
        alike.setdefault(names, []).append((int(lane["gpu"]), len(lane["shards"])))
    table = plain_table()
    table.add_column("GPUs", no_wrap=True)
    table.add_column("shards each", justify="right", no_wrap=True)
    table.add_column("data sets, in order", overflow="fold")
    for names, members in alike.items():
        counts = sorted({count for _, count in members})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        table.add_row(_ranges([gpu for gpu, _ in members]), each, first_of(names, 8))
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """0-2,5 of 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(ranges[:4]) + (",..." if len(ranges) > 4 else "")
