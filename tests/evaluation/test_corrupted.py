"""A response record that is damaged after it was counted: the shard runs again, and no score is made of the rest."""

from __future__ import annotations

import copy
import os
import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.invariants import validate
from support.simulated.parts import SITE, Faults
from support.simulated.world import World
from support.written import framed, head_of

from coordinator.base.listing import Listing
from coordinator.base.throttle import Throttle
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import job_specs, shards
from coordinator.evaluation import step as machine
from coordinator.evaluation.state import State
from coordinator.runtime.runner import Running
from evaljobs.contract.outcomes import Failed, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import FrameRef
from evaljobs.contract.storage import MAGIC, FrameWriter


def looking_at(state: State, folder: Path) -> Running:
    """The part of the loop that looks at an evaluation's files."""
    running = Running.__new__(Running)
    running.state, running.paths, running.snapshot = state, EvaluationPaths(folder), None
    running._consumed, running._paces, running._outcomes_read = {}, {}, set()
    running._throttle, running._outcomes = Throttle(), Listing(running.paths.outcomes)
    running._failed = {}
    return running


def dump(running: Running, trial: str, shard: str, task: str = "t", key: str = "k") -> FrameRef:
    responses = ((0, [-1.5, True]),)
    known = {"task": task, "key": key, "started_at": 0, "seconds": 1, "responses": responses}
    with FrameWriter(running.paths.response_file(trial)) as file:
        return file.append(ShardResponses(shard=shard, trial=trial, **known))


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
    leaf = world.state.shards.leaves[next(iter(entry.sets))]
    shard = leaf.planned.shards[0]
    metric = next(n for n in world.state.scoring.outstanding if world.state.scoring.metrics[n].entry == index)
    event = ev.ShardCorrupted(at=world.now, shard=shard, error="checksum")
    actions = machine.step(world.state, SITE, event).actions
    world.journal.append(ev.ShardCorrupted(at=world.now, shard=shard, error="checksum"))
    validate(world.state)
    assert entry.status == "built"
    assert [a for a in actions if isinstance(a, do.QueueShards)]
    world.perform(actions)
    world.rq.discard(metric)
    failed = Failed(name=metric, job="score", blame="bug", error="x does not match", entry=index)
    world.take([ev.OutcomeSeen(at=world.now, outcome=failed)])
    assert entry.status == "built", "not scored before the shard is there again"
    world.run_to_scores()


def test_corruption_of_what_is_scored_already_changes_nothing() -> None:
    """The score stands: it was made of whole records."""
    world, index = scoring(7)
    while world.state.entries[index].status != "scored":
        world.tick()
    leaf = world.state.shards.leaves[next(iter(world.state.entries[index].sets))]
    world.take([ev.ShardCorrupted(at=world.now, shard=leaf.planned.shards[0], error="late")])
    assert world.state.entries[index].status == "scored"
    assert leaf.todo == 0


def test_a_metric_job_that_is_queued_again_reads_the_records_that_stand_now() -> None:
    """Not those that were found corrupt since it was queued first."""
    world = World(1, Faults(metric_slow=1.0))
    while not any(m.kind == "execute" for m in world.state.scoring.metrics.values()):
        world.tick()
    metric = next(m for m in world.state.scoring.metrics.values() if m.kind == "execute")
    leaf = world.state.shards.leaves[metric.task]
    shard = leaf.planned.shards[leaf.places[metric.documents[0]][0]]
    corrupt = world.state.shards.by_name[shard].frame
    again = FrameRef(file="again.frames", offset=0, length=1)
    world.take([ev.ShardCorrupted(at=world.now, shard=shard, error="its checksum is wrong")])
    world.take([ev.ShardsDumped(at=world.now, shards=((shard, again),))])
    frames = job_specs.metric_spec(world.state, SITE, metric).frames
    assert again in frames
    assert corrupt not in frames


def test_the_loop_finds_the_unreadable_record_of_a_failed_score(tmp_path: Path) -> None:
    """One byte flipped, another file gone: both shards are named, and none of those that can be read."""
    world, index = scoring(3)
    state = world.state
    shards = [s for t in state.entries[index].sets for s in state.shards.leaves[t].planned.shards]
    running = looking_at(state, tmp_path)
    for number, shard in enumerate(shards):
        state.shards.by_name[shard].frame = dump(running, f"trial-{number}", shard)
    metric = next(n for n in state.scoring.outstanding if state.scoring.metrics[n].entry == index)
    failed = Failed(name=metric, job="score", blame="bug", error="?", entry=index)
    seen = [ev.OutcomeSeen(at=5.0, outcome=failed)]
    assert running._corrupted(seen, 5.0) == []
    first = running.paths.response_file("trial-0")
    data = bytearray(first.read_bytes())
    data[-1] ^= 0xFF
    first.write_bytes(data)
    running.paths.response_file(f"trial-{len(shards) - 1}").unlink()
    events = running._corrupted(seen, 5.0)
    assert {e.shard for e in events if isinstance(e, ev.ShardCorrupted)} == {shards[0], shards[-1]}
    assert (
        running._corrupted([ev.OutcomeSeen(at=5.0, outcome=failed.model_copy(update={"name": "?"}))], 5.0)
        == []
    )


