"""Calls to a cluster beside the loop, so that a slow controller holds up nothing else.

Rule: a turn of the loop waits at most `patience` seconds in total for calls, and takes later answers in later turns. While
one call is late, no other is waited for. Called by `coordinator.runtime.loop`, `effects`, `service` and `wiring`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from coordinator.base import clock

T = TypeVar("T")
SAID_SECONDS = 2.0  # age from which an unanswered call is reported to users


class Call(Future[T]):
    """One call. `asked_at`: unix seconds of its start; its answer may be as old as that."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.asked_at = clock.now()
        self.since = time.monotonic()

    def make(self, effect: Callable[[], T]) -> None:
        """Make the call in this thread; an error is kept for `result`."""
        try:
            self.set_result(effect())
        except Exception as error:  # noqa: BLE001 (raised again by `result`, in the loop's thread)
            self.set_exception(error)


class ClusterCalls:
    """Calls in progress. `patience`: maximum seconds of a turn to wait; None: each call runs in the caller's thread."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._left = patience or 0.0  # seconds that this turn may still wait
        self._asked: dict[str, Call[Any]] = {}  # by question
        self._under_way: list[Call[Any]] = []
        self._made: Counter[str] = Counter()

    def take_counts(self) -> Mapping[str, int]:
        """Return how often each question was asked since the last call."""
        made, self._made = self._made, Counter()
        return made

    def new_turn(self) -> None:
        """Begin a turn of the loop, with its full patience."""
        self._left = self._patience or 0.0

    def begin(self, what: str, effect: Callable[[], T]) -> Call[T]:
        """Begin a separate call. Raise OSError if no thread can be started."""
        call = Call[T](what)
        self._made[what] += 1
        if self._patience is None:
            call.make(effect)
            return call
        try:
            threading.Thread(target=call.make, args=(effect,), name=what, daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"{what}: {error}") from error
        self._under_way.append(call)
        return call

    def wait(self, calls: Collection[Call[Any]]) -> None:
        """Wait until all of these have ended, one is late, or this turn's patience is used up."""
        self._under_way = [call for call in self._under_way if not call.done()]
        if self._patience is None:
            return
        began = time.monotonic()
        oldest = min((call.since for call in self._under_way), default=began)
        until = min(oldest + self._patience, began + self._left)
        wait(calls, timeout=max(0.0, until - began))
        self._left -= time.monotonic() - began

    def ask(self, what: str, effect: Callable[[], T]) -> Call[T] | None:
        """Return the finished call, or None while it runs. A question is never asked twice at a time."""
        call = self._asked.get(what)
        if call is None:
            call = self._asked[what] = self.begin(what, effect)
        self.wait([call])
        if not call.done():
            return None
        del self._asked[what]
        return call

    def asking(self, what: str) -> bool:
        """Return whether this was asked and its answer not taken yet."""
        return what in self._asked

    def late(self) -> tuple[str, float] | None:
        """Return the oldest call and its age in seconds; None if all are younger than SAID_SECONDS."""
        open_ones = [call for call in self._under_way if not call.done()]
        oldest = min(open_ones, key=lambda call: call.since, default=None)
        seconds = 0.0 if oldest is None else time.monotonic() - oldest.since
        return (oldest.what, seconds) if oldest is not None and seconds >= SAID_SECONDS else None
