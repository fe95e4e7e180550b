"""Learning curves in a terminal: a plot, a table of scores and a table of costs. For `report --series`.

Rule: ASCII only, so that a pipe, a log file and a terminal without UTF-8 show the same. Output fits
the given width; the only arithmetic is that of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.report.keys import MARK, WHAT
from coordinator.report.learning_curves import Curve, Series
from coordinator.report.render import plain_table, seconds

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
    """Plot, scores, regressions, cost."""
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
