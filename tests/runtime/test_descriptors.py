"""A daemon lives for months: nothing that it holds grows with the evaluations that it has ended."""

from __future__ import annotations

import errno
import fnmatch
import gc
import io
import itertools
import shutil
from collections import Counter, deque
from pathlib import Path

import pytest
from rich.console import Console
from support.daemons import SUITE, small
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record

from coordinator.base import clock
from coordinator.cli.screen.live_screen import Watcher
from coordinator.cli.screen.standing import Shown
from coordinator.cluster.slurm_rules import Hosting
from coordinator.config.schema import Config, WatchConfig
from coordinator.intake import folder_watch
from coordinator.runtime.journal import Journal
from coordinator.runtime.runner import Running
from coordinator.runtime.service import Service
from evaljobs.queue import redis_client


def descriptors() -> int:
    gc.collect()  # what earlier tests have left may hold some
    return len(list(Path("/proc/self/fd").iterdir()))


def held(*roots: object) -> dict[str, int]:
    """Sizes of all containers in these objects and in what they hold of evalspan's own classes, by attribute."""
    sizes: Counter[str] = Counter()
    left, seen = [*roots], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or not type(one).__module__.startswith(("coordinator", "evaljobs")):
            continue
        seen.add(id(one))
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*getattr(one, "__dict__", ()), *slots}:
            value = getattr(one, name, None)
            if isinstance(value, (dict, set, frozenset, list, deque)):
                sizes[f"{type(one).__name__}.{name}"] += len(value)
                left += value.values() if isinstance(value, dict) else value
            else:
                left.append(value)
    return dict(sizes)


def evaluated(service: Service, watcher: Watcher, number: int) -> None:
    """A checkpoint appears in the watched folder, is evaluated as far as a cancellation, and is removed by its training."""
    coordinator = service.coordinator
    place = small(service.paths.root.parent / "run" / f"step-{number}", seed=number)

    def look() -> list[Running]:
        service.tick()
        found = list(coordinator.running.values())
        watcher.show([*map(Shown, coordinator.summaries())], coordinator.trouble)
        return found

    until(coordinator, look)
    (running,) = coordinator.running.values()
    coordinator.cancel(running.state.evaluation_id, "enough")
    until(coordinator, lambda: look() and running.state.ended_at is not None)
    coordinator.performer.metric_queue(running.state.evaluation_id).known()
    # a trial that lives on for a moment
    coordinator.performer.queue(running.state.evaluation_id).heartbeat("late", phase="infer")
    coordinator.forget_ended()
    shutil.rmtree(place)


def test_a_daemon_holds_the_same_after_n_and_2n_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its intake, backlog, coordinator, live screen and Redis: no container of theirs is larger, nor Python's own of patterns;
    and no descriptor is left of a work queue or a metric queue.
    """
    hours = itertools.count(clock.now(), 3600.0)
    monkeypatch.setattr(clock, "now", lambda: next(hours))  # each look is due
    monkeypatch.setattr(folder_watch, "AGAIN", 100)
    config = Config(
        work_dir=tmp_path / "work",
        watch=WatchConfig(folders=(tmp_path / "run",), suite=SUITE),
        backlog="latest",
    )
    (tmp_path / "run" / "unfinished.tmp").mkdir(parents=True)
    with serving(tmp_path / "work", FakeCluster(fleet=[fake_node("n1", gpus=0)])) as coordinator:
        service, watcher = Service(coordinator, config), Watcher(Console(file=io.StringIO()))
        service._hosting = Hosting()

        def after(numbers: range) -> tuple[dict[str, int], int, int, int]:
            for number in numbers:
                evaluated(service, watcher, number)
            service.tick()  # forgets the last checkpoint
            with redis_client.connect(service.paths.redis_address) as client:
                keys = len(list(client.scan_iter()))
            patterns = fnmatch._compile_pattern.cache_info().currsize  # type: ignore[attr-defined]
            return held(coordinator, service, watcher), keys, patterns, descriptors()

        assert after(range(4)) == after(range(4, 8))


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
