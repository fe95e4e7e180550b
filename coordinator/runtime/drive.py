"""A run of `coordinator.api.evaluate`: the loop until one evaluation has ended, and who follows it.

Rule: importing this loads no Redis client, since `submit` uses it too.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from coordinator.base.signals import Signals
from coordinator.cluster.local import LocalCluster
from coordinator.errors import RetryError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake.inbox import Inbox
from evaljobs.contract.specs import Record

if TYPE_CHECKING:
    from coordinator.evaluation.state import State
    from coordinator.runtime.loop import Coordinator
    from coordinator.runtime.summary import Summary

log = logging.getLogger(__name__)

ALIVE_SECONDS = 30.0  # most seconds between two calls of `progress` of one evaluation
URGENT = 3  # interrupts after which `evaluate` no longer waits for its cancellation


class Progress(Record):
    """How far an evaluation is, for the `progress` of `evaluate`."""

    evaluation_id: str  # names its folder in the work folder
    tasks: int  # entries of the suite
    scored: int  # of these, those that have their scores
    shards: int  # parts of the tasks; 0 before the plan is made
    shards_done: int  # of these, those whose responses are on disk
    trouble: str = ""  # what it waits for; "": nothing

    def __str__(self) -> str:
        shards = f"{self.shards_done}/{self.shards} shards, " if self.shards else ""
        trouble = f" ! {self.trouble}" if self.trouble else ""
        return f"{self.evaluation_id}: {shards}{self.scored}/{self.tasks} tasks scored{trouble}"


class Aside(Protocol):
    """Takes what is said beside the result of a call. By default nothing is printed."""

    def busy(self, what: str) -> AbstractContextManager[object]:
        """Around a step that takes seconds."""
        ...

    def say(self, text: str) -> None:
        """A line for people."""
        ...


class Follow(Aside, Protocol):
    """Follows a run of `evaluate`: the command line's live screen is one."""

    def run(self, coordinator: Coordinator) -> AbstractContextManager[Callable[[], bool]]:
        """Around the run. The callable is called between two ticks; its first True cancels the evaluation."""
        ...


class Caller:
    """Follows a run for a caller without a screen. An interrupt cancels the evaluation."""

    def __init__(self, progress: bool | Callable[[Progress], object]) -> None:
        self._tell = _print if progress is True else progress or None
        self._last: dict[str, tuple[Progress, float]] = {}  # with the time.monotonic of its call

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
                for summary in coordinator.summaries():
                    self._show(summary, coordinator.trouble)
                return bool(signals.received)

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


def drive(coordinator: Coordinator, record: EvaluationRecord, watch: Callable[[], bool]) -> State:
    """Run the loop until this one evaluation has ended. The caller holds the work folder (`in_charge`).

    `watch` is called after each tick; its first True cancels the evaluation. OperatorError where the
    evaluation was given up, RetryError where it cannot be cancelled.
    """
    name, inbox, cancelled = record.evaluation_id, Inbox(coordinator.performer.site.paths), False

    def tick() -> None:
        nonlocal cancelled
        coordinator.obey(inbox.look(), name)  # another one's jobs would end with this run
        if watch() and not cancelled:
            _cancel(coordinator, name)
            cancelled = True

    coordinator.accept_or_wait(record)
    coordinator.run(
        lambda: name in coordinator.running or bool(coordinator.lost(name)), tick
    )  # once not parked
    running = coordinator.running.get(name)
    again = running is not None and bool(running.state.ending.cancelled)  # an earlier run was: it is resumed
    state = coordinator.until_ended(name, tick)
    while again and not cancelled:
        with suppress(OSError):  # a full disk: once it is read back
            coordinator.retry(name)
            again = False
        state = coordinator.until_ended(name, tick)
    return state


def _cancel(coordinator: Coordinator, evaluation_id: str) -> None:
    """RetryError where the journal cannot take it, as on a full disk: the call ends, and no job runs unseen."""
    try:
        coordinator.cancel(evaluation_id, "interrupted")
    except (OSError, KeyError) as error:
        local = isinstance(coordinator.cluster, LocalCluster)
        jobs = "its jobs end too" if local else f"its jobs go on (`evalspan cancel {evaluation_id}`)"
        raise RetryError(
            f"{evaluation_id} is not cancelled, {jobs}: {coordinator.trouble or error}; the same command resumes it"
        ) from error


@contextmanager
def ending_local_jobs(coordinator: Coordinator) -> Iterator[None]:
    """At the end of a run no local job is left."""
    if not isinstance(coordinator.cluster, LocalCluster):
        yield
        return
    try:
        yield
    finally:
        coordinator.cluster.close()
