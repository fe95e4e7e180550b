"""A daemon lives for months: nothing that it holds grows with the evaluations that it has ended."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

import pytest
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record

from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.runtime.journal import Journal
from coordinator.runtime.loop import Coordinator


def descriptors() -> int:
    gc.collect()  # what earlier tests have left may hold some
    return len(list(Path("/proc/self/fd").iterdir()))


def begin_and_end(coordinator: Coordinator, number: int) -> None:
    name = f"ckpt-suite-{number:08d}"
    running = coordinator.accept(record(1).model_copy(update={"evaluation_id": name}))
    coordinator.performer.queue(name).snapshot()
    coordinator.cancel(name, "enough")
    until(coordinator, lambda: running.state.ended_at is not None)
    coordinator.forget_ended()


def test_descriptors_do_not_grow_with_evaluations_that_have_ended(tmp_path: Path) -> None:
    """As many after nine as after the first, each of which used its work queue and its metric queue."""
    with serving(
        tmp_path / "work", FakeCluster(fleet=[fake_node("n1", gpus=0, memory_mb=64_000)])
    ) as coordinator:
        begin_and_end(coordinator, 0)
        first = descriptors()
        for number in range(1, 9):
            begin_and_end(coordinator, number)
        assert descriptors() <= first


def test_a_journal_that_takes_no_first_event_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a full disk refuses an evaluation, no descriptor is left of it."""

    def full(_self: Journal, _events: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    coordinator = coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")]), redis=True)
    monkeypatch.setattr(Journal, "append", full)
    before = descriptors()
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            coordinator.accept(record(1))
    assert descriptors() <= before
