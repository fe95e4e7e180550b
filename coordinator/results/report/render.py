"""Reports in a terminal: costs of an evaluation, then its scores, then failures. For `eval` and `report`.

Rule: no arithmetic; a figure is shown with its unit, an unknown one as a dash. Scores end the output, so that they stay on
the screen; only failures, which a person must act on, follow them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.text import Text

from coordinator.base.words import by_reason, first_of, format_score, format_seconds
from coordinator.decide.evaluation.records import ScreenScore
from coordinator.results.report.measurements import Report
from coordinator.results.report.scores import scores_of, screened_in
from coordinator.results.report.tables import Parts, Sheet, print_parts
from coordinator.results.report.usage import DRAINED, GpuUse, JudgeTask, JudgeUse, TokenUse, slot_word
from coordinator.site.cluster.slurm_limits import limit_in_words
from evaljobs.contract.columns import DENSE
from evaljobs.contract.names import Cut

CANCELLED = "cancelled: "  # prefix of the error of a task that a cancellation ended
MAX_LANES = 64  # lanes drawn
LANE_WIDTH = 100  # columns of the widest lane


def format_bytes(value: int) -> str:
    number = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def format_tokens(value: float) -> str:
    """Format a number of tokens in three digits."""
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} G"


def summary_sheet(report: Report, gpu_hour_price: float | None = None, *, verbose: bool = False) -> Sheet:
    """Return makespan, GPU seconds and cost, one row each; `verbose`: include each stage, and the tokens."""
    sheet = Sheet("", "", "", "")
    for name, figure, *notes in _summary(report, gpu_hour_price, verbose=verbose):
        sheet.add(name, figure, Parts(*notes), style="bold" if name == "makespan" else "")
    return sheet


def _summary(report: Report, gpu_hour_price: float | None, *, verbose: bool) -> Iterator[tuple[str, ...]]:
    """Yield name, figure and notes of each row."""
    running = "so far" if report.status == "running" else ""
    yield "makespan", format_seconds(report.makespan_seconds), running, _ratio(report), *absence_lines(report)
    policy = "" if report.plan_policy == "evalspan" else f"planned by {report.plan_policy}"
    if report.predicted_makespan_seconds is not None:
        yield (
            "predicted",
            format_seconds(report.predicted_makespan_seconds),
            "by the priors, when the plan was made",
            policy,
        )
    yield from _stages(report) if verbose else [("stages", "", *_stages_in_brief(report))]
    busy = f"{100 * report.gpu_busy_fraction:.0f} % inference" if report.gpu_busy_fraction is not None else ""
    yield f"{slot_word(g.device for g in report.gpus)} time", format_seconds(report.gpu_seconds), busy
    if report.judge is not None:
        yield from _judge(report.judge, verbose=verbose)
    if gpu_hour_price is not None:
        yield "cost", f"{report.gpu_seconds / 3600 * gpu_hour_price:.4f}", f"at {gpu_hour_price:g} a GPU hour"


def _stages_in_brief(report: Report) -> list[str]:
    stages = report.stages
    known = {
        "requests": stages.build,
        "staging": stages.staging,
        "queue": stages.queue_wait,
        "import + load": stages.load,
        "inference": stages.inference,
        "scores after it": stages.metric_tail,
    }
    taken = [f"{name} {format_seconds(its)}" for name, its in known.items() if its is not None]
    return [*taken, "they overlap"] if len(taken) > 1 else taken


def _stages(report: Report) -> Iterator[tuple[str, ...]]:
    """Yield a row per stage, with what it read and waited for."""
    stages = report.stages
    yield "build requests", format_seconds(stages.build), "" if stages.build is not None else "reused"
    rungs = [f"{node}: {rung}" for node, rung in report.nodes.items()]
    read = f"{format_bytes(report.storage_bytes)} read from storage" if rungs else ""
    yield "staging", format_seconds(stages.staging), read, first_of(rungs, 4)
    if report.environment_bytes:
        read = f"{format_bytes(report.environment_bytes)} of libraries read ahead of the trials"
        yield "  environment", format_seconds(report.environment_seconds), read
    if report.staged_ahead:
        waited = [f"{node}: {format_seconds(its)}" for node, its in report.staged_ahead.items()]
        yield "  ahead", "", "staged before GPUs came free", first_of(waited, 4)
    yield (
        "queue wait",
        format_seconds(stages.queue_wait),
        "longest of the trials",
        limit_in_words(stages.waited_for),
    )
    parts = {"import": stages.load_import, "load": stages.load_weights, "warm-up": stages.load_warm_up}
    split = [f"{name} {format_seconds(its)}" for name, its in parts.items()]
    yield (
        "import + load",
        format_seconds(stages.load),
        *(["mean of the trials", *split] if stages.load else []),
    )
    yield "inference", format_seconds(stages.inference), f"{len(report.shards)} shards"
    if report.tokens is not None:
        yield from _tokens(report.tokens)
    yield "metric", format_seconds(stages.metric), "CPU seconds of execute and score jobs"
    yield "  tail", format_seconds(stages.metric_tail), "after the last response"


def _tokens(tokens: TokenUse) -> Iterator[tuple[str, ...]]:
    """Yield rows on what a GPU second bought."""
    share = (
        f"{100 * abs(tokens.shared):.0f} % {'more by padding' if tokens.shared < 0 else 'saved by sharing'}"
    )
    rate = f"{format_tokens(tokens.per_second)} a second of inference" if tokens.per_second else ""
    yield (
        "  input tokens",
        format_tokens(tokens.computed),
        f"{format_tokens(tokens.asked)} asked",
        share,
        rate,
    )
    if tokens.generated:
        yield (
            "  new tokens",
            format_tokens(tokens.generated),
            "generated, with the padding behind shorter answers",
        )
    yield "  tokenising", format_seconds(tokens.tokenise_seconds), "of the inference"


def _judge(judge: JudgeUse, *, verbose: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cost of the judge, in total and (`verbose`) by task."""
    most = f" of at most {judge.max_cost:g}" if judge.max_cost is not None else ""
    by = f"by {judge.model}{most}"
    yield "judge", f"{judge.cost:.4f}" if judge.priced else "-", by, *_judgements(judge.tasks.values())
    for name, task in judge.tasks.items() if verbose else ():
        yield f"  {name}", f"{task.cost:.4f}" if judge.priced else "-", *_judgements([task])


