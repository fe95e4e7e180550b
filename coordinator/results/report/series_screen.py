"""The series of a training in a terminal: status, drops, a row per score, costs of checkpoints, curves.

Rule: an ASCII mark identifies each curve, so that a terminal without colours shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from statistics import fmean

from rich.console import Console, RenderableType
from rich.text import Text

from coordinator.base.words import first_of, format_score, format_seconds
from coordinator.results.report.comparisons import (
    INCOMPARABLE_MARK,
    LACKING,
    describe_difference,
    print_line,
    show_differences,
)
from coordinator.results.report.learning_curves import Curve, CurvePoint, Series
from coordinator.results.report.row_verdicts import SERIES_NOTE
from coordinator.results.report.scores import Evaluation
from coordinator.results.report.tables import Parts, Sheet, print_parts
from coordinator.results.report.training import Training, drops_of, training_sentence, training_title

MARKS = "*o+x#@%&"
COLOURS = ("green", "blue", "red", "magenta", "cyan", "yellow", "default", "default")
ASCII = str.maketrans("┤│┼├└┬┴┘┌┐─", "||++++++++-")
HEIGHT, WIDEST = 15, 120  # lines and columns of a chart
NAMED_CHECKPOINTS = 5  # checkpoints named below a chart
TABLE_CHECKPOINTS = 6  # latest checkpoints shown in a table
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"  # of a sparkline, from lowest to highest
SPARKLINE_BARS = 12  # bars of a sparkline


def plot_curves(
    curves: Sequence[Curve], width: int, *, order: Sequence[str] = (), ascii_only: bool = False
) -> Iterator[Text | Parts]:
    """Yield a chart of up to len(MARKS) curves, then the meaning of each mark; x: training step, or order.

    `order`: labels in training order, of more checkpoints than these curves may have. Points with non-finite values are not
    drawn; a single checkpoint has no chart.
    """
    import plotext  # noqa: PLC0415 (other commands start without it)
    from plotext import _utility  # noqa: PLC0415

    drawn = [(c, [p for p in c.points if isfinite(p.value)]) for c in curves]
    places = _places([p for _, points in drawn for p in points], order)
    if len(places) < 2:
        return
    # plotext's own uses a set, so the labels that fit depended on Python's hash seed.
    _utility.no_duplicates = lambda data: list(dict.fromkeys(data))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(min(width, WIDEST), HEIGHT)
    named = sorted(places, key=lambda label: places[label])
    ticks = [named[round(i * (len(named) - 1) / (NAMED_CHECKPOINTS - 1))] for i in range(NAMED_CHECKPOINTS)]
    plotext.xticks([places[label] for label in ticks], ticks)
    values = [p.value for _, points in drawn for p in points]
    if max(values) - min(values) < 1e-9 * max(
        1.0, *map(abs, values)
    ):  # nothing that a chart could distinguish
        plotext.ylim(min(values) - 0.5, max(values) + 0.5)
    legend: list[Parts] = []
    for (curve, points), mark, colour in zip(drawn, MARKS, COLOURS, strict=False):
        places_of = [places[p.label] for p in points]
        plotext.plot(places_of, [p.value for p in points], marker=mark, color=colour)
        better = "" if curve.higher_is_better else " (lower is better)"
        legend.append(Parts(f"{mark} {curve.name}{better}", style=colour))
    chart = plotext.build()
    yield Text.from_ansi(chart.translate(ASCII) if ascii_only else chart)
    yield from legend


def _places(points: Sequence[CurvePoint], order: Sequence[str]) -> dict[str, float]:
    """Return label -> x: its step if all points have one, otherwise its position."""
    if all(p.step is not None for p in points):
        return {p.label: float(p.step or 0) for p in points}
    there = dict.fromkeys(p.label for p in points)
    found = dict.fromkeys([*(label for label in order if label in there), *there])
    return {label: float(i) for i, label in enumerate(found)}


def without_step(points: Sequence[Evaluation]) -> str:
    """Return a line about points without a training step, and how to give one; "" if each has one."""
    without = [p.label for p in points if p.step is None]
    if not without or len(points) == 1:
        return ""
    return (
        f"x is the order of the checkpoints: {len(without)} of {len(points)} have no training step ({first_of(without)}). "
        "A step comes from the folder's name (step-300), or from --step at the first `eval` or `submit`"
    )


def _by_scale(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Group curves by axis: those between 0 and 1 share one; others (perplexity) have one per metric."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        share = all(0 <= p.value <= 1 for p in curve.points if isfinite(p.value))
        groups.setdefault("" if share else curve.metric, []).append(curve)
    return list(groups.values())


def _scores(
    curves: Sequence[Curve], heading: str, every: Mapping[str, Evaluation], *, whole: bool, ascii_only: bool
) -> Sheet:
    """Return a row per curve: the first checkpoint, the latest ones, the total change, the best point, and a sparkline.

    `every`: label -> checkpoint with scores, in training order. `!` marks a point that shows the score to be worse, `~` one
    whose requests or scoring differ from the previous point.
    """
    steps = [*every]
    some = steps if whole or len(steps) <= TABLE_CHECKPOINTS else [steps[0], *steps[1 - TABLE_CHECKPOINTS :]]
    # a narrow terminal shows fewer, the latest ones
    drops = [some[1 : i + 1] for i in range(1, len(some) - 1)]
    trend = "trend" if len(steps) > 2 else ""
    beside = ["best", "at", "trend"]
    order = [["trend"], *(["trend", *each] for each in drops), *([*beside, *each] for each in drops[-1:])]
    sheet = Sheet(heading, "score", *some, "change", "best", "at", "trend", turns=True, without=order)
    for curve in curves:
        points = {p.label: p for p in curve.points}
        marks = {x: "!" if p.worse else INCOMPARABLE_MARK if p.differs else "" for x, p in points.items()}
        values = (
            f"{format_score(points[x].value)}{marks[x]}"
            if x in points
            else LACKING[every[x].leaves_out(curve.task)]
            for x in some
        )
        several = len(curve.points) > 1
        sheet.add(
            curve.name,
            *values,
            format_score(curve.points[-1].value - curve.points[0].value, "+") if several else "-",
            format_score(curve.best.value) if several else "-",
            curve.best.label if several else "-",
            sparkline([p.value for p in curve.points], ascii_only=ascii_only) if trend else "",
            style="red" if any(p.worse for p in curve.points) else "",
        )
    return sheet


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return at most SPARKS bars, each the mean of its share of the values; non-finite means are blank."""
    bars = ASCII_BARS if ascii_only else BARS
    count = min(SPARKLINE_BARS, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [fmean(known) if (known := [v for v in part if isfinite(v)]) else nan for part in parts]
    low, high = (end(filter(isfinite, means), default=0.0) for end in (min, max))
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((m - low) * scale)] if isfinite(m) else " " for m in means)


