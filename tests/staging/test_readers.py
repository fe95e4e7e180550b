"""A trial's mapped weights never change: not by the next checkpoint, not by cleaning, not by clearing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.node_memory import ROOT, NodeMemory

from evaljobs.contract.specs import CheckpointSpec
from evaljobs.staging import clean, precursor, store
from evaljobs.staging.store import NotStaged, reading

# Maps the weights as a trial does (the descriptor is closed, only the mapping stays), says so, and checks them at the end.
TRIAL = """
import ctypes, ctypes.util, os, sys
from contextlib import nullcontext
from pathlib import Path
from evaljobs.staging.copy import hash_file
from evaljobs.staging.store import reading
model, locked = Path(sys.argv[1]), sys.argv[2] == "locked"
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
import xxhash
with reading(model) if locked else nullcontext():
    maps = []
    for path in sorted(model.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        at = libc.mmap(None, size, 1, 2, fd, 0)
        os.close(fd)
        maps.append((hash_file(path), at, size))
    print("mapped", flush=True)
    sys.stdin.readline()
    for before, at, size in maps:
        view = (ctypes.c_char * size).from_address(at)
        print(xxhash.xxh3_128(view).hexdigest() == before, flush=True)
"""


def start_trial(model: str, how: str = "locked") -> subprocess.Popen[str]:
    trial = subprocess.Popen(
        [sys.executable, "-c", TRIAL, model, how],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert trial.stdout is not None
    assert trial.stdout.readline() == "mapped\n"
    return trial


def end_trial(trial: subprocess.Popen[str]) -> list[str]:
    output, _ = trial.communicate("\n", timeout=120)
    assert trial.returncode == 0
    return output.split()


def retire_by_hand(world: NodeMemory, digest: str) -> None:
    with store.locked_home(world.root) as home:
        store.retire(home, digest)


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_no_checkpoint_changes_pages_that_are_mapped(world: NodeMemory, how: str) -> None:
    """The next checkpoint gets pages of its own, whether the reader of the old one holds the lock or not."""
    old, new = world.checkpoint("old", seed=1), world.checkpoint("new", seed=2)
    first = precursor.stage_only(world.spec(old, "a"))
    trial = start_trial(first.staged.path, how)
    retire_by_hand(world, old.digest)
    second = precursor.stage_only(world.spec(new, "b"))
    assert world.copy_is_exact(new)
    assert end_trial(trial) == ["True"] * 3
    precursor.clear(first, "test")
    precursor.clear(second, "test")
    assert world.nothing_left()


def test_cleaning_while_a_trial_reads_lets_it_finish(world: NodeMemory) -> None:
    """`clean --all` takes the names; what the trial has mapped stays its own to the end."""
    holding = precursor.stage_only(world.spec(world.checkpoint()))
    trial = start_trial(holding.staged.path)
    done = clean.clean(world.root, everything=True, patience=0.1)
    assert done.problems == ()
    assert world.nothing_left()
    assert end_trial(trial) == ["True"] * 3
    precursor.clear(holding, "test")
    assert world.nothing_left()


def test_clearing_waits_for_a_reader_that_ends_in_time(world: NodeMemory) -> None:
    """A precursor that clears gives a reader time: names go only after the reader has ended."""
    process = world.start(world.spec(world.checkpoint()))
    staged = world.staged()
    with reading(staged.path):
        process.terminate()
        # the precursor has given its lease back before it waits for readers
        slot = os.open(Path(staged.path).parent, os.O_RDONLY)
        wait_until(lambda: not store.is_locked(slot, store.HELD_LOCK))
        os.close(slot)
        assert Path(staged.path).is_dir()
    process.communicate(timeout=120)
    assert world.nothing_left()


def test_reading_a_path_that_is_not_staged_does_nothing(world: NodeMemory) -> None:
    """Storage paths, and names that only look like ours, take no lock and need none."""
    for path in ("/storage/step-1", "HuggingFaceTB/SmolLM2-135M", str(world.folder / "model")):
        with reading(path):
            pass


def staged_path(world: NodeMemory, checkpoint: CheckpointSpec) -> Path:
    return world.home / checkpoint.digest / store.MODEL


def test_a_trial_that_starts_early_waits_and_never_reads_half_a_model(world: NodeMemory) -> None:
    """Before the manifest there is no reading; with patience it waits for the copy, then has all of it."""
    checkpoint = world.checkpoint(size=8 << 20)
    path = staged_path(world, checkpoint)
    with pytest.raises(NotStaged), reading(path):
        pytest.fail("read what is not there")
    slot = store.join(world.root, checkpoint.digest)
    path.mkdir(mode=0o700)  # as a killed precursor leaves it: a folder by the right name, without a manifest
    with pytest.raises(NotStaged), reading(path):
        pytest.fail("read half a model")
    process = world.start(world.spec(checkpoint))
    with reading(path, wait_seconds=60.0):
        assert world.copy_is_exact(checkpoint)
    world.release()
    process.communicate(timeout=120)
    store.leave(slot)
    assert world.nothing_left()
