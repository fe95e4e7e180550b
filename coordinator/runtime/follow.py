"""Who follows a run of `coordinator.api.evaluate`: a caller without a screen, or the command line's live screen."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from coordinator.base.signals import Signals
from coordinator.evaluation.state import State
from evaljobs.contract.specs import Record

if TYPE_CHECKING:
    from coordinator.runtime.loop import Coordinator  # Redis clients: a call that runs nothing does without

log = logging.getLogger(__name__)

URGENT = 3  # interrupts after which `evaluate` no longer waits for its cancellation


class Progress(Record):
    """How far an evaluation is, for the `progress` of `evaluate`. `trouble`: what it waits for; "": nothing."""

    evaluation_id: str
    tasks: int
    scored: int
    shards: int
    shards_done: int
    trouble: str = ""

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
        self._last: dict[str, Progress] = {}

    def busy(self, _what: str) -> AbstractContextManager[object]:
        return nullcontext()

    def say(self, text: str) -> None:
        log.info("%s", text)

    @contextmanager
    def run(self, coordinator: Coordinator) -> Iterator[Callable[[], bool]]:
        with Signals((signal.SIGINT,)) as signals:

            def watch() -> bool:
                if len(signals.received) >= URGENT:
                    raise KeyboardInterrupt
                for running in coordinator.running.values():
                    self._show(running.state, coordinator.trouble)
                return bool(signals.received)

            yield watch
        if signals.received:
            raise KeyboardInterrupt

    def _show(self, state: State, trouble: str) -> None:
        if self._tell is None:
            return
        shards = len(state.shards.by_name)
        now = Progress(
            evaluation_id=state.evaluation_id,
            tasks=len(state.entries),
            scored=sum(e.status == "scored" for e in state.entries),
            shards=shards,
            shards_done=shards - state.shards.todo,
            trouble=trouble,
        )
        if self._last.get(state.evaluation_id) != now:
            self._last[state.evaluation_id] = now
            self._tell(now)


def _print(progress: Progress) -> None:
    print(progress, file=sys.stderr, flush=True)  # noqa: T201 (what `progress=True` asks for)