def _screens(points: Sequence[Evaluation], heading: str, *, whole: bool) -> Sheet:
    """A row per task of screen evaluations: the estimate at each of the last checkpoints, and `!` where it is worse."""
    some = points if whole else points[-TABLE_CHECKPOINTS:]
    sheet = Sheet(heading, "task", *(point.label for point in some), turns=True)
    for task in dict.fromkeys(one.task for point in some for one in point.screened):
        found = [next((one for one in point.screened if one.task == task), None) for point in some]
        marks = {"worse": "!", "open": "?", "not worse": ""}
        sheet.add(
            task,
            *(
                LACKING[point.leaves_out(task)] if one is None else f"{one.words}{marks[one.verdict]}"
                for point, one in zip(some, found, strict=True)
            ),
            style="red" if any(one is not None and one.verdict == "worse" for one in found) else "",
        )
    return sheet


def _costs(series: Series, *, whole: bool) -> Sheet:
    """Return a row per checkpoint: makespan, what it omits, GPU time, cost at the given price."""
    several = len({p.suite for p in series.points}) > 1
    slot = slot_of(series.points)
    left = 0 if whole else max(0, len(series.points) - TABLE_CHECKPOINTS)
    heading = f"Checkpoints, the last {TABLE_CHECKPOINTS} of {len(series.points)}" if left else "Checkpoints"
    sheet = Sheet(heading, "step", "suite", "status", "makespan", "paused", f"{slot} s", "cost")
    for point in series.points[left:]:
        gpu = "-" if point.gpu_seconds is None else f"{point.gpu_seconds:.1f}"
        cost = "-" if point.cost is None else f"{point.cost:.2f}" if point.cost >= 1 else f"{point.cost:.4f}"
        sheet.add(
            point.label,
            point.suite if several else "",
            point.status if point.status != "done" else "",
            format_seconds(point.makespan_seconds),
            format_seconds(point.paused_seconds) if point.paused_seconds else "",
            gpu,
            cost if series.gpu_hour_price is not None else "",
        )
    return sheet


