"""The table of evaluations in a terminal: a row each, notes below, and tasks and lanes of running ones. Pure.

Rule: reads only `EvaluationView`. Words instead of codes; no id, figure or command is cut, and what has no space is counted. `status`
prints it; `watch`, `eval` and the daemon redraw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from coordinator.base.clock import SKEW_SECONDS
from coordinator.base.words import (
    by_reason,
    clock_time,
    first_of,
    format_estimate,
    format_score,
    format_seconds,
)
from coordinator.interface.cli.screen.evaluation_views import (
    EvaluationView,
    back_off_seconds_left,
    held_jobs,
    seconds_left,
)
from coordinator.results.report.scores import ScoreValue
from coordinator.results.report.tables import Parts, Sheet
from coordinator.runtime.summary import PAUSED, STOPPED_ADVICE, Lane, Summary

COLUMN_HEADS = (
    "evaluation",
    "step",
    "checkpoint",
    "suite",
    "state",
    "scored",
    "shards",
    "trials",
    "time",
    "left",
    "scores",
)
IN_ID = ("checkpoint", "suite")  # columns that the id includes
MOST_SCORES = 6  # per row
MOST_TASKS, FEW_TASKS = 12, 3  # latest scored tasks shown of a running evaluation
MOST_LANES = 16  # rows of lanes; beyond it, the screen shows a row per node
LEAST_LINES = 3  # minimum for the details of an evaluation
STYLES = {"inferring": "green", "pending": "dim", "no shard": "dim"}


def evaluation_table(
    found: Sequence[EvaluationView], now: float, *, whole: bool = False
) -> Iterator[RenderableType]:
    """Yield a row per evaluation; below the table, what they wait for and their errors. `whole`: include overcome failures."""
    sheet = Sheet("", *COLUMN_HEADS, without=[IN_ID, (*IN_ID, "trials"), (*IN_ID, "trials", "step")])
    for one in found:
        summary, going = one.summary, one.summary.ended_at is None
        eta = seconds_left(summary, now) if going and summary.trials and not one.stopped else None
        taken = one.age(now) if going or summary.makespan_seconds is None else summary.makespan_seconds
        scores = [score_in_brief(score) for score in summary.main_scores]
        scores += [f"{one.task} {one.verdict}" for one in summary.screened]
        sheet.add(
            summary.evaluation_id,
            "-" if summary.step is None else str(summary.step),
            "/".join(Path(summary.checkpoint).parts[-2:]),
            summary.suite,
            _state(one, now),
            f"{summary.scored}/{summary.entries}",
            f"{summary.shards_done}/{summary.shards}" if going and summary.shards else "",
            str(summary.trials) if going and summary.trials else "",
            format_seconds(taken),
            "" if eta is None else format_estimate(eta),
            Parts(
                *scores[:MOST_SCORES], f"and {len(scores) - MOST_SCORES} more" * (len(scores) > MOST_SCORES)
            ),
            style=_style(one),
        )
    yield sheet
    for one in found:
        name = f"{one.summary.evaluation_id}: " if len(found) > 1 else ""
        notes = _notes(one, now, whole=whole)
        yield from (Parts(f"{name}{what}", style=style) for what, style in notes if what)


def _state(one: EvaluationView, now: float) -> str:
    summary = one.summary
    if summary.ended_at is None:
        if one.halt is not None and one.halt.word == PAUSED:
            return f"paused since {clock_time(one.halt.since, now)}"
        since = clock_time(summary.accepted_at + one.age(now), now)
        return f"stopped since {since}" if one.stopped and not one.fault else one.stage
    missed = summary.entries - summary.scored
    word = one.stage if one.stage == "cancelled" or not missed else f"{missed} failed"
    future = summary.ended_at > now + SKEW_SECONDS  # from a clock that was wrong
    return f"{word} {'at an unknown time' if future else clock_time(summary.ended_at, now)}"


def _style(one: EvaluationView) -> str:
    if one.fault or (one.stage == "ended" and one.summary.scored < one.summary.entries):
        return "red"
    if one.summary.ended_at:
        return "dim" if one.stage == "cancelled" else ""
    return "yellow" if one.stopped or one.stage in ("waits", PAUSED) else "green"


def _notes(one: EvaluationView, now: float, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield what it waits for and its errors, worst first, with the colour."""
    summary = one.summary
    yield one.fault, "red"
    for name, why in {**by_reason(summary.errors), **one.back_offs(now)}.items():
        yield f"{name}: {why}", "dim" if one.stage == "cancelled" else "red"
    if one.halt is not None and one.halt.word == PAUSED:
        yield f"paused: {one.halt.why}", "yellow"
    if one.stopped and not one.fault:
        yield STOPPED_ADVICE + f"; {one.jobs_left} of its jobs still run" * bool(one.jobs_left), "yellow"
    yellow = [] if one.stopped else one.waits_for(now)
    if (left := back_off_seconds_left(summary, now)) is not None and not one.stopped:
        yellow.insert(0, f"all nodes are in back-off: it waits for {format_seconds(left)} more")
    held = held_jobs(summary, now, timed=not one.stopped)
    yellow += [f"{names}: {why}" for names, why in by_reason(held).items()]
    if whole or not summary.ended_at:  # once it has ended, they cost time but no score
        yellow += [f"{name} {why}" for name, why in summary.stragglers.items()]
        mended = " and was made up for" if summary.ended_at else ""
        failed = by_reason(summary.failed_jobs)
        yellow += [f"{names} failed{mended}: {why}" for names, why in failed.items()]
    yellow += [summary.fell_to_chance] if summary.fell_to_chance else []
    for name, why in one.trackers.items():
        yellow.append(f"not in {name}: {why} (`evalspan export --left` tries again)")
    yield from ((what, "yellow") for what in yellow)
    if summary.not_asked and (whole or not summary.ended_at):
        yield f"not asked at this checkpoint (`every`): {first_of(summary.not_asked)}", "dim"


