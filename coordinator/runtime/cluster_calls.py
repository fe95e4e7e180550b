"""Calls of a cluster beside the loop, so that a controller that answers late holds up nothing else.

Rule: a turn of the loop waits `patience` seconds in all for the ends of calls and takes later answers in later turns. While
one call is late, it waits for none. Called by `coordinator.runtime.loop`, `effects`, `service` and `wiring`.
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
SAID_SECONDS = 2.0  # age of an unanswered call from which on it is named to people


class Call(Future[T]):
    """One call. `asked_at`: unix seconds of its begin; its answer may be as old as that."""

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
    """The calls under way. `patience`: most seconds of a turn to wait; None: each call is made in the caller's thread."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._left = patience or 0.0  # seconds that this turn may still wait
        self._asked: dict[str, Call[Any]] = {}  # by what was asked
        self._under_way: list[Call[Any]] = []
        self._made: Counter[str] = Counter()

    def take_counts(self) -> Mapping[str, int]:
        """What was asked how often since this was called last."""
        made, self._made = self._made, Counter()
        return made

    def new_turn(self) -> None:
        """A turn of the loop begins: it may wait anew."""
        self._left = self._patience or 0.0

    def begin(self, what: str, effect: Callable[[], T]) -> Call[T]:
        """Begin a call of its own. OSError where no thread can be started."""
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
        """Return once all of these have ended, one is late, or this turn has waited for long enough."""
        self._under_way = [call for call in self._under_way if not call.done()]
        if self._patience is None:
            return
        began = time.monotonic()
        oldest = min((call.since for call in self._under_way), default=began)
        until = min(oldest + self._patience, began + self._left)
        wait(calls, timeout=max(0.0, until - began))
        self._left -= time.monotonic() - began

    def ask(self, what: str, effect: Callable[[], T]) -> Call[T] | None:
        """The ended call; None while it is under way. The same question is asked once at a time."""
        call = self._asked.get(what)
        if call is None:
            call = self._asked[what] = self.begin(what, effect)
        self.wait([call])
        if not call.done():
            return None
        del self._asked[what]
        return call

    def asking(self, what: str) -> bool:
        """Was this asked, and its answer not taken yet?"""
        return what in self._asked

    def late(self) -> tuple[str, float] | None:
        """The call that is under way for longest, and its seconds; None where each is younger than SAID_SECONDS."""
        open_ones = [call for call in self._under_way if not call.done()]
        oldest = min(open_ones, key=lambda call: call.since, default=None)
        seconds = 0.0 if oldest is None else time.monotonic() - oldest.since
        return (oldest.what, seconds) if oldest is not None and seconds >= SAID_SECONDS else None
