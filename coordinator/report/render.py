"""Reports in a terminal: what an evaluation took, then its scores, then what failed. For `eval` and `report`.

Rule: no arithmetic; a figure is shown with its unit, an unknown one as a dash. Scores end the output,
so that they are on the screen; only failures, on which a person must act, follow them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.base.words import first_of
from coordinator.cluster.slurm_reasons import in_words
from coordinator.report.gpu_use import DRAINED, GpuUse
from coordinator.report.judge_cost import JudgeTask, JudgeUse
from coordinator.report.measurements import Report
from coordinator.report.scores import fits, plain_table, score_table
from coordinator.report.tokens import TokenUse
from evaljobs.contract.names import Cut

CANCELLED = "cancelled: "  # begins the error of a task that a cancellation has ended
NARROW = 72  # columns below which the summary leaves out its notes
LANES = 64  # lanes that are drawn


def seconds(value: float | None) -> str:
    """A duration in s, min or h; a dash for None."""
    if value is None:
        return "-"
    value = max(value, 0.0)  # two clocks may disagree by a moment
    if value < 100:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60}:{int(value) % 60:02d} min"
    return f"{int(value) // 3600}:{int(value) // 60 % 60:02d} h"


def by_reason(errors: Mapping[str, str]) -> dict[str, str]:
    """Joined names -> their common reason, so 60 cancelled tasks take one line. Three names at most."""
    names: dict[str, list[str]] = {}
    for name, why in errors.items():
        names.setdefault(why, []).append(name)
    return {first_of(alike, 3): why for why, alike in names.items()}


def size(value: int) -> str:
    number = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def count(value: float) -> str:
    """A number of tokens in three digits."""
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} G"


def summary(report: Report, gpu_hour_price: float | None = None, *, notes: bool = True) -> Table:
    """Makespan, bound, stages, GPU seconds and cost, a line each; without `notes` the figures alone."""
    table = Table(show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    if notes:
        table.add_column(overflow="fold")  # a node's name is never cut
    for name, figure, note in _summary(report, gpu_hour_price):
        style = "bold" if name == "makespan" else ""
        table.add_row(name, figure, *([note] if notes else []), style=style)
    return table


def _summary(report: Report, gpu_hour_price: float | None) -> Iterator[tuple[str, str, str]]:
    stages = report.stages
    ratio = _ratio(report)
    yield "makespan", seconds(report.makespan_seconds), "; ".join(filter(None, (ratio, *absence(report))))
    policy = "" if report.plan_policy == "evalspan" else f", planned by {report.plan_policy}"
    yield "  predicted", seconds(report.predicted_makespan_seconds), f"from the plan on, by the prior{policy}"
    yield "build requests", seconds(stages.build), "" if stages.build is not None else "reused"
    rungs = ", ".join(f"{n}: {r}" for n, r in list(report.nodes.items())[:4]) + (
        " ..." if len(report.nodes) > 4 else ""
    )
    read = f"{size(report.storage_bytes)} read from storage; {rungs}" if report.nodes else ""
    yield "staging", seconds(stages.staging), read
    if report.staged_ahead:
        waited = ", ".join(f"{n}: {seconds(s)}" for n, s in list(report.staged_ahead.items())[:4])
        more = " ..." if len(report.staged_ahead) > 4 else ""
        yield "  ahead", "", f"staged before GPUs came free, {waited}{more}"
    why = in_words(stages.waited_for)
    yield "queue wait", seconds(stages.queue_wait), "longest of the trials" + (f": {why}" if why else "")
    parts = (stages.load_import, stages.load_weights, stages.load_warm_up)
    split = "import {}, load {}, warm-up {}".format(*map(seconds, parts))
    yield "import + load", seconds(stages.load), f"mean of the trials: {split}" if stages.load else ""
    yield "inference", seconds(stages.inference), f"{len(report.shards)} shards"
    if report.tokens is not None:
        yield from _tokens(report.tokens)
    yield "metric", seconds(stages.metric), "CPU seconds of execute and score jobs"
    yield "  tail", seconds(stages.metric_tail), "after the last response"
    busy = f"{100 * report.gpu_busy_fraction:.0f} % inference" if report.gpu_busy_fraction is not None else ""
    yield f"{_held(report)} seconds", seconds(report.gpu_seconds), busy
    if report.judge is not None:
        yield from _judge(report.judge)
    if gpu_hour_price is not None:
        yield "cost", f"{report.gpu_seconds / 3600 * gpu_hour_price:.4f}", f"at {gpu_hour_price:g} a GPU hour"


def _tokens(tokens: TokenUse) -> Iterator[tuple[str, str, str]]:
    """What a GPU second bought."""
    asked = f"{count(tokens.asked)} asked, {100 * abs(tokens.shared):.0f} % "
    asked += "more by padding" if tokens.shared < 0 else "saved by sharing"
    rate = f"; {count(tokens.per_second)} a second of inference" if tokens.per_second else ""
    yield "  input tokens", count(tokens.computed), asked + rate
    if tokens.generated:
        yield "  new tokens", count(tokens.generated), "generated, with the padding behind shorter answers"
    yield "  tokenising", seconds(tokens.tokenise_seconds), "of the inference"


def _judge(judge: JudgeUse) -> Iterator[tuple[str, str, str]]:
    """What the judge cost, in total and by task."""
    most = f" of at most {judge.max_cost:g}" if judge.max_cost is not None else ""
    yield "judge", f"{judge.cost:.4f}" if judge.priced else "-", f"by {judge.model}{most}"
    for name, task in judge.tasks.items():
        yield (
            f"  {name}",
            f"{task.cost:.4f}" if judge.priced else "-",
            ", ".join(filter(None, _judgements([task]))),
        )


def _judgements(tasks: Collection[JudgeTask]) -> Iterator[str]:
    """Judgements and tokens of these tasks together."""
    yield f"{sum(t.judgements for t in tasks)} judgements"
    for count, what in (
        (sum(t.reused for t in tasks), "paid for elsewhere"),
        (sum(t.missing for t in tasks), "could not be had"),
    ):
        yield f"{count} {what}" if count else ""
    yield f"{sum(t.prompt_tokens for t in tasks)} + {sum(t.completion_tokens for t in tasks)} tokens"


def gpu_table(report: Report) -> Table:
    """A row per trial: seconds that its GPUs were held, by cause, and how it ended where one did not end by itself."""
    table = plain_table(f"{_held(report)}s by cause")
    table.add_column("trial", overflow="fold")
    for name in ("held", "infer", "import", "load", "warm", "dump", "wait", "other", "shards"):
        table.add_column(name, justify="right", no_wrap=True)
    ends = any(_end(g) for g in report.gpus)
    if ends:
        table.add_column("ended", no_wrap=True)
    for g in report.gpus:
        parts = (g.held, g.infer, g.imports, g.load, g.warm, g.dump, g.wait, g.other)
        table.add_row(_lane_name(g), *(f"{p:.1f}" for p in parts), str(g.shards), *[_end(g)] * ends)
    return table


def gantt(report: Report, width: int) -> Text:
    """A line per trial: `.` import and load, `#` inference, blank idle."""
    if not report.gpus:
        return Text("")
    begin = min(g.started_at for g in report.gpus)
    span = max(max(g.started_at + g.held for g in report.gpus) - begin, 1e-9)
    text = Text(f"\nLanes over {seconds(span)}: # inference, . import and load\n", style="bold")
    longest = max(len(_lane_name(g)) for g in report.gpus[:LANES])
    for g in report.gpus[:LANES]:
        lane = _lane(report, g, begin, span, max(10, width - longest - 4))
        text.append(f"{_lane_name(g):>{longest}} |{lane}|\n", style="default")
    if len(report.gpus) > LANES:
        text.append(f"... and {len(report.gpus) - LANES} more\n")
    return text


def _held(report: Report) -> str:
    """What the trials held: slots where each that says its device has a CPU."""
    return "slot" if {g.device for g in report.gpus if g.device} == {"cpu"} else "GPU"


def _end(gpu: GpuUse) -> str:
    """How a trial ended; "" for one whose work was done."""
    return "" if gpu.ended == DRAINED else gpu.ended


def _lane_name(gpu: GpuUse) -> str:
    return gpu.trial.split("-", 3)[-1]


def _lane(report: Report, gpu: GpuUse, begin: float, span: float, width: int) -> str:
    cells = [" "] * width

    def paint(start: float, length: float, mark: str) -> None:
        first = int((start - begin) / span * width)
        last = int((start + length - begin) / span * width)
        for i in range(max(first, 0), min(last + 1, width)):
            cells[i] = mark

    shards = [s for s in report.shards if s.trial == gpu.trial]
    first = min((s.started_at - gpu.started_at for s in shards), default=gpu.held)
    paint(gpu.started_at, min(first, gpu.imports + gpu.load + gpu.warm + gpu.other), ".")
    for s in shards:
        paint(s.started_at, s.seconds, "#")
    return "".join(cells)


def gpu_lines(report: Report) -> Text:
    text = Text(f"\n{_held(report)}s: seconds held, inferring\n", style="bold")
    for g in report.gpus:
        end = f", {_end(g)}" if _end(g) else ""
        text.append(f"{_lane_name(g)}: {g.held:.1f}, {g.infer:.1f}{end}\n", style="default")
    return text


def mode_lines(report: Report) -> list[str]:
    """A sentence on fast mode, and one on batch sizes and budgets of single tasks."""
    lines = []
    if report.mode == "fast":
        budget = "" if report.token_budget is None else f", {report.token_budget} tokens a forward pass"
        lines.append(f"mode fast{budget}: not to be compared with scores in mode exact")
    own: dict[str, list[str]] = {}
    for task, cut in report.cuts.items():
        parsed = Cut.parse(cut)
        budget = "" if parsed.token_budget is None else f" and token budget {parsed.token_budget}"
        own.setdefault(f"batch size {parsed.batch_size}{budget}", []).append(task)
    return lines + [f"{what}: {first_of(tasks)}" for what, tasks in own.items()]


def reuse_lines(report: Report) -> list[str]:
    """A sentence for each earlier evaluation whose responses were reused."""
    alike: dict[str, list[str]] = {}
    for task, evaluation in report.reused.items():
        alike.setdefault(evaluation, []).append(task)
    lines = [
        f"responses of {evaluation} were used again, since the requests are the same ({', '.join(tasks)}): "
        "no GPU ran for them"
        for evaluation, tasks in alike.items()
    ]
    if report.reused_scores:
        lines.append(
            f"scores were used again, too, since the task and its data are as they were: {', '.join(report.reused_scores)}"
        )
    return lines


def _ratio(report: Report) -> str:
    bound = seconds(report.lower_bound_seconds)
    after = ", after the wait for a GPU," if report.waited_seconds >= 1 else ""
    return f"{report.ratio:.2f} x{after} the lower bound of {bound}" if report.ratio else ""


def absence(report: Report) -> Iterator[str]:
    """What the makespan leaves out, and what it does not: waits, and the time in which no coordinator ran the evaluation."""
    went_on = report.away_seconds - report.paused_seconds
    if report.waited_seconds >= 1:
        yield f"{seconds(report.waited_seconds)} of it waited for a free GPU"
    if report.limited_seconds >= 1:
        yield f"a limit on jobs kept jobs out for {seconds(report.limited_seconds)}"
    if report.paused_seconds >= 1:
        yield f"without {seconds(report.paused_seconds)} in which no coordinator ran and no job worked"
    if went_on >= 1:
        yield f"jobs went on for {seconds(went_on)} without a coordinator"


def brief(report: Report, gpu_hour_price: float | None = None) -> Iterator[list[str]]:
    """The accounting in a few lines, each in parts that belong together."""
    running = " so far" if report.status == "running" else ""
    predicted = report.predicted_makespan_seconds
    yield [
        f"makespan {seconds(report.makespan_seconds)}{running}",
        _ratio(report),
        *absence(report),
        f"predicted {seconds(predicted)} from the plan on" if predicted else "",
    ]
    busy = "" if report.gpu_busy_fraction is None else f"{100 * report.gpu_busy_fraction:.0f} % in inference"
    cost = ""
    if gpu_hour_price is not None:
        cost = f"cost {report.gpu_seconds / 3600 * gpu_hour_price:.4f} at {gpu_hour_price:g} a GPU hour"
    yield [f"{_held(report)} time {seconds(report.gpu_seconds)}", busy, cost]
    if report.judge is not None:
        (_, figure, by), *_ = _judge(report.judge)
        yield [f"judge {figure}", by, *_judgements(report.judge.tasks.values())]
    stages = {
        "requests": report.stages.build,
        "staging": report.stages.staging,
        "queue": report.stages.queue_wait,
        "import + load": report.stages.load,
        "inference": report.stages.inference,
        "scores after it": report.stages.metric_tail,
    }
    taken = [f"{name} {seconds(its)}" for name, its in stages.items() if its is not None]
    yield [*taken[:-1], *(f"{last} (they overlap)" for last in taken[-1:])]


def folded(parts: Iterable[str], width: int) -> str:
    """Parts joined by commas, in lines of `width`; a figure and its unit stay on one line."""
    whole = ", ".join(part.replace(" ", "\xa0") if len(part) < width // 2 else part for part in parts if part)
    whole = re.sub(r"(\d) (s|min|h|x|%)(?!\w)", "\\1\xa0\\2", whole)
    lines = textwrap.wrap(
        whole, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\xa0", " ")


def accounting(
    console: Console, report: Report, gpu_hour_price: float | None, *, verbose: bool
) -> Iterator[RenderableType]:
    """What the evaluation took: a few lines, or all tables. A narrow terminal gets the figures of both."""
    narrow = console.width < NARROW
    if narrow or not verbose:
        yield from (
            Text(folded(parts, console.width)) for parts in brief(report, gpu_hour_price) if any(parts)
        )
    if not verbose:
        return
    yield Text(f"Makespan of {report.evaluation_id}", style="italic")
    yield summary(report, gpu_hour_price, notes=not narrow)
    if report.gpus:
        table = gpu_table(report)
        yield table if fits(console, table) else gpu_lines(report)
        yield gantt(report, console.width)


def show(
    console: Console,
    report: Report,
    results: Mapping[str, Any] | None,
    gpu_hour_price: float | None = None,
    *,
    ran: bool = True,
    verbose: bool = False,
) -> None:
    """Print what it took, warnings, scores, and last what failed.

    `ran=False`: nothing ran now, so times and costs are left out. `verbose`: accounting by GPU and
    stage.
    """
    parts: list[RenderableType] = []
    if ran:
        parts += accounting(console, report, gpu_hour_price, verbose=verbose)
    parts += [Text(line) for line in (*mode_lines(report), *reuse_lines(report))]
    parts += [Text(f"warning: {w}", style="yellow") for w in report.warnings]
    if results is not None and results.get("results"):
        title = f"Scores of {report.evaluation_id}"
        parts += [Text(""), score_table(console, results, title)]
    failed = {e.name: e.error for e in report.entries if e.status == "failed"}
    if report.status == "cancelled":
        failed = {name: why for name, why in failed.items() if not why.startswith(CANCELLED)}
        said = f"cancelled; the same `evalspan eval …` or `evalspan retry {report.evaluation_id}` goes on from what is scored"
        parts.append(Text(said, style="yellow"))
    parts += [Text(f"FAILED {names}: {why}", style="bold red") for names, why in by_reason(failed).items()]
    if failed and report.status != "cancelled":
        one = report.evaluation_id
        parts.append(
            Text(
                f"`evalspan logs {one} NAME` prints a job's log; mend the cause, then `evalspan retry {one}`"
            )
        )
        parts.append(
            Text("(a change in a task's own files makes a new evaluation: type `evalspan eval …` again)")
        )
    for entry in report.entries:
        if entry.status != "failed" and entry.unscored:
            items = "item counts" if entry.unscored == 1 else "items count"
            text = f"PARTLY {entry.name}: {entry.unscored} {items} in no mean; the warnings say why"
            parts.append(Text(text, style="bold red"))
    for part in parts:
        console.print(part, soft_wrap=False, highlight=False)
