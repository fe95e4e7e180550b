"""Runs a coordinator until one evaluation has ended, for `coordinator.api.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from coordinator.cluster.local import LocalCluster
from coordinator.errors import OperatorError, RetryError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import obey_commands
from coordinator.runtime.runner import Running


def drive(coordinator: Coordinator, record: EvaluationRecord, watch: Callable[[], bool]) -> Running:
    """Run the loop until this one evaluation has ended. The caller holds the work folder (`in_charge`).

    `watch` is called after each tick; its first True cancels the evaluation. OperatorError where the
    evaluation was given up, RetryError where it cannot be cancelled.
    """
    coordinator.accept_or_wait(record)
    cancelled = False
    # An earlier run was cancelled: asking for the same evaluation again resumes it. None: not yet known.
    cancelled_before: bool | None = None

    def tick() -> None:
        nonlocal cancelled
        obey_commands(coordinator)
        if watch() and not cancelled:
            _cancel(coordinator, record.evaluation_id)
            cancelled = True

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
    """At the end of a run no local job is left; after an error neither is their Redis: this process may live on."""
    if not isinstance(coordinator.cluster, LocalCluster):
        yield
        return
    try:
        yield
    except BaseException:
        coordinator.cluster.close()
        coordinator.keeper.stop()
        raise
    coordinator.cluster.close()
