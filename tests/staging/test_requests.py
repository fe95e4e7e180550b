"""Request sets beside the weights: read there by trials, and only while they are what storage held."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from staging.world import MIB, World, wait_for

from evaljobs.contract.outcomes import RequestsStaged
from evaljobs.contract.paths import batch_file, batch_index_file
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.batches import Batch, Piece, RequestsHead, encode_batches
from evaljobs.staging import precursor
from evaljobs.staging.node_requests import copy_of
from evaljobs.trial.shard_runner import RequestSet

SIZE = 2


def make_set(folder: Path, *, pieces: int = 8, words: int = 10) -> str:
    """A request set of likelihoods, cut into batches."""
    head = RequestsHead(
        task=folder.name,
        requests=pieces,
        digests={},
        order={},
        settings=[],
        max_gen_tokens=[],
        text=True,
        grouped=False,
        max_length=64,
    )
    rows = [
        Piece(
            kind="loglikelihood",
            index=i,
            document=i,
            context=os.urandom(words).hex(),
            continuation="yes",
            length=words,
        )
        for i in range(pieces)
    ]
    data, index = encode_batches(head, "key", rows, SIZE)
    folder.mkdir(parents=True)
    batch_file(folder, SIZE).write_bytes(data)
    batch_index_file(folder, SIZE).write_text(index.model_dump_json())
    return str(folder)


def tell(world: World, *folders: str) -> None:
    """What the coordinator does once it has planned."""
    sets = {Path(f).name: f for f in folders}
    write_atomic(world.paths.request_sets, json.dumps({"batch_size": SIZE, "request_sets": sets}).encode())


def near(world: World, slot: Path, folder: str) -> Path | None:
    return copy_of(slot, str(world.paths.root), folder, SIZE)


def read(folder: str, copy: Path | None) -> list[Batch]:
    found = RequestSet(folder, SIZE, copy=copy)
    return list(found.batches(0, len(found.index.requests)))


def options(world: World) -> dict[str, object]:
    return {"requests_mb": 1, "request_sets_file": str(world.paths.request_sets)}


def test_trials_read_the_copy_and_nothing_is_left(world: World) -> None:
    """Named after the weights are there, the sets come to the node; storage may then be away, and all goes in the end."""
    folder = make_set(world.folder / "sets" / "task")
    before = read(folder, None)
    process = world.start(world.spec(world.checkpoint(), **options(world)))
    slot = Path(world.staged().path).parent
    assert near(world, slot, folder) is None
    tell(world, folder)
    wait_for(lambda: world.outcome("requests-staged", "stage-a.requests-1"))
    told = world.outcome("requests-staged", "stage-a.requests-1")
    assert isinstance(told, RequestsStaged)
    size = sum(p.stat().st_size for p in Path(folder).iterdir())
    assert (told.sets, told.bytes, told.storage_bytes, told.why) == (1, size, size, "")
    copy = near(world, slot, folder)
    Path(folder).rename(world.folder / "away")
    assert copy is not None
    assert read(folder, copy) == before
    world.release()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert world.nothing_left()


@pytest.mark.parametrize("harm", ["flipped", "truncated", "index", "sums", "link", "gone"])
def test_a_damaged_copy_is_not_read(world: World, harm: str) -> None:
    """Whatever becomes of a copy, the trial reads the set itself; one that goes under it does no harm either."""
    folder = make_set(world.folder / "sets" / "task")
    holding = precursor.stage_only(world.spec(world.checkpoint(), **options(world)))
    shelf = holding.shelf()
    assert shelf is not None
    assert holding.slot is not None
    tell(world, folder)
    assert shelf.refresh() is not None
    assert shelf.refresh() is None  # the same word is no news
    copy = near(world, holding.slot.path, folder)
    assert copy is not None
    opened = RequestSet(folder, SIZE, copy=copy)
    victim = batch_file(copy, SIZE)
    match harm:
        case "flipped":
            data = bytearray(victim.read_bytes())
            data[len(data) // 2] ^= 1
            victim.write_bytes(data)
        case "truncated":
            os.truncate(victim, 10)
        case "index":
            batch_index_file(copy, SIZE).write_text("{}")
        case "sums":
            (copy / "sums.json").write_text("[1]")
        case "link":
            kept = world.folder / "same"
            kept.write_bytes(victim.read_bytes())
            victim.unlink()
            victim.symlink_to(kept)
        case "gone":
            shelf.clear()
            assert list(opened.batches(0, 1)) == read(folder, None)[:1]
    assert near(world, holding.slot.path, folder) is None
    precursor.clear(holding, "test")
    assert world.nothing_left()


def test_each_evaluation_keeps_its_own_within_its_budget(world: World) -> None:
    """Two evaluations on one checkpoint: neither's release takes the other's sets; what exceeds the budget stays on storage."""
    checkpoint = world.checkpoint()
    small, large = (
        make_set(world.folder / "sets" / "small"),
        make_set(world.folder / "sets" / "large", pieces=64, words=MIB // 48),
    )
    tell(world, small, large)
    other = world.paths.root.with_name("other")
    first = precursor.stage_only(world.spec(checkpoint, "a", **options(world)))
    second = precursor.stage_only(world.spec(checkpoint, "b", **options(world), evaluation_dir=str(other)))
    for holding in (first, second):
        shelf = holding.shelf()
        assert shelf is not None
        told = shelf.refresh()
        assert told is not None
        assert told.sets == 1
        assert "1 request sets are read from storage: they exceed [stage] requests_mb = 1" in told.why
    slot = Path(first.staged.path).parent
    assert near(world, slot, large) is None
    precursor.clear(first, "test")
    assert near(world, slot, small) is None
    assert copy_of(slot, str(other), small, SIZE) is not None
    precursor.clear(second, "test")
    assert world.nothing_left()


def test_what_a_killed_holder_left_is_checked_and_used(world: World) -> None:
    """The next holder of the evaluation reads nothing again, unless the set was built anew meanwhile."""
    folder = make_set(world.folder / "sets" / "task")
    tell(world, folder)
    spec = world.spec(world.checkpoint(), "a", **options(world))
    first = world.start(spec)
    wait_for(lambda: world.outcome("requests-staged", "a.requests-1"))
    first.kill()
    first.communicate()
    second = precursor.stage_only(world.spec(spec.checkpoint, "b", **options(world)))
    shelf = second.shelf()
    assert shelf is not None
    told = shelf.refresh()
    assert told is not None
    assert (told.sets, told.storage_bytes) == (1, 0)
    os.utime(batch_file(folder, SIZE))
    tell(world, folder)
    told = shelf.refresh()
    assert told is not None
    assert told.storage_bytes == told.bytes > 0
    Path(folder, f"batches-{SIZE}.jsonl").unlink()  # a set that is gone harms nobody's holder
    tell(world, folder)
    told = shelf.refresh()
    assert told is not None
    assert told.sets == 0
    assert "1 request sets are read from storage" in told.why
    precursor.clear(second, "test")
    assert world.nothing_left()
