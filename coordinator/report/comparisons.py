"""Scores of several evaluations in a terminal: learning curves, `compare`, and the lanes of `plan`.

Rule: ASCII only, so that a pipe, a log file and a terminal without UTF-8 show the same. Figures are
never cut: where columns do not fit, a row becomes lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.report.learning_curves import (
    Curve,
    Point,
    Series,
    difference,
    is_regression,
    keys_of,
    scores_of,
)
from coordinator.report.render import first_of, plain_table, seconds

WHAT: Mapping[str, str] = {
    "requests": "was asked with other prompts or settings",
    "score": "was scored in another way (gold answers, filters or metrics)",
}
MARK = "~"  # stands beside a value that is not comparable with its neighbour
MARKS = "*o+x#@%&"
AXIS = 9  # columns of the axis of values
HEIGHT = 12


def plot(curves: Sequence[Curve], width: int, height: int = HEIGHT) -> list[str]:
    """Lines of a chart of up to len(MARKS) curves, with axis and legend; x: training step, or order."""
    curves = [c for c in curves if c.points][: len(MARKS)]
    if not curves:
        return []
    values = [p.value for c in curves for p in c.points]
    low, high = min(values), max(values)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    places = _places(curves)
    first, last = min(places.values()), max(places.values())
    columns = max(10, width - AXIS - 1)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for point in curve.points:
            x = (places[point.label] - first) / ((last - first) or 1.0)
            y = (point.value - low) / (high - low)
            grid[height - 1 - round(y * (height - 1))][round(x * (columns - 1))] = mark
    lines = []
    for row, cells in enumerate(grid):
        value = high - (high - low) * row / (height - 1)
        axis = f"{value:>{AXIS - 2}.3g} |" if row % 3 == 0 or row == height - 1 else " " * (AXIS - 1) + "|"
        lines.append(axis + "".join(cells).rstrip())
    lines.append(" " * (AXIS - 1) + "+" + "-" * columns)
    labels = sorted(places, key=lambda label: places[label])
    left, right = labels[0], labels[-1]
    lines.append(" " * AXIS + left + " " * max(1, columns - len(left) - len(right)) + right)
    legend = [f"  {mark} {c.name}" for mark, c in zip(MARKS, curves, strict=False)]
    return [line[:width] for line in [*lines, *legend]]


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
        share = all(0 <= p.value <= 1 for p in curve.points)
        groups.setdefault("" if share else curve.metric, []).append(curve)
    return list(groups.values())


def curve_table(series: Series, width: int) -> Table:
    """A row per curve: the last checkpoints that fit, and the change over all.

    `!` marks a regression, `~` a point whose requests or scoring differ from the point before.
    """
    longest = max((len(c.name) for c in series.curves), default=0)
    room = max(1, min(12, (width - min(longest, width // 3) - 10) // 9))
    labels = list(dict.fromkeys(p.label for c in series.curves for p in c.points))[-room:]
    table = plain_table("Scores by step")
    table.add_column("score", overflow="fold")
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    for curve in series.curves:
        shown = {
            p.label: f"{p.value:.4f}{'!' if p.regressed else MARK if p.differs else ''}" for p in curve.points
        }
        change = curve.points[-1].value - curve.points[0].value
        table.add_row(
            curve.name,
            *(shown.get(label, "-") for label in labels),
            f"{change:+.4f}",
            style="red" if curve.points[-1].regressed else "",
        )
    return table


def cost_table(series: Series) -> Table:
    """A row per checkpoint: makespan, GPU seconds, cost at the given price."""
    table = plain_table("Checkpoints")
    all_done = all(p.status == "done" for p in series.points)
    table.add_column("step", justify="right", no_wrap=True)
    for name in (*(() if all_done else ("status",)), "makespan", "GPU s"):
        table.add_column(name, justify="right", no_wrap=True)
    if series.gpu_hour_price is not None:
        table.add_column("cost", justify="right", no_wrap=True)
    for p in series.points:
        gpu = "-" if p.gpu_seconds is None else f"{p.gpu_seconds:.1f}"
        cells = [p.label, *([] if all_done else [p.status]), seconds(p.makespan_seconds), gpu]
        if series.gpu_hour_price is not None:
            cells.append("-" if p.cost is None else f"{p.cost:.2f}" if p.cost >= 1 else f"{p.cost:.4f}")
        table.add_row(*cells)
    return table


def _show_differences(console: Console, series: Series) -> None:
    """Print a line per checkpoint and reason: scores not comparable with the checkpoint before."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for curve in series.curves:
        for before, point in zip(curve.points, curve.points[1:], strict=False):
            if point.differs:
                alike.setdefault((before.label, point.label, point.differs), []).append(curve.name)
    for (before_label, label, what), names in alike.items():
        console.print(
            f"{MARK} at {label} {', '.join(names)} {WHAT[what]} than at {before_label}: not comparable",
            style="yellow",
            markup=False,
            highlight=False,
        )