def evaluation_details(summary: Summary, *, whole: bool) -> Iterator[RenderableType]:
    """Yield progress, lanes, metric jobs and tasks of a running evaluation. Not `whole`: lanes by node, the last scores."""
    if summary.shards:
        bar = ProgressBar(total=summary.shards, completed=summary.shards_done, width=60)
        yield Padding(bar, 0, expand=False)
    yield from _lanes(summary, by_node=not whole)
    if summary.metric_jobs:
        counts = summary.metric_jobs_open
        kinds = [f"{what}{f' x {count}' if count > 1 else ''}" for what, count in counts.items()]
        waiting = sum(counts.values())
        yield Parts(f"metric jobs: {waiting} open", f"{summary.metric_jobs - waiting} done", *kinds)
    most = MOST_TASKS if whole else FEW_TASKS
    scored = [task for task in summary.tasks if task.state == "scored"]
    tasks = Sheet("", f"scored {summary.scored} of {summary.entries} tasks", "")
    for task in scored[-most:]:
        own = {value.task for value in task.scores} == {task.name}
        tasks.add(
            task.name, Parts(*(f"{'' if own else f'{v.task} '}{value_in_words(v)}" for v in task.scores))
        )
    yield tasks
    if summary.scored > most:
        yield Text(f"and {summary.scored - most} before these", style="dim")
    waiting_for: dict[str, list[str]] = {}
    for task in summary.tasks:
        if task.state not in ("scored", "failed"):
            waiting_for.setdefault(task.state, []).append(task.name)
    yield from (Parts(f"{word}: {first_of(names, 6)}", style="dim") for word, names in waiting_for.items())
    yield from (Parts(f"! {warning}", style="yellow") for warning in summary.warnings[-3:])


def _lanes(summary: Summary, *, by_node: bool) -> Iterator[Sheet]:
    if summary.lanes and len(summary.lanes) <= MOST_LANES and not by_node:
        sheet = Sheet("", "lane", "trial", "task", "batch")
        for lane in summary.lanes:
            sheet.add(lane.lane, lane.doing, lane.task, lane.batch, style=STYLES.get(lane.doing, "yellow"))
        yield sheet
        return
    nodes = summary.lanes_by_node or _by_node(summary.lanes)
    sheet = Sheet("", "node", "trials")
    for name, doing in list(nodes.items())[:MOST_LANES]:
        sheet.add(name, Parts(*(f"{count} {what}" for what, count in Counter(doing).most_common())))
    if len(nodes) > MOST_LANES:
        sheet.add(f"and {len(nodes) - MOST_LANES} more nodes", "")
    yield sheet


def _by_node(lanes: Iterable[Lane]) -> dict[str, Counter[str]]:
    nodes: dict[str, Counter[str]] = {}
    for lane in lanes:
        nodes.setdefault(lane.lane.rpartition("/")[0], Counter())[lane.doing] += 1
    return nodes


def compose_screen(
    console: Console,
    runs: Sequence[EvaluationView],
    over: Sequence[EvaluationView],
    below: Sequence[RenderableType],
    now: float,
    height: int | None,
) -> RenderableType:
    """Return the table, `runs` in as much detail as fits, then `below`. `height`: lines of the terminal; None: any."""
    found = [*runs, *over]
    for levels in ([True] * len(runs), [False] * len(runs), [False] * bool(runs), []):
        if levels and height is not None and len(found) + LEAST_LINES * len(levels) > height:
            continue
        more: list[RenderableType] = []
        for one, whole in zip(runs, levels, strict=False):
            more += ["", *([Text(one.summary.evaluation_id, style="bold")] if len(found) > 1 else [])]
            more += evaluation_details(one.summary, whole=whole)
        made = Group(*evaluation_table(found, now), *more, *below)
        if height is None or _lines(console, made) < height:
            return made
    shown = list(found)
    while len(shown) > 1 and _lines(console, made) >= (height or 1):
        shown.pop()
        left = Text(f"and {len(found) - len(shown)} more: `evalspan status` lists all", style="dim")
        made = Group(*evaluation_table(shown, now), left, *below)
    return made


def _lines(console: Console, made: RenderableType) -> int:
    return len(console.render_lines(made, pad=False))


def value_in_words(score: ScoreValue) -> str:
    error = "" if score.stderr is None else f" ± {format_score(score.stderr)}"
    return f"{score.measure} {format_score(score.value)}{error}"


def score_in_brief(score: ScoreValue) -> str:
    """Format task, metric and value; the error is in the report."""
    return f"{score.task} {score.metric} {format_score(score.value)}"
