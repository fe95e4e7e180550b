"""Scores of several evaluations in a terminal: learning curves, `compare`, and the lanes of `plan`.

Rule: an ASCII mark stands for each curve, so that a terminal without colours shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from coordinator.base.words import first_of, seconds
from coordinator.report.learning_curves import (
    Curve,
    CurvePoint,
    Point,
    Series,
    Worse,
    difference,
    keys_of,
    labels,
    leaves_of,
    mode_of,
    scores_of,
)
from coordinator.report.tables import Parts, Sheet, print_parts
from coordinator.report.verdicts import ALONG, MEANING

WHAT: Mapping[str, str] = {
    "mode": "computed in another mode",
    "requests": "asked with other prompts or settings",
    "score": "scored in another way (gold answers, filters or metrics)",
}
MARK = "~"  # stands beside a value that is not comparable with its neighbour
MARKS = "*o+x#@%&"
COLOURS = ("green", "blue", "red", "magenta", "cyan", "yellow", "default", "default")
ASCII = str.maketrans("┤│┼├└┬┴┘┌┐─", "||++++++++-")
HEIGHT, WIDEST = 15, 120  # lines and columns of a chart
TICKS = 5  # checkpoints named below a chart


def plot(curves: Sequence[Curve], width: int, *, ascii_only: bool = False) -> Iterator[Text]:
    """A chart of up to len(MARKS) curves, then what each mark means; x: training step, or order.

    Points whose value is not finite are not drawn; a single checkpoint has no chart.
    """
    import plotext  # noqa: PLC0415 (other commands start without it)
    from plotext import _utility  # noqa: PLC0415

    drawn = [(c, [p for p in c.points if isfinite(p.value)]) for c in curves]
    places = _places([p for _, points in drawn for p in points])
    if len(places) < 2:
        return
    # plotext's own goes through a set: the labels that find room changed with Python's hash seed.
    _utility.no_duplicates = lambda data: list(dict.fromkeys(data))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(min(width, WIDEST), HEIGHT)
    named = sorted(places, key=lambda label: places[label])
    ticks = [named[round(i * (len(named) - 1) / (TICKS - 1))] for i in range(TICKS)]
    plotext.xticks([places[label] for label in ticks], ticks)
    values = [p.value for _, points in drawn for p in points]
    if max(values) - min(values) < 1e-9 * max(
        1.0, *map(abs, values)
    ):  # nothing that a chart could tell apart
        plotext.ylim(min(values) - 0.5, max(values) + 0.5)
    legend = []
    for (curve, points), mark, colour in zip(drawn, MARKS, COLOURS, strict=False):
        places_of = [places[p.label] for p in points]
        plotext.plot(places_of, [p.value for p in points], marker=mark, color=colour)
        better = "" if curve.higher_is_better else " (lower is better)"
        legend.append(Text.assemble((mark, colour), f" {curve.name}{better}"))
    chart = plotext.build()
    yield Text.from_ansi(chart.translate(ASCII) if ascii_only else chart)
    yield from legend


def _places(points: Sequence[CurvePoint]) -> dict[str, float]:
    """Label -> x: its step where all points have one, else its place in order."""
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


def _scores(curves: Sequence[Curve], title: str) -> Sheet:
    """A row per curve: its checkpoints, the change over all, and the best point.

    `!` marks a point that shows the score to be worse, `~` one whose requests or scoring differ from the point before.
    """
    steps = list(dict.fromkeys(p.label for c in curves for p in c.points))
    sheet = Sheet(title, "score", *steps, "change", "best at", turns=True)
    for curve in curves:
        points = {p.label: p for p in curve.points}
        marks = {x: "!" if p.worse else MARK if p.differs else "" for x, p in points.items()}
        values = (f"{points[x].value:.4f}{marks[x]}" if x in points else "-" for x in steps)
        change = f"{curve.points[-1].value - curve.points[0].value:+.4f}" if len(curve.points) > 1 else "-"
        best = curve.best.label if len(curve.points) > 1 else "-"
        sheet.add(curve.name, *values, change, best, style="red" if curve.points[-1].worse else "")
    return sheet


def _costs(series: Series) -> Sheet:
    """A row per checkpoint: makespan, what it leaves out, GPU time, cost at the given price."""
    several = len({p.suite for p in series.points}) > 1
    sheet = Sheet("Checkpoints", "step", "suite", "status", "makespan", "paused", "GPU s", "cost")
    for point in series.points:
        gpu = "-" if point.gpu_seconds is None else f"{point.gpu_seconds:.1f}"
        cost = "-" if point.cost is None else f"{point.cost:.2f}" if point.cost >= 1 else f"{point.cost:.4f}"
        sheet.add(
            point.label,
            point.suite if several else "",
            point.status if point.status != "done" else "",
            seconds(point.makespan_seconds),
            seconds(point.paused_seconds) if point.paused_seconds else "",
            gpu,
            cost if series.gpu_hour_price is not None else "",
        )
    return sheet


def _show_differences(console: Console, found: Iterable[tuple[str, str, str]]) -> None:
    """Print a line per reason. `found`: where scores are not comparable with which others, how they differ, a score."""
    alike: dict[tuple[str, str], dict[str, None]] = {}
    for where, what, name in found:
        alike.setdefault((where, what), {})[name] = None
    for (where, what), names in alike.items():
        _say(console, f"{MARK} {where}: {what}: {', '.join(names)}", "yellow")


def _other(what: str, before: int | None, after: int | None) -> str:
    """How scores differ. `before`, `after`: documents."""
    if what == "requests" and before is not None and after is not None and before != after:
        return f"over {after} documents, not {before}"
    return WHAT[what]


def show_series(console: Console, series: Series) -> None:
    """Print what each checkpoint took, then curves, scores, since when one is worse, and breaks in them."""
    parts: list[RenderableType] = [_costs(series)]
    for suite in dict.fromkeys(p.suite for p in series.points):
        curves = [c for c in series.curves if c.suite == suite]
        charts = [
            line
            for alike in _by_scale(curves)
            for i in range(0, len(alike), len(MARKS))
            for line in plot(alike[i : i + len(MARKS)], console.width, ascii_only=console.options.ascii_only)
        ]
        parts += ["", Text(f"{suite}: learning curves", style="bold"), *charts] if charts else []
        parts += ["", _scores(curves, f"{suite}: scores by step")] if curves else []
    for part in (*parts, ""):
        console.print(part, highlight=False)
    differs = []
    for curve in series.curves:
        for before, point in pairwise(curve.points):
            if point.differs:
                what = _other(point.differs, before.documents, point.documents)
                differs.append((f"{point.label} is not comparable with {before.label}", what, curve.name))
            if point.worse:
                _say(console, f"{curve.name} is {fallen(point.worse, point)}", "red")
    _show_differences(console, differs)
    if any(point.yardstick is not None for curve in series.curves for point in curve.points):
        _say(console, ALONG.format(horizon=series.horizon), "dim")
    if series.superseded:
        many = "evaluations are" if series.superseded > 1 else "evaluation is"
        said = "left out: a later one has the same checkpoint and suite"
        _say(console, f"{series.superseded} earlier {many} {said}", "dim")


def fallen(worse: Worse, point: CurvePoint) -> str:
    """A verdict along a series with the levels: "worse since 41000 (95 %: …): 0.6813 before, 0.5100 at 42000"."""
    return f"{since(worse)}: {worse.mean:.4f} before, {point.value:.4f} at {point.label}"


def since(worse: Worse) -> str:
    """A verdict along a series: "worse since 41000 (95 %: 40000 to 42000)"."""
    return f"worse since {worse.since} (95 %: {worse.low} to {worse.high})"


def comparison(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per task and metric of `results.json` columns: each one's value, last minus first.

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
        change = None if first is None or last is None else last.value - first.value
        values, documents, stderrs, versions, shots = (
            [getattr(score, name, None) for score in found]
            for name in ("value", "documents", "stderr", "version", "n_shot")
        )
        rows.append(
            {
                "task": task,
                "metric": metric,
                "higher_is_better": next(s.higher_is_better for s in found if s is not None),
                "leaves": leaves_of(columns[-1], task),  # of a group
                "values": values,
                "change": change,
                "differs": differs,
                "documents": documents,
                "stderrs": stderrs,
                "versions": versions,
                "n_shot": shots,
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
    """Print a row per score: a column per evaluation, how the last stands to the first; then the evaluations' ids.

    `rows`: of `comparison`, with verdicts.
    """
    sheet = Sheet("", "score", *heads, "change (two-sided 95 %)", "verdict", turns=True)
    for row in rows:
        name = f"{row['task']}/{row['metric'].removesuffix(',none')}"
        said = ["", *(v["verdict"] for v in row["verdicts"])]
        values = (
            "-" if value is None else f"{value:.4f}{MARK if what else ''}{_short(said[i], i, len(heads))}"
            for i, (value, what) in enumerate(zip(row["values"], row["differs"], strict=True))
        )
        last = (row["verdicts"] or [{"verdict": "", "words": "-"}])[-1]  # none of one evaluation
        change = "-" if row["change"] is None else f"{row['change']:+.4f}"
        if "reach" in last:
            change += f" ± {last['reach']:.4f}"
        style = {"worse": "red", "better": "green"}.get(last["verdict"], "")
        sheet.add(name, *values, change, last["words"], style=style)
    print_parts(console, sheet, "")
    for head, evaluation in zip(heads, ids, strict=True):
        _say(console, f"{head}: {evaluation}")
    differs = [
        (
            f"{head} is not comparable with {heads[0]}",
            _other(what, row["documents"][0], row["documents"][i]),
            row["task"] + _other_facts(row, i),
        )
        for row in rows
        for i, (head, what) in enumerate(zip(heads, row["differs"], strict=True))
        if what
    ]
    _show_differences(console, differs)
    verdicts = {v["verdict"] for row in rows for v in row["verdicts"]}
    if verdicts & {"better", "worse", "no evidence"}:
        _say(console, MEANING, "dim")


def _short(verdict: str, i: int, count: int) -> str:
    """Behind a value between the first and the last column, which has its verdict beside it."""
    return f" {verdict}" if 0 < i < count - 1 and verdict in ("better", "worse") else ""


def _other_facts(row: Mapping[str, Any], i: int) -> str:
    """Version and n-shot of column `i` where they are known and not those of the first one, in brackets."""
    parts = []
    for facts, text in ((row["versions"], "version {}, not {}"), (row["n_shot"], "{}-shot, not {}-shot")):
        if None not in (facts[0], facts[i]) and facts[0] != facts[i]:
            parts.append(text.format(facts[i], facts[0]))
    return f" ({'; '.join(parts)})" if parts else ""


def _say(console: Console, text: str, style: str = "") -> None:
    print_parts(console, Parts(text, style=style))


def lane_table(lanes: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row per group of GPUs that run the same data sets, with each GPU's number of shards."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for lane in lanes:
        names = tuple(dict.fromkeys(str(s["dataset"]) for s in lane["shards"]))
        alike.setdefault(names, []).append((int(lane["gpu"]), len(lane["shards"])))
    sheet = Sheet("", "GPUs", "shards each", "data sets, in order")
    for names, members in alike.items():
        counts = sorted({count for _, count in members})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        sheet.add(_ranges([gpu for gpu, _ in members]), each, Parts(first_of(names, 8)))
    return sheet


def _ranges(numbers: Sequence[int]) -> str:
    """0-2,5 of 0, 1, 2 and 5."""
    runs: dict[int, list[int]] = {}
    for place, number in enumerate(sorted(numbers)):
        runs.setdefault(number - place, []).append(number)
    ranges = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs.values()]
    return ",".join(ranges[:4]) + (",..." if len(ranges) > 4 else "")