def _judgements(tasks: Collection[JudgeTask]) -> Iterator[str]:
    """Yield judgements and tokens of these tasks together."""
    yield f"{sum(t.judgements for t in tasks)} judgements"
    for number, what in (
        (sum(t.reused for t in tasks), "paid for elsewhere"),
        (sum(t.missing for t in tasks), "missing"),
    ):
        yield f"{number} {what}" if number else ""
    yield f"{sum(t.prompt_tokens for t in tasks)} + {sum(t.completion_tokens for t in tasks)} tokens"


def gpu_table(report: Report) -> Sheet:
    """Return a row per trial: seconds that its GPUs were held, by cause, and how it ended if not by itself."""
    names = ("held", "infer", "import", "load", "warm", "dump", "wait", "other", "shards", "ended")
    sheet = Sheet(f"{slot_word(g.device for g in report.gpus)}s by cause", "trial", *names)
    for g in report.gpus:
        parts = (g.held, g.infer, g.imports, g.load, g.warm, g.dump, g.wait, g.other)
        sheet.add(_lane_name(g), *(f"{p:.1f}" for p in parts), str(g.shards), _end(g))
    return sheet


class Lane:
    """A trial over time, as wide as its column: `.` import and load, `#` inference, blank idle."""

    def __init__(self, spans: Sequence[tuple[float, float, str]], whole: float) -> None:
        self._spans, self._whole = spans, whole

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(options.max_width, LANE_WIDTH)
        cells = [" "] * width
        for start, length, mark in self._spans:
            first, last = (int(at / self._whole * width) for at in (start, start + length))
            for i in range(max(first, 0), min(last + 1, width)):
                cells[i] = mark
        yield Text("".join(cells))

    def __rich_measure__(self, _console: Console, _options: ConsoleOptions) -> Measurement:
        return Measurement(10, LANE_WIDTH)


