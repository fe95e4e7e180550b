"""A Redis that answers reads and takes no writes, or that comes back: what the coordinator queues again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.open_redis import open_server, running_on

from coordinator.runtime.journal import read_events
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.storage import FrameWriter


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with open_server(tmp_path) as client:
        yield client


def test_a_queue_that_redis_does_not_take_is_told_lost_once_and_filled_when_it_does(
    server: redis.Redis, tmp_path: Path
) -> None:
    """Five times a second for as long as it lasts was megabytes of journal; so were shards told stray."""
    running = running_on(tmp_path)
    state = running.state

    def told() -> list[str]:
        return [event.kind for event in read_events(running.journal.path)]

    server.config_set("maxmemory", "1")
    now = 1e6
    for _ in range(50):
        now += 1.0
        running._look_at_queue(now)
        running._audit(now)
    assert told() == ["queue-lost"]
    server.config_set("maxmemory", "0")
    for _ in range(5):
        now += 1.0
        running._look_at_queue(now)
    assert running.snapshot is not None
    assert running.snapshot.unclaimed == state.shards.todo
    assert told() == ["queue-lost"]
    server.delete(f"evalspan:{{{state.evaluation_id}}}:where")
    server.config_set("maxmemory", "1")
    for _ in range(5):
        now += 1.0
        running._look_at_queue(now)
        running._audit(now)
    assert told() == ["queue-lost", "shards-stray"]
    server.config_set("maxmemory", "0")
    running._audit(now)
    assert set(running.performer.queue(state.evaluation_id).unclaimed()) == {
        name for name, shard in state.shards.by_name.items() if shard.frame is None
    }
    assert told() == ["queue-lost", "shards-stray"]


def test_a_trial_believed_dead_that_lives_costs_no_task_a_run(server: redis.Redis, tmp_path: Path) -> None:
    """Redis came back empty and has forgotten the release: the trial's heartbeat claims its shard once, is released again,
    and what it is running is not counted as run without a record.
    """
    running = running_on(tmp_path)
    state, now = running.state, 1e6
    queue = running.performer.queue(state.evaluation_id)
    shard = next(name for name, found in state.shards.by_name.items() if found.frame is None)
    held = []
    for _ in range(6):
        held.append(queue.heartbeat("dead", phase="infer", shard=shard))
        running._look_at_queue(now)
        running._audit(now)
        now += 20.0
    assert state.shards.by_name[shard].unread == 0
    assert held == [True, True, False, False, False, False], "once more while the queue is filled"
    assert shard in queue.unclaimed()


def test_a_shard_that_was_run_without_redis_is_not_run_again(server: redis.Redis, tmp_path: Path) -> None:
    """Redis comes back with the queue that it had, and the trial that dumped meanwhile has died unreported: the shard is
    taken out. Also where nothing else is to do. It comes back empty: response files are read before it is filled again.
    """
    running = running_on(tmp_path)
    state, queue = running.state, running.performer.queue(running.state.evaluation_id)
    for now in (1e6, 1e6 + 1):  # filled; seen as filled
        running._look_at_queue(now)
    queued = queue.unclaimed()
    shard = state.shards.by_name[queued[0]]
    planned = state.shards.leaves[shard.leaf].planned
    ran = ShardResponses(
        task=planned.task,
        key=planned.key,
        shard=queued[0],
        trial="t",
        started_at=1e6,
        seconds=1.0,
        responses=(),
    )
    with FrameWriter(running.paths.responses / "t.frames") as responses:
        responses.append(ran)
    server.flushall()
    running._look_at_queue(now + 1)
    assert set(queue.unclaimed()) == set(queued[1:])
    running._look_at_queue(now + 2)
    state.shards.by_name[queued[1]].frame = shard.frame
    running._audit(now + 20)
    assert set(queue.unclaimed()) == set(queued[2:])
    for name in queued:
        state.shards.by_name[name].frame = shard.frame
    state.shards.todo = 0
    running._look_at_queue(now + 40)
    running._audit(now + 40)
    assert queue.unclaimed() == ()
