"""A daemon lives for months: nothing that it holds grows with the evaluations that it has ended."""

import fnmatch
import gc
import io
import itertools
import shutil
from collections import Counter, deque
from pathlib import Path

from rich.console import Console
from support.daemons import SUITE, small
from support.fake_cluster import FakeCluster, fake_node
from support.loops import serving, until

from coordinator.base import clock
from coordinator.intake import folder_watch
from coordinator.interface.cli.screen.evaluation_views import EvaluationView
from coordinator.interface.cli.screen.live_screen import Watcher
from coordinator.runtime.service import Service
from coordinator.site.cluster.slurm_rules import Hosting
from coordinator.site.config.schema import Config, WatchConfig
from evaljobs.queue import redis_client


def held(*roots):
    """Sizes of all containers in these objects and in what they hold of evalspan's own classes, by attribute."""
    sizes, left, seen = Counter(), [*roots], set()
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


def evaluated(service, watcher, number):
    """A checkpoint appears in the watched folder, is evaluated as far as a cancellation, and is removed by its training."""
    coordinator = service.coordinator
    place = small(service.paths.root.parent / "run" / f"step-{number}", seed=number)

    def look():
        service.tick()
        watcher.show(
            [*map(EvaluationView, coordinator.evaluations.summaries())], coordinator.evaluations.trouble
        )
        return list(coordinator.evaluations.running.values())

    until(coordinator, look)
    (running,) = coordinator.evaluations.running.values()
    name, performer = running.state.evaluation_id, coordinator.performer
    coordinator.evaluations.cancel(name, "enough")
    until(coordinator, lambda: look() and running.state.ended_at is not None)
    performer.metric_queue(name).gone(["score"])
    performer.queue(name).heartbeat("late", phase="infer")  # a trial that lives on for a moment
    service.announced_at(end for end in coordinator.evaluations.summaries() if end.ended_at is not None)
    coordinator.evaluations.forget_ended()
    shutil.rmtree(place)


def test_a_daemon_holds_the_same_after_n_and_2n_evaluations(tmp_path, monkeypatch):
    """Its intake, backlog, coordinator, live screen and Redis: no container of theirs is larger, nor Python's own of patterns;
    and no descriptor is left of a work queue or a metric queue.
    """
    hours = itertools.count(clock.now(), 3600.0)
    monkeypatch.setattr(clock, "now", lambda: next(hours))  # each look is due
    monkeypatch.setattr(folder_watch, "RECHECKED_CHECKPOINTS", 100)
    watch = WatchConfig(folders=(tmp_path / "run",), suite=SUITE)
    config = Config(work_dir=tmp_path / "work", watch=watch, backlog="latest")
    (tmp_path / "run" / "unfinished.tmp").mkdir(parents=True)
    with serving(config.work_dir, FakeCluster(fleet=[fake_node("n1", gpus=0)])) as coordinator:
        service, watcher = Service(coordinator, config), Watcher(Console(file=io.StringIO()))
        service._hosting = Hosting()

        def after(numbers):
            for number in numbers:
                evaluated(service, watcher, number)
            service.tick()  # forgets the last checkpoint
            with redis_client.make_client(redis_client.read_address(service.paths.redis_address)) as client:
                keys = len(list(client.scan_iter()))
            gc.collect()  # what earlier tests have left may hold descriptors
            descriptors, patterns = [*Path("/proc/self/fd").iterdir()], fnmatch._compile_pattern.cache_info()
            return held(coordinator, service, watcher), keys, patterns.currsize, len(descriptors)

        assert after(range(4)) == after(range(4, 8))
