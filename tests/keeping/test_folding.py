"""Folding an evaluation that has ended: nothing lost, nothing doubled, and few files."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from support.ended import leave_ended
from support.steps import killed_at
from support.with_root import fill, small_disk

from coordinator.keeping.folding import MOST_FILES, count_files, fold, folders_of
from coordinator.runtime.finalize import shard_spans
from coordinator.runtime.journal import Journal
from coordinator.runtime.status_file import remove_status
from evaljobs.contract import folded
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import read_frame


def contents(paths: EvaluationPaths) -> dict[str, bytes]:
    """Every file of the folders, read as commands read it."""
    return {
        f"{folder.name}/{file.name}": folded.read_bytes(file)
        for folder in folders_of(paths)
        for file in folded.files_in(folder)
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EvaluationPaths:
    return leave_ended(tmp_path_factory.mktemp("work"), 1, 2, 2)[1]


@pytest.fixture
def paths(made: EvaluationPaths, tmp_path: Path) -> EvaluationPaths:
    """A small evaluation that has ended, to be changed by the test."""
    shutil.copytree(made.root, tmp_path / made.root.name)
    return EvaluationPaths(tmp_path / made.root.name)


def test_an_evaluation_of_64_nodes_and_60_tasks_is_left_in_60_files(tmp_path: Path) -> None:
    state, paths = leave_ended(tmp_path, 64, 8, 60)
    before, spans = contents(paths), shard_spans(state, paths)
    assert count_files(paths) > 1900
    assert fold(paths)
    assert count_files(paths) <= MOST_FILES == 60
    assert contents(paths) == before
    assert shard_spans(state, paths) == spans
    for shard in state.shards.by_name.values():
        assert shard.frame is not None
        assert read_frame(paths.responses, shard.frame).shard in state.shards.by_name


def test_an_evaluation_of_few_files_stays_as_people_know_it(paths: EvaluationPaths) -> None:
    there = count_files(paths)
    assert not fold(paths, most=there)
    assert count_files(paths) == there


def test_what_people_open_by_hand_is_folded_last(paths: EvaluationPaths) -> None:
    """The folders are folded in one order, and only until few enough files are left."""
    samples, scores = set(paths.samples.iterdir()), set(paths.scores.iterdir())
    fold(paths, most=18)
    assert not paths.specs.exists()
    assert set(paths.samples.iterdir()) == samples
    assert set(paths.scores.iterdir()) == scores


def test_a_fold_killed_at_any_step_loses_nothing_and_is_done_again(
    paths: EvaluationPaths, tmp_path: Path
) -> None:
    """The process ends before each of its steps on the file system in turn; each time every file reads the same."""
    for folder in folders_of(paths)[:-2]:
        shutil.rmtree(folder, ignore_errors=True)
    before = contents(paths)
    whole = tmp_path / "whole"
    shutil.copytree(paths.root, whole)
    for step in itertools.count(1):
        shutil.rmtree(paths.root)
        shutil.copytree(whole, paths.root)
        if not killed_at(step, lambda: fold(paths, most=0)):
            break
        assert contents(paths) == before, step
        fold(paths, most=0)
        assert contents(paths) == before, step
        assert not [*paths.root.glob(".*")]
        assert count_files(paths) <= 20
    assert step > 20


def test_a_reader_finds_every_file_while_a_fold_goes_on(paths: EvaluationPaths) -> None:
    before = contents(paths)
    pid = os.fork()
    if pid == 0:
        try:
            fold(paths, most=0)
        finally:
            os._exit(0)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        assert contents(paths) == before
    assert contents(paths) == before
    assert not paths.samples.exists()


def test_a_file_written_since_has_precedence_and_is_folded_at_the_next_end(paths: EvaluationPaths) -> None:
    """As a retry leaves it: a new score of a task, and files of new jobs, beside the archives."""
    before = contents(paths)
    fold(paths, most=0)
    score = next(name for name in before if name.startswith("scores/"))
    paths.scores.mkdir()
    paths.logs.mkdir()
    (paths.root / score).write_bytes(b"again")
    (paths.logs / "new.log").write_bytes(b"a new job")
    after = before | {score: b"again", "logs/new.log": b"a new job"}
    assert contents(paths) == after
    fold(paths, most=0)
    assert contents(paths) == after
    assert not paths.scores.exists()
    assert not paths.logs.exists()


def test_what_is_open_is_not_folded(paths: EvaluationPaths) -> None:
    """Neither one that a coordinator has resumed, nor one that is not known to have ended."""
    journal = Journal(paths.journal)
    with pytest.raises(BlockingIOError):
        fold(paths, most=0)
    journal.close()
    remove_status(paths)
    assert not fold(paths, most=0)
    assert not [*paths.root.glob("*.zip")]


def test_what_is_no_regular_file_stays(paths: EvaluationPaths, tmp_path: Path) -> None:
    """A job may leave a link, a pipe, or a name that is no text: none is followed, and none holds up the fold."""
    Path(os.fsdecode(bytes(paths.logs) + b"/\xff.log")).write_bytes(b"")
    (paths.logs / "link.log").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(paths.logs / "pipe.log")
    fold(paths, most=0)
    assert {f.name for f in paths.logs.iterdir()} == {"link.log", "pipe.log", os.fsdecode(b"\xff.log")}
    assert "link.log" not in folded.members(folded.archive_of(paths.logs))


def test_a_full_disk_costs_no_file(made: EvaluationPaths, tmp_path: Path) -> None:
    """The fold fails, and all files are there; with room it is done."""
    with small_disk(tmp_path, "4m") as disk:
        paths = EvaluationPaths(disk / made.root.name)
        shutil.copytree(made.root, paths.root)
        before = contents(paths)
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            fold(paths, most=0)
        assert contents(paths) == before
        assert not [*paths.root.glob(".*")]
        filler.unlink()
        assert fold(paths, most=0)
        assert contents(paths) == before


def test_a_damaged_archive_is_an_error_and_costs_no_loose_file(
    paths: EvaluationPaths,
) -> None:
    fold(paths, most=0)
    archive = folded.archive_of(paths.samples)
    data = bytearray(archive.read_bytes())
    data[60] ^= 0xFF
    archive.write_bytes(data)
    paths.samples.mkdir()
    (paths.samples / "new.jsonl").write_text("new")
    broken = next(f for f in folded.files_in(paths.samples) if f.name != "new.jsonl")
    with pytest.raises(OSError, match=r"damaged.*samples\.zip"):
        folded.read_bytes(broken)
    with pytest.raises(OSError, match="samples"):
        fold(paths, most=0)
    assert (paths.samples / "new.jsonl").read_text() == "new"
    assert archive.read_bytes() == data
