"""Watched folders: each checkpoint is announced once, by what it held then, whatever lies beside it."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.daemons import SUITE

from coordinator import hook
from coordinator.intake import folder_watch
from coordinator.intake.checkpoint import step_of
from coordinator.intake.folder_watch import FolderWatch
from coordinator.intake.inbox import Inbox, Notice, done
from evaljobs.contract.paths import WorkPaths


@pytest.fixture
def work(tmp_path: Path) -> WorkPaths:
    (tmp_path / "work").mkdir()
    return WorkPaths(tmp_path / "work")


def told(watch: FolderWatch) -> list[Notice]:
    """What one look announces; the daemon deals with it."""
    watch.look()
    files = Inbox(watch.paths).look()
    for file in files:
        done(file)
    return [file.notice for file in files]


def names(notices: list[Notice]) -> list[str]:
    return [Path(notice.checkpoint).name for notice in notices]


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    return folder / name


@pytest.mark.parametrize("glob", ["", "/*", "/../**/run/step-*"])
def test_a_watched_folder_announces_each_checkpoint_once(tmp_path: Path, work: WorkPaths, glob: str) -> None:
    """Named as the folder that checkpoints appear in, as a glob, or as a checkpoint itself; a restarted daemon remembers. What
    is hidden, or temporary by its name, is still being copied or written."""
    run = tmp_path / "run"
    folders = [(f"{run}{glob}", "core"), (str(tmp_path / "final"), "core")]
    watch = FolderWatch(work, folders)
    assert told(watch) == [], "a folder that is not there yet"
    (run / "unfinished-300").mkdir(parents=True)
    unfinished = (".tmp-x", ".hidden", "tmp-checkpoint-5", "step-3.partial", "step-4.tmp")
    for name in ("step-100", "step-200", *unfinished):
        checkpoint(run, name)
    checkpoint(tmp_path, "final")
    found = {Path(n.checkpoint).name: (n.step, n.seen) for n in told(watch)}
    assert found == {"step-100": (100, True), "step-200": (200, True), "final": (None, True)}
    assert told(watch) == told(FolderWatch(work, folders)) == []


def test_a_watched_checkpoint_that_is_written_over_is_told_again(tmp_path: Path, work: WorkPaths) -> None:
    """In place or as a folder of the same name, seen by the next daemon too; our own pin, or nothing new, is no news. While the
    daemon has not dealt with it, it is told once, however its files change."""
    place = checkpoint(tmp_path / "run", "step-100")
    folders = [(str(tmp_path / "run"), "core")]
    watch = FolderWatch(work, folders)
    for number in range(3):
        watch.look()
        (place / "model.safetensors").write_text("w" * number)
    assert names(told(watch)) == names(told(watch)) == [place.name]

    def news() -> list[str]:
        return names(told(FolderWatch(work, folders)))

    for change, told_again in (
        ((place / f"{hook.PIN_PREFIX}x").touch, False),
        (partial((place / "config.json").write_text, '{"other": 1}'), True),
        (partial(shutil.rmtree, place), False),
        (partial(checkpoint, tmp_path / "run", "step-100"), True),
    ):
        change()
        assert news() == [place.name] * told_again
        assert news() == []


def test_many_checkpoints_are_announced_and_looked_into_in_turns(
    tmp_path: Path, work: WorkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at each look, and each in its turn: the last of them is found, too."""
    monkeypatch.setattr(folder_watch, "MOST_NEW", 10)
    places = [checkpoint(tmp_path / "run", f"step-{i}") for i in range(25)]
    watch = FolderWatch(work, [(str(tmp_path / "run"), "core")])
    assert [len(told(watch)) for _ in range(4)] == [10, 10, 5, 0]
    looked_into: list[Path] = []
    held = folder_watch._held
    monkeypatch.setattr(folder_watch, "_held", lambda folder: looked_into.append(folder) or held(folder))
    watch._due.clear()
    (places[7] / "config.json").write_text("[0]")  # another size: on some kernels the time is that of a tick
    assert [name for _ in range(3) for name in names(told(watch))] == [places[7].name]
    assert sorted(looked_into) == sorted(places)


def test_checkpoints_that_a_training_has_removed_are_forgotten(tmp_path: Path, work: WorkPaths) -> None:
    """In memory and on disk; not those below an empty folder, which may be a mount point whose storage is away."""
    run, away = tmp_path / "run", tmp_path / "away"
    gone = [checkpoint(run, f"step-{i}") for i in range(15)]
    checkpoint(away, "step-1")
    checkpoint(run, "step-99")
    watch = FolderWatch(work, [(str(run), "core"), (str(away), "core")])
    told(watch)
    for place in (*gone, away / "step-1"):
        shutil.rmtree(place)
    for _ in range(3):
        assert told(watch) == []
    kept = [f"core\0{away / 'step-1'}", f"core\0{run / 'step-99'}"]
    assert sorted(watch._seen) == kept
    watch.look()
    assert sorted(json.loads(work.watched.read_text())) == kept


def test_a_watched_place_that_raises_hides_no_other_and_is_named_once(
    tmp_path: Path, work: WorkPaths, caplog: pytest.LogCaptureFixture
) -> None:
    """A glob that is none, names that no file system takes, a folder whose name is no text, a number that is none."""
    run, nowhere = tmp_path / "run", tmp_path / ("x" * 300)
    for name in (os.fsdecode(b"step-\xff"), "step-²", "step-3"):
        checkpoint(run, name)
    watched = [(f"{run}/**x", SUITE), (str(nowhere), SUITE), (f"{nowhere}/*/y", SUITE), (str(run), SUITE)]
    watch = FolderWatch(work, watched)
    assert [(Path(n.checkpoint).name, n.step) for n in told(watch)] == [("step-3", 3), ("step-²", None)]
    told(watch)
    said = [r.message.partition(":")[0] for r in caplog.records if r.message.startswith("watching ")]
    assert len(said) == len(set(said)) >= 1


STEPS = {
    "step-100": 100, "7b-step-20-hf": 20, "global_step0003": 3, "iter_0000300": 300, "checkpoint-300": 300,
    "step_300": 300, "step=300": 300, "300": 300, "300-hf": 300, "ep0-ba4800": 4800, "step1000-tokens4B": 1000,
    "pythia-70m-step3000": 3000, "final": None, "SmolLM2-135M-Instruct": None, "Llama-3.2-1B": None, "Qwen2.5": None,
    "gpt2": None, "phi-2": None, "Qwen3-8": None, "2024-01-05": None, "lr3e-4": None, "step_1e3": None, "mamba-2": None,
    "step-3,000": None, "step-20k": None, "epoch=1-step=500": 500, "epoch-3": 3, "ckpt_7": 7, "iteration300": 300,
    "lr3e-4-step-10": 10,
}  # fmt: skip


def test_the_step_is_the_number_that_the_name_gives_it_not_the_models_size() -> None:
    assert {name: step_of(name) for name in STEPS} == STEPS
