"""Staging as a state machine: whatever precursors, trials and `clean` do on a node, a copy is exact and none is left over."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.node_memory import NodeMemory, flip, names

from evaljobs.staging import copy, precursor, store
from evaljobs.staging.store import NotStaged, hold_for_reading

WHICH = st.sampled_from([0, 1])


@dataclass
class Reader:
    """A trial's mapped weights; `which`: the checkpoint whose names its lock keeps, None where there is none to keep."""

    which: int | None
    lock: ExitStack
    mapped: mmap.mmap
    expected: bytes


class Lives(RuleBasedStateMachine):
    """Two checkpoints; `copies`: those in memory, True where the copy's bytes are right."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        (self.folder / "root").mkdir()
        (self.folder / "root" / "foreign").write_text("not ours")
        self.world = NodeMemory(folder=self.folder, root=self.folder / "root")
        self.checkpoints = [self.world.checkpoint(f"step-{i}", seed=i, size=5000) for i in (0, 1)]
        self.copies = {}
        self.holds = []
        self.readers = []

    def path(self, which):
        return self.world.home / self.checkpoints[which].digest / store.MODEL

    def used(self):
        return {which for which, _ in self.holds} | {r.which for r in self.readers if r.which is not None}

    def remain(self, kept):
        """Only these copies are left; the lock of another one's reader keeps nothing any more."""
        self.copies = {one: whole for one, whole in self.copies.items() if one in kept}
        for reader in self.readers:
            reader.which = reader.which if reader.which in self.copies else None

    def lose(self, gone):
        """A precursor whose copy has gone sees it."""
        for which, holding in list(self.holds):
            if which in gone:
                assert holding.slot.lost()
                assert store.leave_slot(holding.slot, patience=0.0) == 0
                self.holds.remove((which, holding))

    @rule(which=WHICH, prefetches=st.booleans())
    def stage(self, which, prefetches):
        """A whole copy is used, also a dead precursor's; a damaged one is replaced, which ends the precursors that hold it; unused
        ones go, but not for a prefetch.
        """
        checkpoint = self.checkpoints[which]
        spec = self.world.spec(checkpoint, share=1.0 if prefetches else None)
        holding = precursor.stage_only(spec)
        whole = self.copies.get(which, False)
        assert (holding.staged.rung, holding.staged.path) == ("shm", str(self.path(which)))
        assert holding.staged.storage_bytes == (0 if whole else checkpoint.bytes)
        assert bool(holding.staged.why) == (which in self.copies and not whole)
        if which in self.copies and not whole:
            self.lose({which})
            self.remain(set(self.copies) - {which})
        self.holds.append((which, holding))
        self.remain(set(self.copies) if prefetches else self.used())
        self.copies[which] = True

    @rule(which=WHICH)
    def stop_while_staging(self, which):
        """Nothing half-written stays; copies that are in use do."""
        stop = threading.Event()
        stop.set()
        if which not in self.copies:
            with pytest.raises(copy.CopyStopped) as error:
                precursor.stage_only(self.world.spec(self.checkpoints[which]), stop=stop)
            assert precursor.staging_failure(error.value, name="x", node="n1").blame == "retry"
            self.remain(self.used())

    @precondition(lambda self: self.holds)
    @rule(number=st.integers(0, 9), dies=st.booleans())
    def end(self, number, dies):
        """The last precursor takes the copy with it; a dead one leaves it."""
        which, holding = self.holds.pop(number % len(self.holds))
        if dies:  # the kernel closes its files
            os.close(holding.slot.lease)
            return
        store.leave_slot(holding.slot, patience=0.0)
        if which not in {one for one, _ in self.holds}:
            self.remain(set(self.copies) - {which})

    @rule(which=WHICH, locked=st.booleans())
    def read(self, which, locked):
        """A trial maps a published copy, and nothing else."""
        lock = ExitStack()
        if which not in self.copies:
            with pytest.raises(NotStaged):
                lock.enter_context(hold_for_reading(self.path(which)))
            return
        if locked:
            lock.enter_context(hold_for_reading(self.path(which)))
        with (self.path(which) / "model-00002-of-00003.safetensors").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.readers.append(Reader(which if locked else None, lock, mapped, bytes(mapped)))

    @precondition(lambda self: self.readers)
    @rule()
    def stop_reading(self):
        self.readers.pop().lock.close()

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 9))
    def flip_a_byte(self, number):
        which = list(self.copies)[number % len(self.copies)]
        if self.copies[which]:
            flip(self.path(which) / "model-00002-of-00003.safetensors", 3000)
            self.copies[which] = False
            for reader in self.readers:
                reader.expected = bytes(reader.mapped)

    @rule(everything=st.booleans())
    def clean(self, everything):
        """What is used stays, but for `--all`."""
        done = store.clean_copies(self.world.root, everything=everything, patience=0.0)
        gone = {one for one in self.copies if everything or one not in self.used()}
        assert done["problems"] == []
        assert set(done["removed"]) == {self.checkpoints[one].digest for one in gone}
        assert set(done["kept"]) == {self.checkpoints[one].digest for one in self.copies.keys() - gone}
        self.lose(gone)
        self.remain(self.copies.keys() - gone)

    @invariant()
    def copies_are_exact_and_no_other_is_there(self):
        for which, whole in self.copies.items():
            assert self.world.copy_is_exact(self.checkpoints[which]) == whole
        there = names(self.world.home) if self.world.home.exists() else []
        assert set(there) == {self.checkpoints[one].digest for one in self.copies}
        assert self.copies or self.world.nothing_left()

    @invariant()
    def mapped_weights_never_change(self):
        """Neither by the next checkpoint, with or without a lock, nor by cleaning, nor by clearing."""
        assert all(bytes(reader.mapped) == reader.expected for reader in self.readers)

    def teardown(self):
        while self.readers:
            self.stop_reading()
        while self.holds:
            self.end(0, dies=False)
        shutil.rmtree(self.folder)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_a_file_by_a_name_that_we_do_not_give_stays(world):
    """`clean` and a precursor that clears leave it alone, and the first reports it."""
    holding = precursor.stage_only(world.spec(world.checkpoint()))
    (world.home / "notes.txt").write_text("mine")
    assert store.clean_main(["--root", str(world.root)]) == 1
    precursor.clear_weights(holding, "test")
    assert (world.home / "notes.txt").read_text() == "mine"


