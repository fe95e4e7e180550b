"""The makespan report: an evaluation's cost and times, from its journal and response file headers. Pure.

Rule: every figure is a difference of recorded times or a sum of them; a time that was not recorded gives None. The lower
bound is that of `planning.lower_bound` on this run's measured seconds, so `ratio` shows what a perfect schedule on the same
GPUs would have saved. A run with failed tasks has no ratio: its makespan ends with the last score, but its seconds are of all
tasks. Called by `finalize`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from coordinator.base import words
from coordinator.base.clock import SKEW_SECONDS
from coordinator.decide.evaluation.events import AnyEvent
from coordinator.decide.evaluation.state import State
from coordinator.decide.planning.lower_bound import MeasuredSet, measured_lower_bound
from coordinator.results.report.event_times import (
    GatheredTimes,
    Span,
    covered_seconds,
    seconds_within,
    subtract_spans,
)
from coordinator.results.report.scores import Head, head_of
from coordinator.results.report.usage import (
    GpuUse,
    Indexes,
    JudgeUse,
    TokenUse,
    dead_trials_gpu_use,
    token_use,
    trial_gpu_use,
)
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.specs import Record


class ShardSpan(Record):
    """When a shard ran, in unix seconds."""

    shard: str
    trial: str
    started_at: float
    seconds: float

    @property
    def span(self) -> Span:
        return self.started_at, self.started_at + self.seconds


class Stages(Record):
    """Seconds in which a job of each stage ran; stages overlap. None: no such stage."""

    build: float | None = None
    staging: float | None = None
    queue_wait: float | None = None  # of trials: longest time from submission to start
    waited_for: str = ""  # the cluster's reason for that wait; "": unknown
    load: float | None = None  # import + load + warm-up, mean over trials that loaded; its three parts follow
    load_import: float | None = None
    load_weights: float | None = None
    load_warm_up: float | None = None
    inference: float | None = None
    metric_tail: float | None = None  # from the last shard's end to the last score
    metric: float | None = None  # summed seconds of execute and score jobs


class EntryLine(Record):
    """A task of the suite. `unscored`: items left out of all means; the warnings name the first ones."""

    name: str
    status: str
    error: str = ""
    unscored: int = 0


class Report(Head):
    """The makespan report of one evaluation. `--json` prints exactly this."""

    schema_version: int = 1
    token_budget: int | None = None  # of fast mode, once settled
    # leaf task -> its cut (`names.Cut`), if different from the evaluation's
    cuts: dict[str, str] = Field(default_factory=dict)
    status: str  # running | done | failed | cancelled; without progress: stopped | parked | given up
    makespan_seconds: float | None  # from acceptance to the last score, without `paused_seconds`
    predicted_makespan_seconds: float | None  # of the same span, by the last plan
    lower_bound_seconds: float | None
    ratio: float | None  # of the makespan minus `waited_seconds` to the bound
    plan_policy: str = "evalspan"
    stages: Stages
    gpu_seconds: float
    gpu_busy_fraction: float | None
    gpus: tuple[GpuUse, ...]
    nodes: dict[str, str]  # node -> rung that it was staged on
    # node -> seconds between the end of its prefetch and its first free GPU
    staged_ahead: dict[str, float] = Field(default_factory=dict)
    staged_bytes: int  # weights, and request sets if a node keeps them
    storage_bytes: int
    environment_bytes: int = 0  # of libraries that precursors read into page caches, after the weights
    environment_seconds: float = 0.0  # the longest of the nodes
    shards: tuple[ShardSpan, ...]
    metric_seconds: dict[str, float]  # CPU seconds by leaf task (execute) and entry (score)
    entries: tuple[EntryLine, ...]
    judge: JudgeUse | None = None
    tokens: TokenUse | None = None  # None: not counted, as before the end
    # leaf task -> evaluation that its responses come from
    reused: dict[str, str] = Field(default_factory=dict)
    reused_scores: tuple[str, ...] = ()  # entries with reused scores
    away_seconds: float = 0.0  # without a coordinator running the evaluation, until the last score
    paused_seconds: float = 0.0  # part of these in which none of its jobs ran or were pending
    waited_seconds: float = 0.0  # with requests built, until the first GPUs were offered
    limited_seconds: float = 0.0  # in which a limit kept jobs out
    warnings: tuple[str, ...]


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _queue_waits(state: State, gathered: GatheredTimes, now: float) -> Iterator[tuple[float, str]]:
    """Yield how long each submitted trial was pending (if it never started, until its end or now), and the reason."""
    own = {trial.name: trial.started_at for trial in gathered.trials}
    for trial in state.trials.by_name.values():
        if (submitted := gathered.submitted.get(trial.job)) is None:
            continue
        member = trial.job, trial.member
        ended = gathered.ended.get(member, (now, ""))[0]
        # a short trial may start and end between two listings
        began = min(gathered.started.get(member, ended), own.get(trial.name, ended))
        yield max(0.0, began - submitted), gathered.reasons.get(member, "")


def _stages(
    state: State, gathered: GatheredTimes, shards: Sequence[ShardSpan], pauses: Sequence[Span], now: float
) -> Stages:
    waits = list(_queue_waits(state, gathered, now))
    longest = max((wait for wait, _ in waits), default=None)
    _, reason = max(((wait, why) for wait, why in waits if why), default=(0.0, ""))
    tail = None
    if shards and gathered.scored_at is not None:
        last = max(s.span[1] for s in shards)
        tail = max(0.0, gathered.scored_at - last - seconds_within(pauses, last, gathered.scored_at))
    parts = [_mean(part) for part in zip(*gathered.loads, strict=True)] or [None] * 3
    return Stages(
        build=covered_seconds(gathered.built),
        staging=covered_seconds(gathered.staged_at),
        queue_wait=longest,
        waited_for=reason,
        load=_mean(map(sum, gathered.loads)),
        load_import=parts[0],
        load_weights=parts[1],
        load_warm_up=parts[2],
        inference=covered_seconds(s.span for s in shards),
        metric_tail=tail,
        metric=sum(gathered.metric_seconds.values()) if gathered.metric_seconds else None,
    )


def _clock_error(gathered: GatheredTimes, shards: Iterable[ShardSpan], now: float) -> float:
    """Return the seconds by which the earliest time precedes the acceptance, or the latest exceeds `now`; the larger of both."""
    times = [
        gathered.latest,
        *gathered.left,
        *(at for t in gathered.trials for at in (t.started_at, t.ended_at)),
    ]
    times += [s.started_at for s in shards]
    return max(gathered.accepted_at - min(times), max(times) - now)


def _status(state: State) -> str:
    if state.ending.cancelled:
        return "cancelled"
    if not all(e.terminal for e in state.entries):
        return "running"
    return "failed" if any(e.status == "failed" for e in state.entries) else "done"


def _bound(
    state: State, gathered: GatheredTimes, shards: Sequence[ShardSpan], omitted: Sequence[Span]
) -> float | None:
    """Return the seconds that no schedule of this run beats; None before a plan. `omitted`: spans that do not count."""
    if not shards or not gathered.trials:
        return None
    seconds: Mapping[str, float] = _seconds_by_task(shards)
    sets = []
    for entry in state.entries:
        for name in entry.leaves.values():
            leaf = state.shards.leaves[name]
            task = leaf.planned.task
            if name not in seconds or leaf.entries[0] != entry.index:
                continue
            sets.append(
                MeasuredSet(
                    name=name,
                    gpu_seconds=seconds[name],
                    documents=leaf.planned.documents,
                    metric_seconds=gathered.metric_seconds.get(task, 0.0),
                    executes=leaf.planned.executes,
                )
            )
    lanes = sum(n.lanes for n in state.nodes.by_name.values()) or len({t.name for t in gathered.trials})
    load = min((sum(parts) for parts in gathered.loads), default=0.0)
    first = min(span.started_at for span in shards)
    # a task that is built while others infer delays no GPU
    built = covered_seconds((start, min(end, first)) for start, end in gathered.built if start < first) or 0.0
    if state.record.options.early_trials:
        built -= load  # trials loaded meanwhile
    staged = min((s.seconds for s in gathered.staged), default=0.0)
    accepted = gathered.accepted_at
    passed = first - accepted - seconds_within(omitted, accepted, first) - load
    return measured_lower_bound(
        sets,
        gpus=max(1, lanes),
        cpu_slots=state.cpu_slots,
        load_seconds=load,
        before_seconds=max(0.0, min(max(built, staged), passed)),
    )


def _predicted(state: State, accepted: float, pauses: Sequence[Span]) -> float | None:
    """Return the seconds until the last plan was made plus those that it predicted; None before a plan."""
    plan = state.plan
    if plan.made_at is None or not plan.predicted_makespan_seconds:
        return None
    before = plan.made_at - accepted - seconds_within(pauses, accepted, plan.made_at)
    return before + plan.predicted_makespan_seconds


def _seconds_by_task(shards: Iterable[ShardSpan]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for span in shards:
        seconds[ShardId.parse(span.shard).task] += span.seconds
    return seconds


def _gpu_fields(state: State, gathered: GatheredTimes, shards: Sequence[ShardSpan]) -> dict[str, Any]:
    """Return the fields of the report about GPUs."""
    gpus = sorted(_gpus(state, gathered, shards), key=lambda g: (g.node, g.trial))
    held = sum(g.held * max(1, g.gpus) for g in gpus)
    busy = sum(g.infer * max(1, g.gpus) for g in gpus)
    return {"gpu_seconds": held, "gpu_busy_fraction": busy / held if held else None, "gpus": tuple(gpus)}


def _gpus(state: State, gathered: GatheredTimes, shards: Sequence[ShardSpan]) -> Iterator[GpuUse]:
    for trial in gathered.trials:
        known = state.trials.by_name.get(trial.name)
        began = None if known is None else gathered.started.get((known.job, known.member))
        yield trial_gpu_use(trial, began)
    seconds: dict[str, list[float]] = defaultdict(list)
    for span in shards:
        seconds[span.trial].append(span.seconds)
    said = {trial.name for trial in gathered.trials}
    yield from dead_trials_gpu_use(state, gathered.started, gathered.ended, said, seconds)


def make_report(
    state: State,
    events: Iterable[AnyEvent],
    shards: Sequence[ShardSpan],
    now: float,
    indexes: Indexes | None = None,
) -> Report:
    """Return the report as of `now` (unix seconds). `shards`: one span per shard that counts.

    `indexes`: the batches of these shards; without them no tokens are counted.
    """
    gathered = GatheredTimes(events)
    if (wrong := _clock_error(gathered, shards, now)) > SKEW_SECONDS:
        return without_measurements(
            state, f"the clocks of its hosts disagree by {words.format_seconds(wrong)}"
        )
    end = gathered.scored_at if gathered.scored_at is not None else gathered.finished_at
    running = _status(state) == "running"
    accepted, over = gathered.accepted_at, now if running else end or now
    pauses = gathered.pauses(s.span for s in shards)
    paused = seconds_within(pauses, accepted, over)
    makespan = over - accepted - paused
    whole = not running and all(e.status in ("scored", "not asked") for e in state.entries)
    waits = subtract_spans(gathered.waited(over), pauses)
    waited = covered_seconds(waits) or 0.0
    bound = _bound(state, gathered, shards, [*pauses, *waits]) if whole else None
    kept_out = [*gathered.limited, *((at, over) for at in gathered.kept_out.values())]
    return Report(
        **_outcome(state) | {"accepted_at": accepted},
        makespan_seconds=makespan,
        predicted_makespan_seconds=_predicted(state, accepted, pauses),
        lower_bound_seconds=bound,
        ratio=(makespan - waited) / bound if bound else None,
        plan_policy=state.record.options.plan.policy,
        stages=_stages(state, gathered, shards, pauses, over),
        **_gpu_fields(state, gathered, shards),
        **gathered.staging_fields(end or now),
        nodes={n.name: n.rung or n.status for n in state.nodes.by_name.values()},
        shards=tuple(sorted(shards, key=lambda s: s.started_at)),
        metric_seconds=dict(gathered.metric_seconds),
        tokens=token_use([s.shard for s in shards], indexes, gathered.trials) if indexes else None,
        reused=dict(state.plan.reused),
        reused_scores=tuple(state.entries[i].name for i in sorted(state.plan.reused_scores)),
        away_seconds=seconds_within(gathered.absences.spans, accepted, over),
        paused_seconds=paused,
        waited_seconds=waited,
        limited_seconds=covered_seconds(kept_out) or 0.0,
        warnings=tuple(dict.fromkeys(state.warnings)),
    )


UNMEASURED: dict[str, Any] = {
    **dict.fromkeys(("makespan_seconds", "predicted_makespan_seconds", "lower_bound_seconds", "ratio")),
    "stages": Stages(),
    "gpu_seconds": 0.0,
    "gpu_busy_fraction": None,
    "gpus": (),
    "nodes": {},
    "staged_bytes": 0,
    "storage_bytes": 0,
    "shards": (),
    "metric_seconds": {},
}


def without_measurements(state: State, why: str) -> Report:
    """Return a report that only says how the evaluation ended; `why`: the reason, as a warning."""
    warnings = (*dict.fromkeys(state.warnings), f"times and costs are unknown: {why}")
    return Report(**UNMEASURED, **_outcome(state), warnings=warnings)


def _outcome(state: State) -> dict[str, Any]:
    """Return the fields that need no measurement."""
    record, size, budget = state.record, state.batch_size, state.token_budget
    usual = str(Cut(size, budget)) if isinstance(size, int) and isinstance(budget, int) else ""
    if record.order and isinstance(size, int):
        usual = str(Cut(size, order=record.order))
    planned = {task: leaf.planned.cut for task, leaf in state.shards.leaves.items()}
    return {
        **head_of(record),
        "token_budget": budget if isinstance(budget, int) else None,
        "cuts": {task: cut for task, cut in planned.items() if cut not in ("", usual)},
        "status": _status(state),
        "entries": tuple(
            EntryLine(name=e.name, status=e.status, error=e.error, unscored=len(e.unscored))
            for e in state.entries
        ),
    }
