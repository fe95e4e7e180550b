"""Times of an evaluation, gathered from its events in one pass: its jobs, stages and pauses. Pure.

Rule: a pause is a time in which it was paused, or no coordinator ran it, and none of its jobs worked. A person's pause ends
with the resumption, or with the results. An evaluation has no coordinator from the last sign of one to the `Restarted` of the
next, and from its end to a retry. A sign is an event, or the journal's mtime (`runner.SIGN_SECONDS`). Meanwhile jobs on Slurm
continue; time in which one ran or was pending is not a pause. Called by `measurements`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from coordinator.decide.evaluation.events import (
    Accepted,
    AnyEvent,
    JobEnded,
    JobNotSubmitted,
    JobStarted,
    JobSubmitted,
    NodesOffered,
    OutcomeSeen,
    PauseAsked,
    Restarted,
    ResultsWritten,
    ResumeAsked,
    RetryAsked,
)
from coordinator.results.report.usage import Member
from evaljobs.contract.outcomes import Built, Executed, Scored, Staged, TrialEnded

Span = tuple[float, float]  # start and end in unix seconds
# minimum time without a GPU that counts as a wait: nodes are listed every few seconds
LEAST_WAIT_SECONDS = 10.0


class Absences:
    """Spans in which an evaluation was paused, or no coordinator ran it, from its events in order; they do not overlap."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._last = float("-inf")  # unix seconds of the latest event
        self._over: float | None = None  # unix seconds of the results, until a retry
        self._paused: float | None = None  # unix seconds of a person's pause, until it is over

    def take(self, event: AnyEvent) -> None:
        match event:
            case PauseAsked() if self._paused is None and self._over is None:
                self._paused = event.at
            case ResumeAsked():
                self._end_pause(event.at)
            case Restarted(seen_at=float(seen)) if self._over is None and self._paused is None:
                self._add(max(seen, self._last), event.at)
            case RetryAsked() if self._over is not None:
                self._add(self._over, event.at)
                self._over = None
            case ResultsWritten() if self._over is None:
                self._end_pause(event.at)
                self._over = event.at
            case _:
                pass
        self._last = max(self._last, event.at)

    def _end_pause(self, at: float) -> None:
        if self._paused is not None:
            self._add(self._paused, at)
            self._paused = None

    def _add(self, start: float, end: float) -> None:
        if start < end:
            self.spans.append((start, end))


