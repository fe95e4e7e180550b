"""A submission, with or without a daemon on the work folder: it says what it waits for, is listed until it is taken, and means what `eval` means."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.daemons import SUITE, announce, daemon, notices, small, taken
from typer.testing import CliRunner

from coordinator.base.throttle import Throttle
from coordinator.cli import app
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.intake.from_settings import inputs_for, record_of
from coordinator.intake.inbox import Notice, leave
from coordinator.report.load_series import find_series
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.usefixtures("own_settings")
EVAL = "evalspan eval"


@pytest.fixture
def lock(tmp_path: Path) -> WorkLock:
    return WorkLock(WorkPaths(tmp_path / "work").lock)


def told(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def status() -> dict[str, Any]:
    return dict(json.loads(told("status", "--json")))


@pytest.mark.parametrize("holder", ["", EVAL])
def test_a_submission_without_a_daemon_says_so_and_is_listed_until_one_takes_it(
    tmp_path: Path, lock: WorkLock, holder: str
) -> None:
    """An `eval` in the work folder is no daemon, and is named; so is a notice of the hook listed."""
    place = small(tmp_path / "step-300")
    if holder:
        lock.acquire(holder)
    said = told("submit", str(place), "--suite", SUITE)
    wait = "to start one then: `evalspan daemon --wait`" if holder else "to start one: `evalspan daemon`"
    for text in (" ".join(said.split()), " ".join(told("status").split())):
        assert "no daemon runs for this work folder" in text
        assert wait in text
        assert (f"{EVAL}, pid {os.getpid()} on " in text) == bool(holder)
    assert "daemon: not running" in told("status")
    leave(WorkPaths(tmp_path / "work"), Notice(checkpoint="/c", noticed_at=4e9))
    shown = status()
    assert [(w["checkpoint"], w["suite"]) for w in shown["waiting"]] == [
        (str(place), SUITE),
        ("/c", "default"),
    ]
    assert shown["daemon"] is False
    assert str(shown["holder"]).startswith(EVAL) == bool(holder)
    lock.release()
    ears = daemon(tmp_path / "work", Config())
    ears.tick()
    assert taken(ears) == ["step-300"]
    assert not status()["waiting"]


def test_status_names_the_command_that_has_the_work_folder(tmp_path: Path, lock: WorkLock) -> None:
    """A daemon runs only where a daemon has it, and only it is to be submitted to; what it has not looked at yet is not said
    to wait for one. Tasks are listed by their suite's name.
    """
    told("submit", str(small(tmp_path / "step-1")), "--tasks", "quickstart_mmlu", "--limit", "8")
    assert "suite quickstart_mmlu-limit8 for" in " ".join(told("status").split())
    for holder, advice in ((DAEMON, "submit to it"), ("evalspan retry", "wait until it ends, or give")):
        lock.acquire(holder)
        with pytest.raises(OperatorError, match=f"is in use by {holder}, pid .*: {advice}"):
            WorkLock(lock.path).acquire(EVAL)
        if holder == DAEMON:
            assert re.search(rf"daemon: running since \d\d:\d\d, pid {os.getpid()} on ", told("status"))
            assert (status()["daemon"], status()["waiting"]) == (True, [])
        else:
            assert "daemon: not running; evalspan retry, pid " in told("status")
        lock.release()


@pytest.mark.parametrize(
    ("name", "said", "step"), [("step-300", None, 300), ("step-300", 7, 7), ("final", None, None)]
)
def test_the_step_is_the_same_however_a_checkpoint_comes(
    tmp_path: Path, name: str, said: int | None, step: int | None
) -> None:
    """By `eval`, `submit` or a notice: what was said, else the number in the folder's own name, also behind a link."""
    place = small(tmp_path / name)
    (tmp_path / "latest").symlink_to(place)
    option = [] if said is None else ["--step", str(said)]
    performer = daemon(tmp_path / "work").coordinator.performer
    for path in (str(place), "latest"):
        settings = Config(work_dir=tmp_path / "work")
        inputs = inputs_for(performer.site, performer.lm_eval_version)
        record = record_of(settings, path, SUITE, inputs, step=said)
        assert record.checkpoint.step == step
    told("submit", "latest", "--suite", SUITE, *option)
    ears = daemon(tmp_path / "work")
    ears.tick()
    (running,) = ears.coordinator.running.values()
    assert running.state.record.checkpoint.step == step
    other = daemon(tmp_path / "other")
    leave(other.paths, Notice(checkpoint=str(tmp_path / "latest"), suite=SUITE, step=said))
    other.tick()
    (running,) = other.coordinator.running.values()
    assert running.state.record.checkpoint.step == step


def test_a_copy_of_a_checkpoint_is_one_evaluation_in_the_series_of_both_trainings(tmp_path: Path) -> None:
    """Name, content and times are the same: a notice and a submission of it tell where it lies, too."""
    ears = daemon(tmp_path / "work")
    place = small(tmp_path / "a" / "step-10")
    announce(ears, place)
    ears.tick()
    announce(ears, shutil.copytree(place, tmp_path / "b" / "step-10"))
    ears.tick()
    told("submit", str(shutil.copytree(place, tmp_path / "c" / "step-10")), "--suite", SUITE)
    assert len(ears.coordinator.running) == 1
    for training in "abc":
        (point,) = find_series(tmp_path / "work", str(tmp_path / training))
        assert point.checkpoint == str(tmp_path / training / "step-10")


@pytest.mark.parametrize("held", [False, True])
def test_a_waiting_submission_is_listed_by_its_id_and_withdrawn_by_cancel(
    tmp_path: Path, lock: WorkLock, held: bool
) -> None:
    """Before a daemon has looked at it, or while a daemon waits for the rest of its files; another one stays."""
    place, other = small(tmp_path / "step-300"), small(tmp_path / "step-400")
    said = [told("submit", str(p), "--suite", SUITE) for p in (place, other)]
    name, kept = (re.findall(rf"step-[34]00-{SUITE}-\w{{8}}", text)[0] for text in said)
    ears = daemon(tmp_path / "work", Config())
    if held:
        lock.acquire(DAEMON)
        (place / "config.json").rename(tmp_path / "config.json")
        ears.tick()
    assert name in {w["evaluation_id"] for w in status()["waiting"]}
    assert name in told("status")
    said = told("cancel", name[:10] if not held else name)
    assert said.split() == f"{name} is withdrawn: no daemon had begun it".split()
    if held:
        (tmp_path / "config.json").rename(place / "config.json")
    ears._throttle = Throttle()
    ears.tick()
    assert taken(ears) == ["step-400"]
    assert name not in told("status")
    assert kept in told("status")
    assert notices(ears) == 0
    lock.release()
    done = CliRunner().invoke(app, ["cancel", name])
    assert "no evaluation in" in str(done.exception)