def test_reading_a_path_that_is_not_staged_does_nothing(world):
    """Storage paths, and names that only look like ours, take no lock and need none."""
    for path in ("/storage/step-1", "HuggingFaceTB/SmolLM2-135M", str(world.folder / "model")):
        with hold_for_reading(path):
            pass


def test_clearing_waits_for_a_reader_that_ends_in_time(world):
    """A precursor that clears gives a reader time: names go only after the reader has ended."""
    process = world.start(world.spec(world.checkpoint()))
    staged = world.staged()
    with hold_for_reading(staged.path):
        process.terminate()
        # the precursor has given its lease back before it waits for readers
        wait_until(lambda: not store.is_locked(Path(staged.path).with_name(store.HELD_LOCK)))
        assert Path(staged.path).is_dir()
    process.communicate(timeout=120)
    assert world.nothing_left()


def test_a_trial_that_starts_early_waits_and_never_reads_half_a_model(world):
    """Without a manifest, as a killed precursor leaves it, there is no reading; a patient trial has all of the copy."""
    checkpoint = world.checkpoint(size=8 << 20)
    slot = store.join_slot(world.root, checkpoint.digest)
    slot.model.mkdir(mode=0o700)
    with pytest.raises(NotStaged), hold_for_reading(slot.model):
        pytest.fail("read half a model")
    process = world.start(world.spec(checkpoint))
    with hold_for_reading(slot.model, wait_seconds=60.0):
        assert world.copy_is_exact(checkpoint)
    world.release()
    process.communicate(timeout=120)
    store.leave_slot(slot)
    assert world.nothing_left()


# --- kills -----------------------------------------------------------------------------------------------------------

# a step of a precursor: a change of names, a lock, or a block written (os.pwrite)
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime", "fcntl.flock"}
POINTS = int(os.environ.get("EVALSPAN_KILL_POINTS", "12"))


def precursor_killed_at(step, spec):
    """Its exit status and its number of steps: a precursor in a fork of this process, with SIGKILL at its n-th step."""
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        counter = itertools.count(1)

        def took():
            os.write(tell, b".")
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def profiled(_, event, function):
            if event == "c_call" and getattr(function, "__name__", "") == "pwrite":
                took()

        sys.addaudithook(lambda event, _: took() if event in STEPS else None)
        threading.setprofile(profiled)
        try:
            os._exit(precursor.main(spec))
        finally:
            os._exit(2)
    os.close(tell)
    with os.fdopen(told) as file:
        steps = len(file.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), steps


def test_killed_anywhere_a_successor_completes_exactly_and_clean_leaves_nothing(world):
    """After SIGKILL at any step: what is published is whole, the next precursor ends with the exact copy, clean cleans."""
    checkpoint = world.checkpoint(shards=3, size=3 << 20)
    spec = world.spec(checkpoint)
    world.release()
    status, steps = precursor_killed_at(0, spec)
    assert status == 0
    assert steps > 30
    assert world.nothing_left()
    rng = random.Random(os.environ.get("EVALSPAN_KILL_SEED", "7"))
    for step in sorted(rng.sample(range(1, steps + 1), min(POINTS, steps))):
        status, _ = precursor_killed_at(step, spec)
        # threads interleave: the count of a run may differ by a few, and the last steps may not be reached
        assert status in (-signal.SIGKILL, 0), f"step {step}"
        if (world.home / checkpoint.digest / store.MANIFEST).exists():
            assert world.copy_is_exact(checkpoint), f"step {step}: published, but not whole"
        if step % 2:
            holding = precursor.stage_only(spec)
            assert holding.staged.rung == "shm", f"step {step}: {holding.staged.why}"
            assert world.copy_is_exact(checkpoint), f"step {step}"
            precursor.clear_weights(holding, "test")
        assert store.clean_copies(world.root)["problems"] == []
        assert world.nothing_left(), f"step {step}: {names(world.root)}"