def subtract_spans(spans: Iterable[Span], work: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` that no span of `work` covers."""
    busy = sorted(work)
    left = []
    for start, end in spans:
        at = start
        for begin, over in busy:
            if begin >= end:
                break
            if begin > at:
                left.append((at, begin))
            at = max(at, over)
        if at < end:
            left.append((at, end))
    return left


def seconds_within(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the seconds of `spans`, which do not overlap, between `start` and `end`."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)


def covered_seconds(spans: Iterable[Span]) -> float | None:
    """Return the seconds in which at least one of `spans` lasts; None if there are none."""
    length, at, found = 0.0, float("-inf"), False
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, at))
        at, found = max(at, end), True
    return length if found else None


class GatheredTimes:
    """Times gathered in one pass over the events."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self.accepted_at = 0.0
        self.cpus = 1  # CPUs of a metric worker
        self.entries: list[str] = []
        self.submitted: dict[str, float] = {}
        self.started: dict[Member, float] = {}
        self.reasons: dict[Member, str] = {}
        self.ended: dict[Member, tuple[float, str]] = {}  # with the cluster's end state
        self.built: list[Span] = []
        self.staged: list[Staged] = []
        self.staged_at: list[Span] = []
        self.there_at: dict[str, float] = {}  # node -> first staged
        self.offered_at: dict[str, float] = {}  # node -> first offer of GPUs
        self.kept_out: dict[str, float] = {}  # job -> when a limit first kept it out
        self.limited: list[Span] = []  # when a limit kept a job out
        self.trials: list[TrialEnded] = []
        self.metric_seconds: dict[str, float] = defaultdict(float)
        self.scored_at: float | None = None
        self.finished_at: float | None = None
        self.absences = Absences()
        self.measured: list[Span] = []  # when jobs other than trials worked that left an outcome
        self.latest = 0.0  # latest of the coordinator's own times
        self.left: list[float] = []  # when outcomes were written, by storage's clock
        for event in events:
            self.latest = max(self.latest, event.at)
            self.absences.take(event)
            self._take(event)
            self._limit(event)

    @property
    def loads(self) -> list[tuple[float, float, float]]:
        """Seconds of import, load and warm-up of each trial that loaded a model."""
        return [(t.import_seconds, t.load_seconds, t.warm_seconds) for t in self.trials if t.load_seconds > 0]

    def pauses(self, inferred: Iterable[Span]) -> list[Span]:
        """Return when no coordinator ran the evaluation and none of its jobs ran or was pending. `inferred`: when shards ran."""
        queued = ((self.submitted.get(job, at), at) for (job, _), at in self.started.items())
        trials = ((t.started_at, t.ended_at) for t in self.trials)
        return subtract_spans(self.absences.spans, [*self.measured, *queued, *trials, *inferred])

    def waited(self, over: float) -> list[Span]:
        """Return the wait for the first GPU, up to `over`, without the time in which a build or staging continued."""
        offered = min(self.offered_at.values(), default=over)
        if offered >= over:
            return []
        before = [self.accepted_at, *(end for _, end in self.built), *self.there_at.values()]
        last = max((at for at in before if at <= offered), default=offered)
        waits = subtract_spans([(last, offered)], [*self.built, *self.staged_at])
        return waits if (covered_seconds(waits) or 0.0) >= LEAST_WAIT_SECONDS else []

    def staging_fields(self, over: float) -> dict[str, Any]:
        """Return the fields of the report about staging; `over`: the evaluation's end, or now."""
        offered = {node: self.offered_at.get(node, over) for node in self.there_at}
        return {
            "staged_ahead": {n: offered[n] - at for n, at in self.there_at.items() if at < offered[n]},
            "staged_bytes": sum(s.bytes for s in self.staged),
            "storage_bytes": sum(s.storage_bytes for s in self.staged),
            "environment_bytes": sum(s.environment_bytes for s in self.staged),
            "environment_seconds": max((s.environment_seconds for s in self.staged), default=0.0),
        }

    def _take(self, event: AnyEvent) -> None:
        match event:
            case Accepted():
                self.accepted_at = event.at
                self.entries = [t.name for t in event.record.suite.tasks]
                self.cpus = event.record.options.metric.cpus
            case JobSubmitted():
                self.submitted.setdefault(event.job, event.at)
            case JobStarted():
                self.started.setdefault((event.job, event.index), event.started_at or event.at)
                self.reasons.setdefault((event.job, event.index), event.waited_for)
            case JobEnded():
                self.ended.setdefault((event.job, event.index), (event.at, event.state))
            case NodesOffered():
                for offer in event.offers:
                    self.offered_at.setdefault(offer.node, event.at)
            case ResultsWritten():
                self.finished_at = event.at
            case OutcomeSeen():
                self._outcome(event.outcome, event.at if event.left_at is None else event.left_at)
            case _:
                pass

    def _limit(self, event: AnyEvent) -> None:
        if isinstance(event, JobNotSubmitted) and event.reason == "limit":
            self.kept_out.setdefault(event.job, event.at)
        elif isinstance(event, JobSubmitted) and event.job in self.kept_out:
            self.limited.append((self.kept_out.pop(event.job), event.at))

    def _outcome(self, outcome: Any, at: float) -> None:
        self.left.append(at)
        span = at - getattr(outcome, "seconds", 0.0), at
        if isinstance(outcome, (Built, Staged, Executed, Scored)):
            self.measured.append(span)
        match outcome:
            case Built():
                self.built.append(span)
            case Staged():
                self.staged.append(outcome)
                self.staged_at.append(span)
                self.there_at.setdefault(outcome.node, at)
            case TrialEnded():
                self.trials.append(outcome)
            case Executed():
                # programs use all cores of their worker; a judge's job waits on one
                self.metric_seconds[outcome.task] += outcome.seconds * (self.cpus if outcome.programs else 1)
            case Scored():
                self.metric_seconds[self.entries[outcome.entry]] += outcome.seconds
                self.scored_at = max(at, self.scored_at or at)
            case _:
                pass
