"""A Redis that answers reads and takes no writes, or that comes back: what the coordinator queues again."""

from __future__ import annotations

import pytest
from support.open_redis import open_server, running_on

from coordinator.runtime.journal import read_events
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.storage import FrameWriter


@pytest.fixture
def server(tmp_path):
    with open_server(tmp_path) as client:
        yield client


@pytest.fixture
def running(server, tmp_path):
    return running_on(tmp_path)


@pytest.fixture
def queue(running):
    return running.performer.queue(running.state.evaluation_id)


def looks(running, times):
    """Looks at the queue and audits of it, at these times."""
    for now in times:
        running._look_at_queue(now)
        running._audit(now)


def test_a_queue_that_redis_does_not_take_is_told_lost_once_and_filled_when_it_does(server, running, queue):
    """Five times a second for as long as it lasts was megabytes of journal; so were shards told stray."""
    state = running.state
    todo = {name for name, shard in state.shards.by_name.items() if shard.frame is None}
    told = lambda: [event.kind for event in read_events(running.journal.path)]  # noqa: E731
    times = iter(range(1_000_000, 2_000_000))
    server.config_set("maxmemory", "1")
    looks(running, [next(times) for _ in range(50)])
    assert told() == ["queue-lost"]
    server.config_set("maxmemory", "0")
    for _ in range(5):
        running._look_at_queue(next(times))
    assert running.snapshot.unclaimed == state.shards.todo == len(todo)
    assert told() == ["queue-lost"]
    server.delete(f"evalspan:{{{state.evaluation_id}}}:where")
    server.config_set("maxmemory", "1")
    looks(running, [next(times) for _ in range(5)])
    assert told() == ["queue-lost", "shards-stray"]
    server.config_set("maxmemory", "0")
    running._audit(next(times))
    assert set(queue.unclaimed()) == todo
    assert told() == ["queue-lost", "shards-stray"]


def test_a_trial_believed_dead_that_lives_costs_no_task_a_run(running, queue):
    """Redis came back empty and has forgotten the release: the trial's heartbeat claims its shard once, is released again,
    and what it is running is not counted as run without a record.
    """
    shards = running.state.shards.by_name
    shard = next(name for name, found in shards.items() if found.frame is None)
    held = []
    for number in range(6):
        held.append(queue.heartbeat("dead", phase="infer", shard=shard))
        looks(running, [1e6 + 20.0 * number])
    assert shards[shard].unread == 0
    assert held == [True, True, False, False, False, False], "once more while the queue is filled"
    assert shard in queue.unclaimed()


def test_a_shard_that_was_run_without_redis_is_not_run_again(server, running, queue):
    """Redis comes back with the queue that it had, and the trial that dumped meanwhile has died unreported: the shard is
    taken out. Also where nothing else is to do. It comes back empty: response files are read before it is filled again.
    """
    state = running.state
    for now in (1e6, 1e6 + 1):  # filled; seen as filled
        running._look_at_queue(now)
    first, second, *others = queue.unclaimed()
    planned = state.shards.leaves[state.shards.by_name[first].leaf].planned
    ran = {"task": planned.task, "key": planned.key, "shard": first, "trial": "t"}
    with FrameWriter(running.paths.responses / "t.frames") as responses:
        responses.append(ShardResponses(**ran, started_at=1e6, seconds=1.0, responses=()))
    server.flushall()
    running._look_at_queue(1e6 + 2)
    assert set(queue.unclaimed()) == {second, *others}
    frame = state.shards.by_name[first].frame
    running._look_at_queue(1e6 + 3)
    state.shards.by_name[second].frame = frame
    running._audit(1e6 + 21)
    assert set(queue.unclaimed()) == set(others)
    for name in others:
        state.shards.by_name[name].frame = frame
    state.shards.todo = 0
    looks(running, [1e6 + 41])
    assert queue.unclaimed() == ()
