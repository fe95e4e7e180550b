"""The data of one evaluation's page: its report, what ran when, and events of nodes, jobs and shards. Pure.

Rule: the page shows what the report, the journal and results.json say, and computes only sums. Long lists are stored as
columns: 7,000 shards are a few arrays. Seconds count from the acceptance, as journalled; by the coordinator's clock unless a
job's own time is recorded. `trace_events` uses the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.decide.evaluation.events import (
    AnyEvent,
    BackOffOver,
    JobEnded,
    JobNotSubmitted,
    NodesOffered,
    NodeWithdrawn,
    OutcomeSeen,
    Planned,
    Restarted,
    ShardCorrupted,
    StragglersFound,
    TrialHung,
)
from coordinator.results.report.measurements import Report
from coordinator.results.report.scores import ScoreValue, scores_of, screen_in
from coordinator.results.report.usage import slot_word
from coordinator.runtime.summary import Summary
from coordinator.site.diagnosis.diagnose import diagnosis_in_words
from evaljobs.contract.columns import SUITE_MEAN
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Built, Converted, Executed, Failed, Scored, Staged

HALTING_STATUSES = (
    "stopped",
    "paused",
    "parked",
    "given up",
)  # statuses whose first warning gives the time and the reason
ORDINARY_STATES = frozenset(
    {"COMPLETED", "COMPLETING", "CANCELLED"}
)  # end states of a job that need no mention
MOST_WORDS = 400  # characters of a note
SCORE_COLUMNS = ("task", "measure", "value", "stderr", "higher_is_better", "documents", "n_shot", "version")
# state of a node; the worst comes first if several evaluations use it
NODE_STATES = ("cordoned", "back-off", "withdrawn", "ready", "staging", "offered")


class Span(NamedTuple):
    """A job's work off the GPUs. `begin`: seconds since acceptance; `row`: spans in one row never overlap."""

    what: str  # build | convert | stage | execute | score
    name: str
    begin: float
    seconds: float
    row: int = 0


class Note(NamedTuple):
    """Something that happened to a node, a job or a shard. `at`: seconds since acceptance."""

    at: float
    about: str
    text: str
    bad: bool


def evaluation_data(
    report: Report,
    events: Sequence[AnyEvent],
    results: Mapping[str, Any],
    price: float | None = None,
    standing: Sequence[Sequence[Any]] = (),
) -> dict[str, Any]:
    """Return the page's data. `price`: of a GPU hour, any currency; `standing`: from `standing_of`."""
    predicted = {
        shard: seconds
        for event in events
        if isinstance(event, Planned)
        for lane in event.lanes
        for shard, _, seconds in lane.shards
    }
    return {
        "kind": "evaluation",
        "report": report.model_dump(mode="json", exclude={"shards"}),
        "slot": slot_word(gpu.device for gpu in report.gpus),
        "halted": report.warnings[0] if report.status in HALTING_STATUSES else "",
        "cost": None if price is None else report.gpu_seconds / 3600 * price,
        "unscored": results.get("unscored", {}),
        "scores": [{name: getattr(score, name) for name in SCORE_COLUMNS} for score in _scores(results)],
        **screen_in(results),
        "shards": _shards(report, predicted),
        "jobs": job_spans(events, report.accepted_at, [e.name for e in report.entries]),
        "nodes": _nodes(report, events),
        "standing": standing,
        "notes": timeline_notes(events, report.accepted_at),
    }


def _scores(results: Mapping[str, Any]) -> list[ScoreValue]:
    """Return the means of the suite's groups, then lm-eval's groups, then tasks: a page shows the first of many rows."""
    groups = results.get("groups", {})
    return sorted(
        scores_of(results),
        key=lambda one: (f"{one.metric},{one.filter}" != SUITE_MEAN, one.task not in groups),
    )


