"""Node memory as an ordinary user has it: a root like /dev/shm, where others may have been first, and no right to all files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.node_memory import NodeMemory, names
from support.with_root import USER, as_user

from evaljobs.staging import clean, owned_files, precursor, store
from evaljobs.staging.store import reading

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")


@pytest.fixture
def shared(world: NodeMemory) -> Iterator[NodeMemory]:
    """A root that is everybody's and sticky, as /dev/shm is, and a folder of the user's for his checkpoints."""
    # what Python imports on first use is imported now: its folder may be closed to the user
    precursor.clear(precursor.stage_only(world.spec(world.checkpoint("warm"))), "test")
    world.root.chmod(0o1777)
    folder = Path(tempfile.mkdtemp(prefix="staging-user-", dir="/dev/shm"))
    try:
        for path in (folder, world.paths.root.parent):
            path.chmod(0o755)
        os.chown(folder, USER, USER)
        yield replace(world, folder=folder)
    finally:
        as_root_remove(folder)


def as_root_remove(folder: Path) -> None:
    parent = os.open(folder.parent, os.O_RDONLY)
    owned_files.remove_tree(parent, folder.name)
    os.close(parent)


def home(world: NodeMemory) -> Path:
    return world.root / store.home_name(USER)


def test_stages_reads_and_clears(shared: NodeMemory) -> None:
    """All of it without any privilege: copy, read, clear; another user's memory is not touched."""
    other = shared.root / store.home_name(0)
    (other / ("a" * 32)).mkdir(parents=True)
    (other / ("a" * 32) / "weights").write_text("root's")

    def act() -> None:
        checkpoint = shared.checkpoint()
        holding = precursor.stage_only(shared.spec(checkpoint))
        assert (holding.staged.rung, holding.staged.why) == ("shm", "")
        with reading(holding.staged.path):
            assert shared.copy_is_exact(checkpoint)
        precursor.clear(holding, "test")
        assert clean.clean(shared.root, everything=True).problems == ()

    as_user(act)
    assert names(shared.root) == [other.name, "foreign"]
    assert (other / ("a" * 32) / "weights").read_text() == "root's"


@pytest.mark.parametrize(("is_folder", "word"), [(False, "a link or no folder"), (True, "belongs to uid 0")])
def test_what_others_planted_is_named_and_left_alone(shared: NodeMemory, is_folder: bool, word: str) -> None:
    """At our home's name there is a file or another user's folder: trials read storage, and cleaning touches nothing."""
    home(shared).mkdir() if is_folder else home(shared).touch()
    before = os.lstat(home(shared))

    def act() -> None:
        checkpoint = shared.checkpoint()
        first = precursor.stage_only(shared.spec(checkpoint))
        assert (first.staged.rung, first.staged.path) == ("storage", checkpoint.source)
        (problem,) = clean.clean(shared.root, everything=True).problems
        assert word in problem
        assert problem in first.staged.why
        precursor.clear(first, "test")

    as_user(act)
    after = os.lstat(home(shared))
    assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)
    assert names(shared.root) == [home(shared).name, "foreign"]


def test_a_checkpoint_that_he_may_not_read_is_the_operators(shared: NodeMemory) -> None:
    """Denied by storage: a failure that says so and who must act; nothing is left in node memory."""

    def act() -> None:
        checkpoint = shared.checkpoint()
        (Path(checkpoint.source) / "model-00002-of-00003.safetensors").chmod(0)
        assert precursor.main(shared.spec(checkpoint)) == 1
        failed = shared.outcome("failed")
        assert failed is not None
        assert failed.kind == "failed"
        assert failed.blame == "operator"
        assert "give this user the right to" in failed.error

    as_user(act)
    assert names(shared.root) == ["foreign"]
