"""The score table: lm-eval's values with what lm_eval prints beside them. For `eval` and `report`.

Rule: figures are never cut. Where the table is wider than the terminal, its headings get shorter;
where that does not help, a task's values stand below its name. A terminal without UTF-8 gets `^`, `v` and `+-`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from coordinator.report.learning_curves import ScoreValue, scores_of

HEADS = ("task", "version", "n-shot", "n", "filter", "metric", "", "value")
SHORT_HEADS = ("task", "ver", "shot", "n", "filter", "metric", "", "value")
UNBOUNDED = 10_000  # columns: wider than any table


def plain_table(title: str | None = None, *, tight: bool = False) -> Table:
    """A table without lines between columns, which would take columns from figures. `tight`: one blank."""
    return Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        padding=0 if tight else (0, 1),
        show_edge=not tight,
    )


def natural_width(console: Console, table: Table) -> int:
    """Columns at which no cell of it is folded or cut."""
    return Measurement.get(console, console.options.update_width(UNBOUNDED), table).maximum


def fits(console: Console, table: Table) -> bool:
    """Is no cell of it folded or cut at the console's width?"""
    return natural_width(console, table) <= console.width


def score_table(console: Console, results: Mapping[str, Any], title: str = "Scores") -> RenderableType:
    """A row per score, groups last; lines where the table does not fit."""
    groups = results.get("groups", {})
    scores = sorted(scores_of(results), key=lambda score: score.task in groups)
    ways = results.get("higher_is_better", {})
    marks = ("^", "v") if console.options.ascii_only else ("↑", "↓")
    arrows = {
        score.name: "" if better is None else marks[not better]
        for score in scores
        for better in [ways.get(score.task, {}).get(score.metric)]
    }
    plus_minus = "+-" if console.options.ascii_only else "±"
    for heads in (HEADS, SHORT_HEADS):
        table = _table(scores, arrows, [*heads, f"{plus_minus} stderr"], title)
        if fits(console, table):
            return table
    return Text("\n".join([title, *_lines(scores, arrows, plus_minus, console.width)]))


def _table(scores: list[ScoreValue], arrows: Mapping[str, str], heads: list[str], title: str) -> Table:
    table = plain_table(title, tight="n-shot" not in heads)
    filtered = any(score.filter != "none" for score in scores)
    for name in heads:
        right = name in ("n-shot", "shot", "n", "value", heads[-1])
        if name != "filter" or filtered:
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
    before = ""
    for score in scores:
        head = ("", "", "", "") if score.task == before else (score.task, *_facts(score))
        which = [] if not filtered else ["" if score.filter == "none" else score.filter]
        table.add_row(*head, *which, score.metric, arrows[score.name], *_figures(score))
        before = score.task
    return table


def _lines(scores: list[ScoreValue], arrows: Mapping[str, str], plus_minus: str, width: int) -> Iterator[str]:
    """A line per task and one per score; two per score where one is too short."""
    names = {s.name: f"{s.measure} {arrows[s.name]}" for s in scores}
    figures = {s.name: " ".join([*_figures(s)]).replace(" ", f" {plus_minus} ") for s in scores}
    longest = max(map(len, names.values()), default=0)
    aligned = 4 + longest + max(map(len, figures.values()), default=0) <= width
    before = ""
    for score in scores:
        if score.task != before:
            version, shots, documents = _facts(score)
            facts = [f"version {version}" if version else "", f"{shots}-shot" if shots else ""]
            facts.append(f"n {documents}" if documents else "")
            yield from _task_lines(score.task, ", ".join(filter(None, facts)), width)
        before = score.task
        name, value = names[score.name], figures[score.name]
        yield f"  {name:<{longest}}  {value}" if aligned else f"  {name}\n    {value}"


def _task_lines(task: str, facts: str, width: int) -> list[str]:
    one = f"{task}  {facts}".rstrip()
    return [one] if len(one) <= width else [task, f"  {facts}"]


def _facts(score: ScoreValue) -> tuple[str, str, str]:
    """Version, n-shot and number of documents as shown; "" where lm-eval gives none."""
    return (
        score.version,
        "" if score.n_shot is None else str(score.n_shot),
        "" if score.documents is None else str(score.documents),
    )


def _figures(score: ScoreValue) -> tuple[str, str]:
    return f"{score.value:.4f}", "-" if score.stderr is None else f"{score.stderr:.4f}"