def _fallen(curves: Sequence[Curve], order: Sequence[str]) -> Sheet:
    """Return a row per drop, the latest first: since when, both levels, and the current score. `order`: of the labels."""
    found = [(drop, curve.points[-1]) for curve in curves for drop in drops_of(curve)]
    found.sort(key=lambda pair: -order.index(pair[0].label))
    sheet = Sheet(
        "Worse than before", "score", "worse since", "95 %", "before", "after", "at", "now", turns=False
    )
    for drop, last in found:
        worse = drop.worse
        between = f"{worse.low} to {worse.high}"
        levels = map(format_score, (worse.mean, drop.after))
        sheet.add(drop.name, worse.since, between, *levels, drop.label, format_score(last.value), style="red")
    return sheet


def slot_of(points: Sequence[Evaluation]) -> str:
    """Return the unit of all points."""
    return "slot" if {p.slot for p in points if p.gpu_seconds} == {"slot"} else "GPU"


def show_series(
    console: Console, series: Series, trainings: Sequence[Training] = (), *, whole: bool = False
) -> None:
    """Print each training's status, drops, a row per score, curves of the means, and costs of checkpoints.

    `whole`: all checkpoints, and curves of all scores.
    """
    for training in (one for one in trainings if one.mode != "screen"):
        name = training_title(training.folder, training.suite, training.mode)
        print_parts(console, Text(name, style="bold"), Parts(training_sentence(training)), "")
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(p.suite for p in series.points):
        curves = [c for c in series.curves if c.suite == suite]
        means = [c for c in series.means if c.suite == suite]
        worse = [c for c in curves if any(p.worse for p in c.points)]
        rows = [*means, *worse, *(c for c in curves if c not in worse)]
        shown = [*means, *curves] if whole or len(curves) <= len(MARKS) else [*means, *worse][: len(MARKS)]
        ascii_only = console.options.ascii_only
        labels = {p.evaluation_id: p.label for c in curves for p in c.points}
        every = {labels[p.evaluation_id]: p for p in series.points if p.evaluation_id in labels}
        charts = [
            line
            for alike in _by_scale(shown)
            for i in range(0, len(alike), len(MARKS))
            for line in plot_curves(
                alike[i : i + len(MARKS)], console.width, order=[*every], ascii_only=ascii_only
            )
        ]
        if worse:
            parts += [_fallen(worse, [*every]), ""]
        if rows:
            heading = f"{suite}: scores by step"
            parts += [_scores(rows, heading, every, whole=whole, ascii_only=ascii_only), ""]
        if screened := [p for p in series.points if p.suite == suite and p.screened]:
            heading = f"{suite}: screens by step (! worse, ? open)"
            parts += [_screens(screened, heading, whole=whole), ""]
        parts += [Text(f"{suite}: learning curves", style="bold"), *charts, ""] if charts else []
    print_parts(console, *parts, _costs(series, whole=whole), "")
    show_differences(
        console,
        [
            (
                f"{point.label} is not comparable with {before.label}",
                describe_difference(point.differs, before.documents, point.documents),
                curve.name,
            )
            for curve in series.curves
            for before, point in pairwise(curve.points)
            if point.differs
        ],
    )
    if any(point.yardstick is not None for curve in series.curves for point in curve.points):
        print_line(console, SERIES_NOTE.format(horizon=series.horizon), "dim")
    if not whole and len(series.points) > TABLE_CHECKPOINTS:
        print_line(console, "`--all` prints all checkpoints and the curve of each score", "dim")
    if series.superseded:
        many = "evaluations are" if series.superseded > 1 else "evaluation is"
        said = "left out: another one of its checkpoint and suite counts"
        print_line(console, f"{series.superseded} {many} {said}", "dim")