def test_two_copies_of_a_shard_in_one_look_are_one_piece_of_news(tmp_path: Path) -> None:
    """Both trials dumped it before anybody looked: the journal tells of the shard once."""
    world, index = scoring(3)
    state = world.state
    leaf = state.shards.leaves[next(iter(state.entries[index].sets))]
    shard = leaf.planned.shards[0]
    state.shards.by_name[shard].frame = None
    running = looking_at(state, tmp_path)
    for trial in ("a", "b"):
        dump(running, trial, shard, leaf.planned.task, leaf.planned.key)
    (told,) = running._new_shards(5.0, thorough=True)
    assert isinstance(told, ev.ShardsDumped)
    assert [name for name, _ in told.shards] == [shard]
    assert running._new_shards(6.0, thorough=True) == []


def test_a_shard_whose_records_are_never_answers_fails_its_task_with_the_reason(tmp_path: Path) -> None:
    """Well-framed and no answers, each time it runs: three runs, then its entry fails and says why; others go on."""
    world, index = scoring(3)
    state = world.state
    entry = state.entries[index]
    shard = state.shards.leaves[next(iter(entry.sets))].planned.shards[0]
    frame = state.shards.by_name[shard].frame
    running = looking_at(state, tmp_path)
    for run in range(1, 4):
        body = [b"no zlib", zlib.compress(b'[[0,"\xff"]]'), zlib.compress(b"[" * 50_000)][run - 1]
        frame_of_rot = framed(head_of(shard=shard), body)
        path = running.paths.response_file("x")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(frame_of_rot)
        state.shards.by_name[shard].frame = FrameRef(file=path.name, offset=0, length=len(frame_of_rot))
        failed = Failed(name="gone", job="score", blame="retry", error="?", entry=index)
        state.scoring.metrics["gone"] = next(m for m in state.scoring.metrics.values() if m.entry == index)
        state.scoring.outstanding.add("gone")
        told = running._corrupted([ev.OutcomeSeen(at=5.0, outcome=failed)], 5.0)
        state.scoring.outstanding.discard("gone")
        del state.scoring.metrics["gone"]
        (event,) = [e for e in told if isinstance(e, ev.ShardCorrupted) and e.shard == shard]
        machine.step(state, SITE, event)
        assert (entry.status == "failed") is (run == 3)
        if run < 3:
            assert state.shards.by_name[shard].frame is None
            shards.dumped(state, ev.ShardsDumped(at=world.now, shards=((shard, frame),)))
    assert "was run 3 times and left no record that can be read; the last: x.frames" in entry.error
    assert state.shards.todo == sum(
        1 for s in state.shards.by_name.values() if s.frame is None and not s.quarantined
    )


def test_a_shard_that_leaves_no_record_however_often_it_runs_fails_its_task() -> None:
    """Stray, queued, run and stray again three times: what it left was no record of it. Stray alone counts nothing."""
    world, index = scoring(5)
    state = world.state
    entry = state.entries[index]
    shard = state.shards.leaves[next(iter(entry.sets))].planned.shards[0]
    machine.step(state, SITE, ev.ShardCorrupted(at=world.now, shard=shard, error="checksum"))
    for _ in range(8):
        machine.step(state, SITE, ev.ShardsStray(at=world.now, shards=(shard,)))
    assert entry.status == "built"
    for _ in range(2):
        actions = machine.step(
            state, SITE, ev.ShardsStray(at=world.now, shards=(shard,), again=(shard,))
        ).actions
    assert entry.status == "failed"
    assert "response files hold no record of it" in entry.error
    assert not [a for a in actions if isinstance(a, do.QueueShards)]
    validate(state)


def test_what_is_no_response_file_is_passed_over_by_the_loop(tmp_path: Path) -> None:
    """A pipe, a link, a folder, a name that no trial has, bytes without end that only begin like records."""
    world, _ = scoring(3)
    running = looking_at(world.state, tmp_path)
    for folder in (running.paths.responses, running.paths.outcomes):
        folder.mkdir()
        ending = "frames" if folder.name == "responses" else "json"
        os.mkfifo(folder / f"pipe.{ending}")
        (folder / f"link.{ending}").symlink_to("/etc/hostname")
        (folder / f"nowhere.{ending}").symlink_to(tmp_path / "nowhere")
        (folder / f"folder.{ending}").mkdir()
        (folder / os.fsdecode(b"\xff\xfe." + ending.encode())).write_bytes(b"x")
        (folder / f"bytes.{ending}").write_bytes(MAGIC * 100_000)
        (folder / f"deep.{ending}").write_bytes(b"[" * 100_000)
    entry = Failed(name="x", job="score", blame="bug", error="?", entry=99)
    (running.paths.outcomes / "x.failed.json").write_text(entry.model_dump_json())
    assert running._new_shards(5.0, thorough=True) == []
    assert running._new_shards(6.0, thorough=True) == []
    assert running._new_outcomes(5.0) == []


def test_answers_of_a_shard_that_come_twice_count_once() -> None:
    """As from a trial that was taken for lost and dumped after all: of equal answers the first stay."""
    world = World(1, Faults())
    while not (done := [n for n, s in world.state.shards.by_name.items() if s.frame is not None]):
        world.tick()
    before = copy.deepcopy(world.state.shards)
    again = FrameRef(file="late.frames", offset=0, length=1)
    world.take([ev.ShardsDumped(at=world.now, shards=((done[0], again),))])
    assert world.state.shards == before
