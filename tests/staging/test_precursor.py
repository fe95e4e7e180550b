"""The precursor as a process: what it copies, how it ends, and what it does about what is wrong on a node."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from support.node_memory import MIB, NodeMemory, names
from support.with_root import small_disk

from evaljobs.contract.outcomes import Cleared, Failed
from evaljobs.staging import clean, copy, precursor, publish, store

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other owners need root")


def test_stages_holds_and_clears(world: NodeMemory) -> None:
    """Only what inference needs is copied, its bytes leave storage once, and after the release nothing is left."""
    checkpoint = world.checkpoint()
    process = world.start(world.spec(checkpoint))
    staged = world.staged()
    assert (staged.rung, staged.storage_bytes, staged.why) == ("shm", checkpoint.bytes, "")
    assert world.copy_is_exact(checkpoint)
    assert names(Path(staged.path)) == sorted(f.name for f in checkpoint.files)
    assert not {"optimizer.pt", "trainer_state.json"} & set(names(Path(staged.path)))
    assert world.home.stat().st_mode & 0o777 == 0o700
    world.release()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    cleared = world.outcome("cleared")
    assert isinstance(cleared, Cleared)
    assert cleared.freed_bytes >= checkpoint.bytes
    assert world.nothing_left()


def test_two_at_once_copy_once(world: NodeMemory) -> None:
    """Two precursors of one checkpoint: storage is read once, and it stays until the second leaves."""
    checkpoint = world.checkpoint(size=16 * MIB)
    first = world.start(world.spec(checkpoint, "a"))
    second = world.start(world.spec(checkpoint, "b"))
    both = world.staged("a"), world.staged("b")
    assert sum(s.storage_bytes for s in both) == checkpoint.bytes
    assert both[0].path == both[1].path
    world.release("a")
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert world.copy_is_exact(checkpoint)
    world.release("b")
    second.communicate(timeout=120)
    assert second.returncode == 0
    assert world.nothing_left()


@pytest.mark.parametrize(
    ("how", "reason"), [("SIGTERM", "terminated"), ("lease", "not renewed"), ("clean --all", "removed")]
)
def test_it_clears_and_ends_by_itself(world: NodeMemory, how: str, reason: str) -> None:
    """At SIGTERM, where the coordinator's lease file does not change for its time, and where its copy is removed."""
    process = world.start(world.spec(world.checkpoint(), lease_seconds=0.2 if how == "lease" else 900.0))
    if how != "lease":
        world.staged()
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif how == "clean --all":
        assert clean.clean(world.root).removed == ()
        assert len(clean.clean(world.root, everything=True).removed) == 1
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    cleared = world.outcome("cleared")
    assert isinstance(cleared, Cleared)
    assert reason in cleared.reason
    assert world.nothing_left()


@pytest.mark.parametrize("change", ["gone", "rewritten", "truncated", "replaced"])
def test_a_checkpoint_that_changed_is_a_clear_failure(world: NodeMemory, change: str) -> None:
    """Deleted, rewritten, truncated or replaced since it was announced: Failed for the operator, nothing published."""
    checkpoint = world.checkpoint()
    folder = Path(checkpoint.source)
    weights = folder / "model-00003-of-00003.safetensors"
    match change:
        case "gone":
            shutil.rmtree(folder)
        case "rewritten":
            before = weights.stat()
            while weights.stat().st_mtime_ns == before.st_mtime_ns:  # of a file system's clock, which ticks
                weights.write_bytes(weights.read_bytes())
        case "truncated":
            os.truncate(weights, MIB)
        case "replaced":  # another step of the same run, copied with its times: only the samples tell
            before = weights.stat()
            weights.write_bytes(bytes(b ^ 255 if i > 4096 else b for i, b in enumerate(weights.read_bytes())))
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert precursor.main(world.spec(checkpoint)) == 1
    failed = world.outcome("failed")
    assert isinstance(failed, Failed)
    assert failed.blame == "operator"
    assert "\n" not in failed.error
    assert world.nothing_left()


def test_deleted_half_way_publishes_nothing(world: NodeMemory) -> None:
    """The folder is deleted while blocks are read: nothing is published, although every byte could still be read."""
    checkpoint = world.checkpoint()
    slot = store.join(world.root, checkpoint.digest)
    reads = iter(range(1000))

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if next(reads) == 2:
            shutil.rmtree(checkpoint.source)
        return os.preadv(descriptor, buffers, offset)

    with pytest.raises(copy.SourceChanged, match="gone"):
        publish.copy_in(slot, checkpoint, readers=1, read=read)
    assert not publish.is_published(slot)
    store.leave(slot)
    assert world.nothing_left()


def test_a_link_at_a_checkpoints_name_is_reported_and_never_followed(world: NodeMemory) -> None:
    """The rung is refused by name, the link's target untouched."""
    checkpoint = world.checkpoint()
    trap = world.folder / "trap"
    trap.mkdir()
    world.home.mkdir(mode=0o700)
    (world.home / checkpoint.digest).symlink_to(trap)
    holding = precursor.stage_only(world.spec(checkpoint))
    assert (holding.staged.rung, holding.staged.path) == ("storage", checkpoint.source)
    assert checkpoint.digest in holding.staged.why
    assert list(trap.iterdir()) == []


def test_a_root_where_others_may_rename_is_refused(world: NodeMemory) -> None:
    """A root that is writable by all and not sticky: a user who may rename our home may replace weights."""
    world.root.chmod(0o777)
    holding = precursor.stage_only(world.spec(world.checkpoint()))
    assert holding.staged.rung == "storage"
    assert "not sticky" in holding.staged.why


@root_only
def test_too_small_takes_the_next_rung(world: NodeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room, seen beforehand or by ENOSPC in mid-copy: cleaned up, and the next root is used."""
    checkpoint = world.checkpoint(size=4 * MIB)
    with small_disk(world.folder / "small", "6m") as small:
        spec = world.spec(checkpoint, roots=(str(small), str(world.root)))
        holding = precursor.stage_only(spec)
        assert "are needed" in holding.staged.why
        precursor.clear(holding, "test")
        slot = store.join(small, checkpoint.digest)
        with pytest.raises(copy.TargetFailed, match="No space left"):
            publish.copy_in(slot, checkpoint, readers=4)
        store.leave(slot)
        assert list(small.iterdir()) == []
    assert world.nothing_left()
