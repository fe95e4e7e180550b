"""Observers of a run of `coordinator.api.evaluate`: a callback, or the command line's live screen.

Rule: importing this loads no Redis client, since `submit` uses it too.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from coordinator.base.signals import Signals
from evaljobs.contract.specs import Record

if TYPE_CHECKING:
    from coordinator.runtime.loop import Coordinator
    from coordinator.runtime.summary import Summary

log = logging.getLogger(__name__)

ALIVE_SECONDS = 30.0  # longest time between two calls of `progress` for one evaluation
URGENT = 3  # interrupts after which `evaluate` no longer waits for its cancellation


class Progress(Record):
    """Progress of an evaluation, passed to the `progress` callback of `evaluate`."""

    evaluation_id: str  # name of its folder in the work folder
    tasks: int  # of the suite that are asked
    scored: int  # entries with scores
    shards: int  # parts of the tasks; 0 before the plan is made
    shards_done: int  # shards whose responses are on disk
    trouble: str = ""  # what it waits for; "": nothing

    def __str__(self) -> str:
        shards = f"{self.shards_done}/{self.shards} shards, " if self.shards else ""
        trouble = f" ! {self.trouble}" if self.trouble else ""
        return f"{self.evaluation_id}: {shards}{self.scored}/{self.tasks} tasks scored{trouble}"


class Messages(Protocol):
    """Receives messages besides the result of a call. By default nothing is printed."""

    def busy(self, what: str) -> AbstractContextManager[object]:
        """Return a context for a step that takes seconds."""
        ...

    def say(self, text: str) -> None:
        """Print a line for the user."""
        ...


class RunObserver(Messages, Protocol):
    """Follows a run of `evaluate`, like the command line's live screen."""

    def run(self, coordinator: Coordinator) -> AbstractContextManager[Callable[[], bool]]:
        """Return a context for the run. Its callable is called between two ticks; the first True cancels the evaluation."""
        ...


class CallbackObserver:
    """Observer for callers without a screen. An interrupt, or `stop`, cancels the evaluation."""

    def __init__(
        self, progress: bool | Callable[[Progress], object], stop: threading.Event | None = None
    ) -> None:
        self._stop = stop or threading.Event()
        self._tell = _print if progress is True else progress or None
        self._last: dict[str, tuple[Progress, float]] = {}  # with the time.monotonic of the call

    def busy(self, what: str) -> AbstractContextManager[object]:
        if self._tell is _print:
            _print(what)
        return nullcontext()

    def say(self, text: str) -> None:
        log.info("%s", text)

    @contextmanager
    def run(self, coordinator: Coordinator) -> Iterator[Callable[[], bool]]:
        with Signals((signal.SIGINT,)) as signals:

            def watch() -> bool:
                if len(signals.received) >= URGENT:
                    raise KeyboardInterrupt
                for summary in coordinator.evaluations.summaries():
                    self._show(summary, coordinator.evaluations.trouble)
                return bool(signals.received) or self._stop.is_set()

            yield watch
        if signals.received:
            raise KeyboardInterrupt

    def _show(self, summary: Summary, trouble: str) -> None:
        if self._tell is None:
            return
        now = Progress(
            evaluation_id=summary.evaluation_id,
            tasks=summary.entries,
            scored=summary.scored,
            shards=summary.shards,
            shards_done=summary.shards_done,
            trouble=trouble,
        )
        at = time.monotonic()
        last, told_at = self._last.get(summary.evaluation_id, (None, at))
        if last != now or at - told_at >= ALIVE_SECONDS:
            self._last[summary.evaluation_id] = now, at
            self._tell(now)


def _print(progress: Progress | str) -> None:
    print(progress, file=sys.stderr, flush=True)  # noqa: T201 (what `progress=True` asks for)