def _shards(report: Report, predicted: Mapping[str, float]) -> dict[str, list[Any]]:
    """Return columns of the shards that count. `lane`: index of its trial in the report's `gpus`, -1 for one still running;
    `task`: index into `tasks`.
    """
    lane = {g.trial: i for i, g in enumerate(report.gpus)}
    named = [ShardId.parse(s.shard) for s in report.shards]
    tasks = {task: i for i, task in enumerate(sorted({n.task for n in named}))}
    return {
        "tasks": list(tasks),
        "task": [tasks[n.task] for n in named],
        "name": [s.shard.partition("|")[2] for s in report.shards],
        "lane": [lane.get(s.trial, -1) for s in report.shards],
        "begin": [round(s.started_at - report.accepted_at, 3) for s in report.shards],
        "seconds": [round(s.seconds, 3) for s in report.shards],
        "predicted": [round(predicted[s.shard], 3) if s.shard in predicted else None for s in report.shards],
    }


def _nodes(report: Report, events: Sequence[AnyEvent]) -> list[list[Any]]:
    """Return a row per node: name, rung, GPU type, bytes staged, part from storage, staging seconds, staged ahead, why."""
    staged: dict[str, Staged] = {}
    types: dict[str, str] = {}
    for event in events:
        if isinstance(event, OutcomeSeen) and isinstance(event.outcome, Staged):
            staged[event.outcome.node] = event.outcome
        elif isinstance(event, NodesOffered):
            types.update({o.node: o.gpu_type for o in event.offers if o.gpu_type})
    rows = []
    for name, rung in sorted(report.nodes.items()):
        one = staged.get(name)
        figures = [one.bytes, one.storage_bytes, one.seconds] if one else [0, 0, None]
        kind = (one.gpu_name if one else "") or types.get(name, "")
        rows.append([name, rung, kind, *figures, report.staged_ahead.get(name), one.why if one else ""])
    return rows


def standing_of(summaries: Iterable[Summary], cordoned: Mapping[str, float]) -> list[list[Any]]:
    """Return a row per node: name, status, why, until (unix seconds, or None). `cordoned`: node -> unix seconds."""
    rows: list[list[Any]] = [[n.name, n.status, n.why, n.until] for s in summaries for n in s.nodes]
    rows += [
        [name, "cordoned", "given back (evalspan release), or bad in its check", until]
        for name, until in cordoned.items()
    ]
    rows.sort(key=lambda row: NODE_STATES.index(row[1]))
    worst = {row[0]: row for row in reversed(rows)}
    return [worst[name] for name in sorted(worst)]


def job_spans(events: Iterable[AnyEvent], accepted_at: float, entries: Sequence[str]) -> list[Span]:
    """Return spans of jobs that left an outcome, in as few rows as possible. `entries`: names of the suite's tasks."""
    found = []
    for event in events:
        if not isinstance(event, OutcomeSeen):
            continue
        outcome, left = event.outcome, event.at if event.left_at is None else event.left_at
        match outcome:
            case Built():
                what, name = "build", entries[outcome.entry]
            case Converted():
                what, name = "convert", "checkpoint"
            case Staged():
                what, name = "stage", outcome.node
            case Executed():
                what, name = "execute", outcome.task
            case Scored():
                what, name = "score", entries[outcome.entry]
            case _:
                continue
        found.append(Span(what, name, left - outcome.seconds - accepted_at, outcome.seconds))
    return in_rows(found)


def in_rows(found: Iterable[Span]) -> list[Span]:
    """Return spans by start, each in the first free row of its kind; rows of a kind are adjacent."""
    kinds: dict[str, list[float]] = {}
    placed: list[tuple[str, Span]] = []
    for span in sorted(found, key=lambda s: s.begin):
        kind = "metric" if span.what in ("execute", "score") else span.what
        ends = kinds.setdefault(kind, [])
        row = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.begin + span.seconds]
        placed.append((kind, span._replace(row=row)))
    first, at = {}, 0
    for kind, ends in kinds.items():
        first[kind], at = at, at + len(ends)
    return [span._replace(row=first[kind] + span.row) for kind, span in placed]


def timeline_notes(events: Iterable[AnyEvent], accepted_at: float) -> list[Note]:
    return [
        Note(event.at - accepted_at, about, text[:MOST_WORDS], bad)
        for event in events
        for about, text, bad in _told(event)
    ]


