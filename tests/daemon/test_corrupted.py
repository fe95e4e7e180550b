"""A response record that is damaged after it was counted: the shard runs again, and no score is made of the rest."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from world import World
from world_parts import SITE, Faults

from coordinator import machine
from coordinator import messages as m
from coordinator.running import Running
from coordinator.state import validate
from evaljobs.files import FrameWriter
from evaljobs.outcomes import Failed, ShardResponses
from evaljobs.paths import EvaluationPaths


def scoring(seed: int) -> tuple[World, int]:
    """A world in which an entry's score job is on its way; the entry's index."""
    world = World(seed, Faults())
    for _ in range(500):
        found = [e.index for e in world.state.entries if e.status == "scoring"]
        if found:
            return world, found[0]
        world.tick()
    raise AssertionError("nothing was scored")


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_a_shard_told_corrupted_runs_again_and_its_entry_is_scored_whole(seed: int) -> None:
    """Told before the failed score: the entry is open again, its shard queued once; then everything is scored."""
    world, index = scoring(seed)
    entry = world.state.entries[index]
    leaf = world.state.leaves[next(iter(entry.sets))]
    shard = leaf.planned.shards[0]
    metric = next(n for n in world.state.outstanding if world.state.metrics[n].entry == index)
    actions = machine.step(world.state, SITE, m.ShardCorrupted(at=world.now, shard=shard, error="checksum"))
    world.journal.append(m.ShardCorrupted(at=world.now, shard=shard, error="checksum"))
    validate(world.state)
    assert entry.status == "built"
    assert [a for a in actions if isinstance(a, m.QueueShards)]
    world.perform(actions)
    world.rq.discard(metric)
    failed = Failed(name=metric, job="score", blame="bug", error="x does not match", entry=index)
    world.take([m.OutcomeSeen(at=world.now, outcome=failed)])
    assert entry.status == "built", "not scored before the shard is there again"
    world.run()
    assert all(e.status == "scored" for e in world.state.entries), world.summary()


def test_corruption_of_what_is_scored_already_changes_nothing() -> None:
    """The score stands: it was made of whole records."""
    world, index = scoring(7)
    while world.state.entries[index].status != "scored":
        world.tick()
    leaf = world.state.leaves[next(iter(world.state.entries[index].sets))]
    world.take([m.ShardCorrupted(at=world.now, shard=leaf.planned.shards[0], error="late")])
    assert world.state.entries[index].status == "scored"
    assert leaf.todo == 0


def test_the_loop_finds_the_unreadable_record_of_a_failed_score(tmp_path: Path) -> None:
    """One byte flipped, another file gone: both shards are named, and none of those that can be read."""
    world, index = scoring(3)
    state = world.state
    shards = [s for t in state.entries[index].sets for s in state.leaves[t].planned.shards]
    running = Running.__new__(Running)
    running.state, running.paths = state, EvaluationPaths(tmp_path)
    for number, shard in enumerate(shards):
        record = ShardResponses(
            task="t", key="k", shard=shard, trial="x", started_at=0, seconds=1, responses=((0, [-1.5, True]),)
        )
        with FrameWriter(running.paths.response_file(f"trial-{number}")) as file:
            state.shards[shard].frame = file.append(record)
    metric = next(n for n in state.outstanding if state.metrics[n].entry == index)
    failed = Failed(name=metric, job="score", blame="bug", error="?", entry=index)
    seen = [m.OutcomeSeen(at=5.0, outcome=failed)]
    assert running._corrupted(seen, 5.0) == []
    first = running.paths.response_file("trial-0")
    data = bytearray(first.read_bytes())
    data[-1] ^= 0xFF
    first.write_bytes(data)
    running.paths.response_file(f"trial-{len(shards) - 1}").unlink()
    events = running._corrupted(seen, 5.0)
    assert {e.shard for e in events if isinstance(e, m.ShardCorrupted)} == {shards[0], shards[-1]}
    assert (
        running._corrupted([m.OutcomeSeen(at=5.0, outcome=failed.model_copy(update={"name": "?"}))], 5.0)
        == []
    )


def test_two_copies_of_a_shard_in_one_look_are_one_piece_of_news(tmp_path: Path) -> None:
    """Both trials dumped it before anybody looked: the journal tells of the shard once."""
    world, index = scoring(3)
    state = world.state
    leaf = state.leaves[next(iter(state.entries[index].sets))]
    shard = leaf.planned.shards[0]
    state.shards[shard].frame = None
    running = Running.__new__(Running)
    running.state, running.paths, running.snapshot = state, EvaluationPaths(tmp_path), None
    running._consumed, running._paces, running._scanned_at = {}, {}, 0.0
    for trial in ("a", "b"):
        copy = ShardResponses(
            task=leaf.planned.task,
            key=leaf.planned.key,
            shard=shard,
            trial=trial,
            started_at=0,
            seconds=1,
            responses=((0, "x"),),
        )
        with FrameWriter(running.paths.response_file(trial)) as file:
            file.append(copy)
    (told,) = running._new_shards(5.0, thorough=True)
    assert isinstance(told, m.ShardsDumped)
    assert [name for name, _ in told.shards] == [shard]
    assert running._new_shards(6.0, thorough=True) == []
