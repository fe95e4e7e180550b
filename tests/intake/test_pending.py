"""Pending checkpoints and watched folders: each is announced once, and what one checkpoint, folder or command raises is its own; what
storage or the site raises is waited for. `evalspan status` says why.
"""

import json
import logging
import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.daemons import SUITE, announce, daemon, notices, small, taken
from support.with_root import USER, as_user

from coordinator import hook
from coordinator.base.isolate import LoopGuard
from coordinator.errors import RetryError
from coordinator.intake import folder_watch, from_settings, pending
from coordinator.intake.checkpoint import step_of
from coordinator.intake.folder_watch import FolderWatch
from coordinator.intake.from_settings import LmEvalVersion
from coordinator.intake.inbox import Inbox, remove_notice
from coordinator.site.config.schema import Config, WatchConfig
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.usefixtures("every_tick")


def read(ears):
    return pending.read_pending(ears.paths, time.time())


def test_a_bug_in_our_code_refuses_the_checkpoint_that_meets_it(tmp_path, monkeypatch, caplog):
    """With its traceback in the log; the next daemon does not meet it again."""
    ears = daemon(tmp_path / "work")
    make = from_settings.evaluation_record

    def faulty(config, checkpoint, *args, **more):
        if checkpoint.endswith("bad"):
            raise ZeroDivisionError("a faulty rule")
        return make(config, checkpoint, *args, **more)

    monkeypatch.setattr(from_settings, "evaluation_record", faulty)
    for name in ("bad", "good"):
        announce(ears, small(tmp_path / name))
    ears.tick()
    assert taken(ears) == ["good"]
    assert notices(ears) == 0
    assert "Traceback" in caplog.text
    (refused,) = read(ears).refused
    assert "a faulty rule" in refused.why


def test_a_checkpoint_is_taken_once_it_is_there_and_has_stopped_changing(tmp_path):
    """Refused and announced again, it is shown no more. No training said that one in a watched folder is saved: one that changes
    between two looks is still being written."""
    watch = WatchConfig(folders=(str(tmp_path / "run"),), roots=(tmp_path,), suite=SUITE)
    ears = daemon(tmp_path / "work", Config(watch=watch))
    announce(ears, tmp_path / "late")
    ears.tick()
    assert read(ears).refused
    announce(ears, small(tmp_path / "late"))
    folder = small(tmp_path / "run" / "step-1", seed=1)
    ears.tick()
    assert taken(ears) == ["late"]
    assert not read(ears).refused
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, (1, 1))
    ears.tick()
    assert taken(ears) == ["late"]
    ears.tick()
    assert taken(ears) == ["late", "step-1"]


@pytest.fixture
def interpreter(tmp_path):
    """One that counts how often it is asked, and has no lm_eval until a file `has` appears."""
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\n[ -e {tmp_path}/hangs ] && exec sleep 60\n"
        f"[ -e {tmp_path}/has ] && echo 1.0 || {{ echo No package metadata >&2; exit 1; }}\n"
    )
    script.chmod(0o755)
    return script


def test_without_lm_eval_notices_wait_and_are_taken_once_it_is_there(tmp_path, interpreter):
    """They stay in the inbox for the next daemon, too."""
    ears = daemon(tmp_path / "work")
    ears.coordinator.performer.lm_eval_version = LmEvalVersion((str(interpreter),), {}, rest=0.0)
    announce(ears, small(tmp_path / "new"))
    ears.tick()
    assert notices(ears) == 1
    (waits,) = read(ears).waiting
    assert "install `evalspan[hf]` there" in waits.why
    (tmp_path / "has").touch()
    wait_until(lambda: ears.tick() or "new" in taken(ears))
    assert notices(ears) == 0
    assert not read(ears).waiting


