"""Staging as a state machine: whatever precursors, trials and `clean` do on a node, a copy is exact and none is left over."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.node_memory import NodeMemory, names

from evaljobs.staging import clean, copy, precursor, store
from evaljobs.staging.precursor import Holding
from evaljobs.staging.store import NotStaged, reading

WHICH = st.sampled_from([0, 1])


class Lives(RuleBasedStateMachine):
    """Two checkpoints; `copies`: those in memory, True where the copy's bytes are right."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        (self.folder / "root").mkdir()
        (self.folder / "root" / "foreign").write_text("not ours")
        self.world = NodeMemory(folder=self.folder, root=self.folder / "root")
        self.checkpoints = [self.world.checkpoint(f"step-{i}", seed=i, size=5000) for i in (0, 1)]
        self.copies: dict[int, bool] = {}
        self.holds: list[tuple[int, Holding]] = []
        self.readers: list[tuple[int, ExitStack]] = []

    def path(self, which: int) -> Path:
        return self.world.home / self.checkpoints[which].digest / store.MODEL

    def used(self) -> set[int]:
        return {which for which, _ in self.holds} | {which for which, _ in self.readers}

    @rule(which=WHICH, prefetches=st.booleans())
    def stage(self, which: int, prefetches: bool) -> None:
        """A whole copy is used, also a dead precursor's; a damaged one is replaced; unused ones go, but not for a prefetch."""
        checkpoint = self.checkpoints[which]
        spec = self.world.spec(checkpoint, share=1.0 if prefetches else None)
        holding = precursor.stage_only(spec)
        whole = self.copies.get(which, False)
        assert (holding.staged.rung, holding.staged.path) == ("shm", str(self.path(which)))
        assert holding.staged.storage_bytes == (0 if whole else checkpoint.bytes)
        assert bool(holding.staged.why) == (which in self.copies and not whole)
        self.holds.append((which, holding))
        kept = self.copies if prefetches else self.used()
        self.copies = {one: self.copies[one] for one in self.copies if one in kept} | {which: True}

    @rule(which=WHICH)
    def stop_while_staging(self, which: int) -> None:
        """Nothing half-written stays; copies that are in use do."""
        stop = Event()
        stop.set()
        if which not in self.copies:
            with pytest.raises(copy.Stopped) as error:
                precursor.stage_only(self.world.spec(self.checkpoints[which]), stop=stop)
            assert precursor.failure(error.value, name="x", node="n1").blame == "retry"
            self.copies = {one: whole for one, whole in self.copies.items() if one in self.used()}

    @precondition(lambda self: self.holds)
    @rule(number=st.integers(0, 9), dies=st.booleans())
    def end(self, number: int, dies: bool) -> None:
        """The last precursor takes the copy with it; a dead one leaves it."""
        which, holding = self.holds.pop(number % len(self.holds))
        assert holding.slot is not None
        if dies:  # the kernel closes its files
            os.close(holding.slot.lease)
            os.close(holding.slot.fd)
            return
        store.leave(holding.slot, patience=0.0)
        if which not in {one for one, _ in self.holds}:
            self.copies.pop(which, None)

    @rule(which=WHICH)
    def read(self, which: int) -> None:
        """A trial reads a published copy, and nothing else."""
        held = ExitStack()
        if which in self.copies:
            held.enter_context(reading(self.path(which)))
            self.readers.append((which, held))
        else:
            with pytest.raises(NotStaged):
                held.enter_context(reading(self.path(which)))

    @precondition(lambda self: self.readers)
    @rule()
    def stop_reading(self) -> None:
        self.readers.pop()[1].close()

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 9))
    def flip_a_byte(self, number: int) -> None:
        which = list(self.copies)[number % len(self.copies)]
        file = self.path(which) / "model-00002-of-00003.safetensors"
        if self.copies[which]:
            with file.open("r+b") as opened:
                opened.seek(3000)
                byte = opened.read(1)
                opened.seek(3000)
                opened.write(bytes([byte[0] ^ 1]))
            self.copies[which] = False

    @rule(everything=st.booleans())
    def clean(self, everything: bool) -> None:
        """What is used stays, but for `--all`; a precursor whose copy has gone sees it."""
        done = clean.clean(self.world.root, everything=everything, patience=0.0)
        gone = {one for one in self.copies if everything or one not in self.used()}
        assert done.problems == ()
        assert set(done.removed) == {self.checkpoints[one].digest for one in gone}
        assert set(done.kept) == {self.checkpoints[one].digest for one in self.copies.keys() - gone}
        for which, holding in list(self.holds):
            if which in gone:
                assert holding.slot is not None
                assert holding.slot.lost()
                assert store.leave(holding.slot, patience=0.0) == 0
                self.holds.remove((which, holding))
        self.readers = [one for one in self.readers if one[0] not in gone or one[1].close()]
        self.copies = {one: self.copies[one] for one in self.copies.keys() - gone}

    @invariant()
    def copies_are_exact_and_no_other_is_there(self) -> None:
        for which, whole in self.copies.items():
            assert self.world.copy_is_exact(self.checkpoints[which]) == whole
        there = names(self.world.home) if self.world.home.exists() else []
        assert set(there) == {self.checkpoints[one].digest for one in self.copies}
        assert self.copies or self.world.nothing_left()

    def teardown(self) -> None:
        while self.readers:
            self.stop_reading()
        while self.holds:
            self.end(0, dies=False)
        shutil.rmtree(self.folder)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_a_file_by_a_name_that_we_do_not_give_stays(world: NodeMemory) -> None:
    """`clean` and a precursor that clears leave it alone, and the first reports it."""
    holding = precursor.stage_only(world.spec(world.checkpoint()))
    (world.home / "notes.txt").write_text("mine")
    assert clean.clean_main(["--root", str(world.root)]) == 1
    precursor.clear(holding, "test")
    assert (world.home / "notes.txt").read_text() == "mine"