def show_series(console: Console, series: Series) -> None:
    for suite in dict.fromkeys(p.suite for p in series.points):
        curves = [c for c in series.curves if c.suite == suite]
        console.print(Text(f"{suite}: learning curves", style="bold"))
        for alike in _by_scale(curves):
            for first in range(0, len(alike), len(MARKS)):
                for line in plot(alike[first : first + len(MARKS)], console.width):
                    console.print(Text(line), no_wrap=True, crop=True)
    if series.curves:
        console.print(curve_table(series, console.width))
    for curve in series.curves:
        for before, point in zip(curve.points, curve.points[1:], strict=False):
            if point.regressed:
                console.print(
                    f"regression: {curve.name} {before.value:.4f} at {before.label} -> {point.value:.4f} at "
                    f"{point.label}, beyond two standard errors",
                    style="red",
                    markup=False,
                    highlight=False,
                )
    _show_differences(console, series)
    console.print(cost_table(series))


def comparison(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per task and metric of `results.json` columns: each one's value, last minus first, "real drop?".

    A drop is real as on a learning curve, and only where requests and scoring are the same.
    `differs`: how each evaluation differs from the first ("requests" or "score").
    """
    scores = [{(s.task, f"{s.metric},{s.filter}"): s for s in scores_of(column)} for column in columns]
    names = dict.fromkeys(name for column in scores for name in column)
    tasks = list(dict.fromkeys(task for task, _ in names))
    rows = []
    for task, metric in sorted(names, key=lambda name: tasks.index(name[0])):
        found = [column.get((task, metric)) for column in scores]
        first, last = found[0], found[-1]
        keys = [keys_of(column, task) for column in columns]
        differs = [difference(keys[0], key) for key in keys]
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
            }
        )
    return rows


def show_comparison(console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per score: a column per evaluation (the digest of its id), and the change overall."""
    digests = [name.rsplit("-", 1)[-1] for name in names]
    cells = [_cells(row) for row in rows]
    heads = ("task", "metric", *digests, "change")
    widths = [max(len(c[i]) for c in [*cells, heads]) for i in range(len(heads))]
    if sum(widths) + 2 * len(widths) + 2 > console.width:
        for row, (task, metric, *values, change) in zip(rows, cells, strict=True):
            style = "red" if row["regressed"] else ""
            console.print(f"{task} {metric}", style=style, soft_wrap=True, highlight=False, markup=False)
            console.print(f"    {' -> '.join(values)}", style=style, highlight=False, markup=False)
            console.print(f"    {change}", style=style, highlight=False, markup=False)
        _show_columns_that_differ(console, digests, rows)
        return
    table = plain_table()
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right", no_wrap=True)
    for row, cell in zip(rows, cells, strict=True):
        table.add_row(*cell, style="red" if row["regressed"] else "")
    console.print(table)
    _show_columns_that_differ(console, digests, rows)


def _show_columns_that_differ(
    console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print a line per evaluation and kind of difference from the first one: the tasks concerned."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, what in zip(names, row["differs"], strict=True):
            tasks = alike.setdefault((name, what), []) if what else []
            if row["task"] not in tasks:
                tasks.append(row["task"])
    for (name, what), tasks in alike.items():
        text = f"{MARK} in {name} {', '.join(tasks)} {WHAT[what]} than in {names[0]}: not comparable"
        console.print(text, style="yellow", highlight=False, markup=False)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    marks = [MARK if what else "" for what in row["differs"]]
    values = ["-" if v is None else f"{v:.4f}{mark}" for v, mark in zip(row["values"], marks, strict=True)]
    change = "-" if row["change"] is None else f"{row['change']:+.4f}"
    return row["task"], row["metric"], *values, change + (" !" if row["regressed"] else "")


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
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        table.add_row(_ranges([gpu for gpu, _ in members]), each, ", ".join(names[:8]) + more)
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
