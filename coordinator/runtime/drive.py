"""Runs a coordinator until one evaluation has ended, for `coordinator.api.evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import obey_commands
from coordinator.runtime.runner import Running


def drive(coordinator: Coordinator, record: EvaluationRecord, watch: Callable[[], bool]) -> Running:
    """Run the loop until this one evaluation has ended. The caller holds the work folder (`in_charge`).

    `watch` is called after each tick; its first True cancels the evaluation. OperatorError where the
    evaluation was given up.
    """
    coordinator.accept_or_wait(record)
    cancelled = False
    # An earlier run was cancelled: asking for the same evaluation again resumes it. None: not yet known.
    cancelled_before: bool | None = None

    def tick() -> None:
        nonlocal cancelled
        obey_commands(coordinator)
        if watch() and not cancelled:
            _check_resumed(coordinator)
            cancelled = True
        if cancelled:
            _cancel(coordinator)

    def over() -> bool:
        nonlocal cancelled_before
        running = coordinator.running.get(record.evaluation_id)
        if running is None:
            if why := coordinator.lost(record.evaluation_id):
                raise OperatorError(f"{record.evaluation_id} was given up: {why}")
            return False
        if cancelled_before is None:
            cancelled_before = bool(running.state.ending.cancelled)
        if running.state.ended_at is None:
            return False
        if cancelled_before and not cancelled:
            with suppress(OSError):  # full disk: a later tick tries again
                coordinator.retry(record.evaluation_id)
                cancelled_before = False
            return running.state.ended_at is not None and not cancelled_before
        return True

    coordinator.run(over, tick)
    return coordinator.running[record.evaluation_id]


def _check_resumed(coordinator: Coordinator) -> None:
    """OperatorError where an earlier run could not be resumed: there is nothing to cancel here."""
    if not coordinator.running:
        raise OperatorError(
            f"not resumed ({coordinator.trouble}); its jobs go on: run the same command again"
        )


def _cancel(coordinator: Coordinator) -> None:
    """Each tick again, until the journal has it: the disk may be full."""
    for evaluation_id, running in list(coordinator.running.items()):
        if not running.state.ending.cancelled and running.state.ended_at is None:
            with suppress(OSError):
                coordinator.cancel(evaluation_id, "interrupted")