def gantt_sheet(report: Report) -> Sheet:
    """Return a lane per trial."""
    begin = min((g.started_at for g in report.gpus), default=0.0)
    whole = max([1e-9, *(g.started_at + g.held - begin for g in report.gpus)])
    title = f"Lanes over {format_seconds(whole)}: # inference, . import and load"
    if len(report.gpus) > MAX_LANES:
        title += f"; {len(report.gpus) - MAX_LANES} more trials are not drawn"
    sheet = Sheet(title, "", "")
    for g in report.gpus[:MAX_LANES]:
        shards = [s for s in report.shards if s.trial == g.trial]
        first = min((s.started_at - g.started_at for s in shards), default=g.held)
        before = (g.started_at - begin, min(first, g.imports + g.load + g.warm + g.other), ".")
        spans = [before, *((s.started_at - begin, s.seconds, "#") for s in shards)]
        sheet.add(_lane_name(g), Lane(spans, whole))
    return sheet


def _end(gpu: GpuUse) -> str:
    """Return how a trial ended; "" if its work was done."""
    return "" if gpu.ended == DRAINED else gpu.ended


def _lane_name(gpu: GpuUse) -> str:
    return gpu.trial.split("-", 3)[-1]


def mode_lines(report: Report) -> list[str]:
    """Return a sentence on tasks that were not run, one on fast mode, and one on batch sizes and budgets of single tasks."""
    lines = (
        [f"not asked at this checkpoint (`every`): {first_of(report.not_asked)}"] if report.not_asked else []
    )
    if report.mode == "fast":
        budget = "" if report.token_budget is None else f", {report.token_budget} tokens a forward pass"
        lines.append(f"mode fast{budget}: not to be compared with scores in mode exact")
    own: dict[str, list[str]] = {}
    for task, cut in report.cuts.items():
        parsed = Cut.parse(cut)
        budget = "" if parsed.token_budget is None else f" and token budget {parsed.token_budget}"
        own.setdefault(f"batch size {parsed.batch_size}{budget}", []).append(task)
    return lines + [f"{what}: {first_of(tasks)}" for what, tasks in own.items()]


def screen_table(screened: Sequence[ScreenScore], results: Mapping[str, Any], evaluation: str) -> Sheet:
    """A row per task of a screen evaluation: its estimate, and the answer to the question."""
    about = results["evalspan"]["screen"]
    sheet = Sheet(
        f"Screen of {evaluation} against {about['reference']}", "task", "score", "reference", "verdict"
    )
    for one in screened:
        metric = one.metric.removesuffix(",none")
        question = (
            f"{one.verdict} by {about['max_drop']:g}"
            if one.verdict != "open"
            else "open: lower, perhaps by chance"
        )
        style = "red" if one.verdict == "worse" else ""
        sheet.add(f"{one.task}/{metric}", one.words, f"{one.reference:.4f}", question, style=style)
    return sheet


def reuse_lines(report: Report) -> list[str]:
    """Return a sentence for each earlier evaluation whose responses were reused."""
    alike: dict[str, list[str]] = {}
    for task, evaluation in report.reused.items():
        alike.setdefault(evaluation, []).append(task)
    lines = [
        f"reused the responses of {evaluation}, since the requests are the same ({', '.join(tasks)}): no GPU ran for them"
        for evaluation, tasks in alike.items()
    ]
    if report.reused_scores:
        lines.append(
            f"reused scores, too, since the task and its data have not changed: {', '.join(report.reused_scores)}"
        )
    return lines


def _ratio(report: Report) -> str:
    bound = format_seconds(report.lower_bound_seconds)
    after = ", both without the wait for a GPU" if report.waited_seconds >= 1 else ""
    return f"{report.ratio:.2f} x the lower bound of {bound}{after}" if report.ratio else ""