def _told(event: AnyEvent) -> Iterator[tuple[str, str, bool]]:  # noqa: C901, PLR0912 (a case for each event)
    """Yield (subject, text, whether it is bad)."""
    match event:
        case OutcomeSeen(outcome=Failed() as failed):
            said = diagnosis_in_words(event.cause, f"{failed.job} failed: {failed.error}")
            yield failed.node or failed.name, said, True
        case OutcomeSeen(outcome=Staged() as staged):
            why = f"; {staged.why}" if staged.why else ""
            yield staged.node, f"weights staged ({staged.rung}){why}", False
        case NodesOffered():
            for offer in event.offers:
                kind = f" ({offer.gpu_type})" if offer.gpu_type else ""
                yield offer.node, f"{offer.gpus} GPU{'s' * (offer.gpus != 1)} offered{kind}", False
        case NodeWithdrawn():
            yield event.node, f"withdrawn: {event.reason}", True
        case BackOffOver():
            yield from ((node, "back-off over", False) for node in event.nodes)
        case JobNotSubmitted():
            yield event.job, f"not submitted: {event.error}", True
        case JobEnded() if event.state not in ORDINARY_STATES:
            where = f" (running {event.shard})" if event.shard else ""
            yield (
                f"{event.job}.{event.index}",
                diagnosis_in_words(event.cause, f"ended {event.state}{where}"),
                True,
            )
        case TrialHung():
            where = f" at {event.shard}" if event.shard else ""
            yield event.trial, f"no progress for {event.seconds:.0f} s{where}", True
        case StragglersFound():
            for trial, times in event.trials.items():
                yield trial, f"{times:.1f} times slower than the others", True
        case ShardCorrupted():
            yield event.shard, f"runs again: {event.error}", True
        case Restarted():
            yield "coordinator", "another coordinator took over", False


# --- Chrome's trace format -------------------------------------------------------------------------------------------


MICRO = 1e6
Place = tuple[int, int]  # process and thread


def trace_events(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"traceEvents": […], …}. `data`: from `evaluation_data`."""
    report, shards = data["report"], data["shards"]
    nodes = {node: i + 1 for i, node in enumerate(dict.fromkeys(g["node"] for g in report["gpus"]))}
    places = [(nodes[g["node"]], number) for number, g in enumerate(report["gpus"])]
    events = [_event("M", (pid, 0), "process_name", args={"name": node}) for node, pid in nodes.items()]
    events.append(_event("M", (0, 0), "process_name", args={"name": "jobs without GPUs"}))
    for place, g in zip(places, report["gpus"], strict=True):
        begin, before = g["started_at"] - report["accepted_at"], g["imports"] + g["load"] + g["warm"]
        events.append(_event("M", place, "thread_name", args={"name": g["trial"]}))
        events.append(_span("trial", "trial", place, (begin, g["held"]), {"trial": g["trial"]}))
        events.append(_span("import, load, warm-up", "load", place, (begin, min(before, g["held"]))))
    columns = (shards[name] for name in ("lane", "task", "name", "begin", "seconds", "predicted"))
    for lane, task, name, begin, seconds, predicted in zip(*columns, strict=True):
        if lane >= 0:
            more = {"shard": name, "predicted_seconds": predicted}
            events.append(_span(shards["tasks"][task], "shard", places[lane], (begin, seconds), more))
    kinds = {s.row: "metrics" if s.what in ("execute", "score") else s.what for s in data["jobs"]}
    events += [_event("M", (0, row), "thread_name", args={"name": kind}) for row, kind in kinds.items()]
    events += [_span(f"{s.what} {s.name}", s.what, (0, s.row), (s.begin, s.seconds)) for s in data["jobs"]]
    events += [_event("i", (0, 0), f"{n.about}: {n.text}", s="g", ts=n.at * MICRO) for n in data["notes"]]
    told = {"evaluation": report["evaluation_id"]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _event(kind: str, place: Place, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": kind, "pid": place[0], "tid": place[1], **more}


def _span(
    name: str, category: str, place: Place, time: tuple[float, float], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    begin, seconds = (at * MICRO for at in time)
    return _event("X", place, name, cat=category, ts=begin, dur=seconds, args=dict(more or {}))
