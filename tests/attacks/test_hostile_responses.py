"""Attacks of a response file, or of what lies beside it: written by a job that ran a checkpoint's code, or by a broken node.

Frames of any content, bombs, pipes and links are in tests/contract/test_files.py, programs in tests/sandbox.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from support.open_redis import running_on
from support.written import framed, head_of

from coordinator.evaluation.events import ShardsDumped
from coordinator.runtime.runner import Running
from evaljobs.contract.specs import FrameRef
from evaljobs.queue.redis_client import RedisAddress, publish


@pytest.fixture
def running(tmp_path: Path) -> Running:
    """An evaluation with shards to do, whose Redis is away."""
    made = running_on(tmp_path)
    publish(RedisAddress(socket=str(tmp_path / "none")), made.performer.site.paths.redis_address)
    return made


def shards(running: Running) -> dict[str, tuple[str, str]]:
    """Shard -> its task and key, of those to do."""
    leaves = running.state.shards.leaves
    found = running.state.shards.by_name
    return {
        n: (leaves[s.leaf].planned.task, leaves[s.leaf].planned.key)
        for n, s in found.items()
        if s.frame is None
    }


def dumped(running: Running) -> dict[str, FrameRef]:
    events = running._new_shards(1e6, thorough=True)
    return dict(pair for event in events if isinstance(event, ShardsDumped) for pair in event.shards)


def left(running: Running, name: str, *heads: bytes) -> None:
    with (running.paths.responses / name).open("ab") as file:
        for head in heads:
            file.write(framed(head, zlib.compress(b"[]")))


def test_a_record_counts_for_the_shard_that_was_planned_and_no_other(running: Running) -> None:
    """Another task's name, another set's key, another cut, or a shard that no plan has: passed over, the rest is read."""
    (first, (task, key)), (second, (task2, key2)) = list(shards(running).items())[:2]
    other = next(t for t in running.state.shards.leaves if t != task)
    forged = [
        head_of(shard=first, task=other, key=running.state.shards.leaves[other].planned.key),
        head_of(shard=first, task=task, key="x" * 64),
        head_of(shard=f"{task}|4:0|1", task=task, key=key),
        head_of(shard=f"{task}|0|999", task=task, key=key),
        head_of(shard="../../x", task="../../x", key=key),
        head_of(shard=first + "\n", task=task, key=key),
    ]
    left(running, "a.frames", *forged, head_of(shard=second, task=task2, key=key2))
    assert set(dumped(running)) == {second}


def test_the_first_whole_record_of_a_shard_is_its_answer(running: Running) -> None:
    """A later one, in any file, changes nothing that was accepted."""
    shard, (task, key) = next(iter(shards(running).items()))
    left(running, "b.frames", head_of(shard=shard, task=task, key=key, trial="honest"))
    found = dumped(running)
    assert found[shard].file == "b.frames"
    running.state.shards.by_name[shard].frame = found[shard]
    left(running, "a.frames", head_of(shard=shard, task=task, key=key, trial="forger"))
    left(running, "b.frames", head_of(shard=shard, task=task, key=key, trial="forger"))
    assert dumped(running) == {}
