"""What ran when in one evaluation: spans of trials, shards, builds, staging and metric jobs, and what befell nodes. Pure.

Rule: a span is seconds since the evaluation was accepted and how long it took, as journalled; the coordinator's clock
wherever a job's own is not recorded. Used by the page and by the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.evaluation.events import (
    AnyEvent,
    BackOffOver,
    JobEnded,
    JobNotSubmitted,
    NodesOffered,
    NodeWithdrawn,
    OutcomeSeen,
    Restarted,
    ShardCorrupted,
    StragglersFound,
    TrialHung,
)
from evaljobs.contract.outcomes import Built, Converted, Executed, Failed, Scored, Staged
from evaljobs.contract.specs import Record

CALM = frozenset({"COMPLETED", "CANCELLED"})  # states of a job's end that need no word
MOST_WORDS = 400  # characters of a note


class Span(Record):
    """A job's work outside of the GPUs. `begin`: seconds since acceptance; `row`: spans of one row never overlap."""

    what: str  # build | convert | stage | execute | score
    name: str
    begin: float
    seconds: float
    node: str = ""
    row: int = 0


class Note(Record):
    """Something that befell a node, a job or a shard. `at`: seconds since acceptance."""

    at: float
    about: str
    text: str
    bad: bool = True


def spans(events: Iterable[AnyEvent], accepted_at: float, entries: Sequence[str]) -> list[Span]:
    """Spans of jobs that left an outcome, in rows: each row as few as hold them. `entries`: names of the suite's tasks."""
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
        node = outcome.node if isinstance(outcome, Staged) else ""
        begin = left - outcome.seconds - accepted_at
        found.append(Span(what=what, name=name, begin=begin, seconds=outcome.seconds, node=node))
    return in_rows(found)


def in_rows(found: Iterable[Span]) -> list[Span]:
    """Spans by begin, each in the first row of its kind that is free then; rows of a kind stand together."""
    kinds: dict[str, list[float]] = {}
    placed: list[tuple[str, int, Span]] = []
    for span in sorted(found, key=lambda s: s.begin):
        kind = "metric" if span.what in ("execute", "score") else span.what
        ends = kinds.setdefault(kind, [])
        row = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row:row + 1] = [span.begin + span.seconds]
        placed.append((kind, row, span))
    first, at = {}, 0
    for kind, ends in kinds.items():
        first[kind], at = at, at + len(ends)
    return [span.model_copy(update={"row": first[kind] + row}) for kind, row, span in placed]


def notes(events: Iterable[AnyEvent], accepted_at: float) -> list[Note]:
    """What befell nodes, jobs and shards, in order."""
    found = []
    for event in events:
        for about, text, bad in _told(event):
            found.append(Note(at=event.at - accepted_at, about=about, text=text[:MOST_WORDS], bad=bad))
    return found


def _told(event: AnyEvent) -> list[tuple[str, str, bool]]:
    match event:
        case NodesOffered():
            return [(o.node, f"{o.gpus} GPUs offered{f' ({o.gpu_type})' if o.gpu_type else ''}", False) for o in event.offers]
        case NodeWithdrawn():
            return [(event.node, f"withdrawn: {event.reason}", True)]
        case BackOffOver():
            return [(node, "back-off over", False) for node in event.nodes]
        case JobNotSubmitted():
            return [(event.job, f"not submitted: {event.error}", True)]
        case JobEnded() if event.state not in CALM:
            where = f" (running {event.shard})" if event.shard else ""
            return [(f"{event.job}.{event.index}", f"ended {event.state}{where}", True)]
        case TrialHung():
            return [(event.trial, f"no progress for {event.seconds:.0f} s{f' at {event.shard}' if event.shard else ''}", True)]
        case StragglersFound():
            return [(trial, f"{times:.1f} times slower than the others", True) for trial, times in event.trials.items()]
        case ShardCorrupted():
            return [(event.shard, f"runs again: {event.error}", True)]
        case Restarted():
            return [("coordinator", "another coordinator took over", False)]
        case OutcomeSeen() if isinstance(event.outcome, Failed):
            return [(event.outcome.node or event.outcome.name, f"{event.outcome.job} failed: {event.outcome.error}", True)]
        case OutcomeSeen() if isinstance(event.outcome, Staged):
            why = f"; {event.outcome.why}" if event.outcome.why else ""
            return [(event.outcome.node, f"weights staged ({event.outcome.rung}){why}", False)]
        case _:
            return []
