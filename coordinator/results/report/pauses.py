"""Pauses of an evaluation: times in which it was paused, or no coordinator ran it, and none of its jobs worked. Pure.

Rule: a person's pause ends with the resumption, or with the results. An evaluation has no coordinator from the last sign of
one to the `Restarted` of the next, and from its end to a retry. A sign is an event, or the journal's mtime
(`runner.SIGN_SECONDS`). Meanwhile jobs on Slurm continue; time in which one ran or was pending is not a pause. Called by
`measurements`.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.decide.evaluation.events import (
    AnyEvent,
    PauseAsked,
    Restarted,
    ResultsWritten,
    ResumeAsked,
    RetryAsked,
)

Span = tuple[float, float]  # start and end in unix seconds


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
