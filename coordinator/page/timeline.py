"""What ran when in one evaluation: spans of trials, shards, builds, staging and metric jobs, and what befell nodes. Pure.

Rule: a span is seconds since the evaluation was accepted and how long it took, as journalled; the coordinator's clock
wherever a job's own is not recorded. Used by the page and by the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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

CALM = frozenset({"COMPLETED", "COMPLETING", "CANCELLED"})  # states of a job's end that need no word
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
        ends[row : row + 1] = [span.begin + span.seconds]
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


Told = Iterable[tuple[str, str, bool]]  # (about, text, bad)


def _told(event: AnyEvent) -> Told:
    if isinstance(event, OutcomeSeen):
        return _of_outcome(event.outcome)
    tell: Callable[[Any], Told] | None = _TELLERS.get(type(event))
    return () if tell is None else tell(event)


def _of_outcome(outcome: Any) -> Told:
    if isinstance(outcome, Failed):
        yield outcome.node or outcome.name, f"{outcome.job} failed: {outcome.error}", True
    elif isinstance(outcome, Staged):
        why = f"; {outcome.why}" if outcome.why else ""
        yield outcome.node, f"weights staged ({outcome.rung}){why}", False


def _offered(event: NodesOffered) -> Told:
    for offer in event.offers:
        kind = f" ({offer.gpu_type})" if offer.gpu_type else ""
        yield offer.node, f"{offer.gpus} GPU{'s' * (offer.gpus != 1)} offered{kind}", False


def _job_ended(event: JobEnded) -> Told:
    if event.state not in CALM:
        where = f" (running {event.shard})" if event.shard else ""
        yield f"{event.job}.{event.index}", f"ended {event.state}{where}", True


def _hung(event: TrialHung) -> Told:
    where = f" at {event.shard}" if event.shard else ""
    yield event.trial, f"no progress for {event.seconds:.0f} s{where}", True


_TELLERS: Mapping[type[AnyEvent], Callable[[Any], Told]] = {
    NodesOffered: _offered,
    NodeWithdrawn: lambda e: [(e.node, f"withdrawn: {e.reason}", True)],
    BackOffOver: lambda e: [(node, "back-off over", False) for node in e.nodes],
    JobNotSubmitted: lambda e: [(e.job, f"not submitted: {e.error}", True)],
    JobEnded: _job_ended,
    TrialHung: _hung,
    StragglersFound: lambda e: [
        (trial, f"{times:.1f} times slower than the others", True) for trial, times in e.trials.items()
    ],
    ShardCorrupted: lambda e: [(e.shard, f"runs again: {e.error}", True)],
    Restarted: lambda _: [("coordinator", "another coordinator took over", False)],
}