def test_an_interpreter_that_does_not_answer_is_asked_again_after_a_rest(tmp_path, interpreter):
    for name in ("hangs", "asked"):
        (tmp_path / name).touch()
    version = LmEvalVersion((str(interpreter),), {}, patience=0.2, rest=1000.0)
    for _ in range(3):
        with pytest.raises(RetryError, match="did not report"):
            version()
    assert (tmp_path / "asked").read_text().count("x") <= 1, "asked once, if it came so far"


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
def test_what_is_not_for_us_is_waited_for_and_hides_nothing(open_folder, tmp_path, caplog):
    """A closed folder among the watched ones and a link into it; a notice of what lies in it stays until it is opened."""
    closed = open_folder / "run" / "lost+found"
    small(closed / "step-1")
    (open_folder / "run" / "link").symlink_to(closed / "step-1")
    small(open_folder / "run" / "step-2")
    closed.chmod(0o700)
    suite = open_folder / "mine.toml"
    suite.write_text('name = "mine"\n[[task]]\nname = "toy"\n')
    config = Config(watch=WatchConfig(folders=(open_folder / "run",), suite=str(suite)))
    work = open_folder / "work"
    work.mkdir()
    os.chown(work, USER, USER)
    warm = daemon(tmp_path / "warm")  # what is imported on first use is imported while we may
    announce(warm, small(tmp_path / "any"))
    warm.tick()

    def looks():
        ears = daemon(work, config)
        announce(ears, closed / "step-1", "mine")
        ears.tick()
        ears.tick()
        assert taken(ears) == ["step-2"], caplog.text
        (waits,) = read(ears).waiting
        assert "Permission denied" in waits.why
        assert notices(ears) == 1

    as_user(looks)
    closed.chmod(0o755)
    ears = daemon(work, Config(watch=WatchConfig(roots=(open_folder,), suites=(suite,))))
    ears.tick()
    assert taken(ears) == ["step-1"]


def test_a_part_that_raises_is_said_once_until_it_changes(caplog):
    """And again when it raises anew after a turn that went well; the others are called all the same."""
    contained = LoopGuard(logging.getLogger("parts"))
    turns = iter([OSError("full"), OSError("full"), None, OSError("full"), ValueError("other")])

    def part():
        if (error := next(turns)) is not None:
            raise error
        return "done"

    assert [contained("the part", part) for _ in range(5)] == [None, None, "done", None, None]
    assert [(r.message, bool(r.exc_info)) for r in caplog.records] == [
        ("the part: full", False),
        ("the part: full", False),
        ("the part: other", True),
    ]


# --- watched folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return WorkPaths(tmp_path / "work")


def told(watch):
    """What one look announces; the daemon deals with it."""
    watch.look()
    files = Inbox(watch.paths).look()
    for file in files:
        remove_notice(file)
    return [file.notice for file in files]


def names(notices):
    return [Path(notice.checkpoint).name for notice in notices]


def checkpoint(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    return folder / name


@pytest.mark.parametrize("glob", ["", "/*", "/../**/run/step-*"])
def test_a_watched_folder_announces_each_checkpoint_once(tmp_path, work, glob):
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


def test_a_watched_checkpoint_that_is_written_over_is_told_again(tmp_path, work):
    """In place or as a folder of the same name, seen by the next daemon too; our own pin, or nothing new, is no news. While the
    daemon has not dealt with it, it is told once, however its files change."""
    place = checkpoint(tmp_path / "run", "step-100")
    folders = [(str(tmp_path / "run"), "core")]
    watch = FolderWatch(work, folders)
    for number in range(3):
        watch.look()
        (place / "model.safetensors").write_text("w" * number)
    assert names(told(watch)) == names(told(watch)) == [place.name]

    def news():
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


def test_many_checkpoints_are_announced_and_looked_into_in_turns(tmp_path, work, monkeypatch):
    """A few at each look, and each in its turn: the last of them is found, too."""
    monkeypatch.setattr(folder_watch, "MOST_NEW", 10)
    places = [checkpoint(tmp_path / "run", f"step-{i}") for i in range(25)]
    watch = FolderWatch(work, [(str(tmp_path / "run"), "core")])
    assert [len(told(watch)) for _ in range(4)] == [10, 10, 5, 0]
    looked_into = []
    held = folder_watch._held
    monkeypatch.setattr(folder_watch, "_held", lambda folder: looked_into.append(folder) or held(folder))
    watch._due.clear()
    (places[7] / "config.json").write_text("[0]")  # another size: on some kernels the time is that of a tick
    assert [name for _ in range(3) for name in names(told(watch))] == [places[7].name]
    assert sorted(looked_into) == sorted(places)


def test_checkpoints_that_a_training_has_removed_are_forgotten(tmp_path, work):
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


def test_a_watched_place_that_raises_hides_no_other_and_is_named_once(tmp_path, work, caplog):
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
    "lr3e-4-step-10": 10, f"step-{1 << 54}": None,
}  # fmt: skip


def test_the_step_is_the_number_that_the_name_gives_it_not_the_models_size():
    assert {name: step_of(name) for name in STEPS} == STEPS