def absence_lines(report: Report) -> Iterator[str]:
    """Yield what the makespan omits and includes: waits, and the time without a coordinator."""
    went_on = report.away_seconds - report.paused_seconds
    if report.waited_seconds >= 1:
        yield f"{format_seconds(report.waited_seconds)} of it spent waiting for a free GPU"
    if report.limited_seconds >= 1:
        yield f"a limit on jobs kept jobs out for {format_seconds(report.limited_seconds)}"
    if report.paused_seconds >= 1:
        yield f"without {format_seconds(report.paused_seconds)} in which no coordinator ran and no job worked"
    if went_on >= 1:
        yield f"jobs went on for {format_seconds(went_on)} without a coordinator"


def score_table(results: Mapping[str, Any], title: str, *, ascii_only: bool = False) -> Sheet:
    """Return a row per score, groups last: lm-eval's values with what lm_eval prints beside them.

    `ascii_only`: `^`, `v` and `+-`, for a terminal without UTF-8.
    """
    groups, ways = results.get("groups", {}), results.get("higher_is_better", {})
    marks, plus_minus = (("^", "v"), "+-") if ascii_only else (("↑", "↓"), "±")
    scores = sorted(scores_of(results), key=lambda score: score.task in groups)
    heads = ("task", "version", "n-shot", "n", "filter", "metric", "value", f"{plus_minus} stderr")
    sheet = Sheet(title, *heads, without=[["version"], ["version", "n-shot"]])
    before = ""
    for score in scores:
        named = [
            score.task,
            score.version,
            *("" if x is None else str(x) for x in (score.n_shot, score.documents)),
        ]
        dense = score.filter == DENSE
        better = score.higher_is_better if dense else ways.get(score.task, {}).get(score.metric)
        sheet.add(
            *(named if score.task != before else ["", "", "", ""]),
            "" if score.filter == "none" else score.filter,
            score.metric if better is None else f"{score.metric} {marks[not better]}",
            format_score(score.value),
            "-" if score.stderr is None else format_score(score.stderr),
        )
        before = score.task
    return sheet


def show_report(
    console: Console,
    report: Report,
    results: Mapping[str, Any] | None,
    gpu_hour_price: float | None = None,
    *,
    ran: bool = True,
    verbose: bool = False,
    failed_job: str = "",
) -> None:
    """Print costs, warnings, scores, and finally failures.

    `ran=False`: nothing ran now, so times and costs are omitted. `verbose`: accounting by GPU and stage. `failed_job`: whose
    log is named.
    """
    parts: list[RenderableType] = []
    if ran:
        parts.append(summary_sheet(report, gpu_hour_price, verbose=verbose))
        parts += (
            [Text(""), gpu_table(report), Text(""), gantt_sheet(report)] if verbose and report.gpus else []
        )
    parts += [Parts(line) for line in (*mode_lines(report), *reuse_lines(report))]
    parts += [Parts(f"warning: {w}", style="yellow") for w in report.warnings]
    if results is not None and results.get("results"):
        title = f"Scores of {report.evaluation_id}"
        parts += [Text(""), score_table(results, title, ascii_only=console.options.ascii_only)]
    if screened := screened_in(results or {}):
        parts += [Text(""), screen_table(screened, results or {}, report.evaluation_id)]
    failed = {e.name: e.error for e in report.entries if e.status == "failed"}
    if report.status == "cancelled":
        failed = {name: why for name, why in failed.items() if not why.startswith(CANCELLED)}
        said = f"cancelled; repeat `evalspan eval …` or run `evalspan retry {report.evaluation_id}` to continue from the scored tasks"
        parts.append(Parts(said, style="yellow"))
    parts += [Parts(f"FAILED {names}: {why}", style="bold red") for names, why in by_reason(failed).items()]
    if failed and report.status != "cancelled":
        one = report.evaluation_id
        log = " ".join(filter(None, ["evalspan logs", one, failed_job]))
        parts.append(f"`{log}` shows why; fix the cause, then run `evalspan retry {one}`")
        parts.append(
            "(after a change to settings or a task's files, run `evalspan eval …` again: it is a new evaluation)"
        )
    for entry in report.entries:
        if entry.status != "failed" and entry.unscored:
            items = "item is" if entry.unscored == 1 else "items are"
            text = (
                f"PARTLY {entry.name}: {entry.unscored} {items} left out of all means; the warnings say why"
            )
            parts.append(Parts(text, style="bold red"))
    print_parts(console, *parts)
