"""Pending checkpoints: what one checkpoint, one watched folder or one command raises is its own, and no other one's; what storage or
the site raises is waited for. `evalspan status` says why."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.daemons import SUITE, announce, daemon, notices, small, taken, until
from support.loops import another
from support.simulated.parts import record
from support.with_root import USER, as_user
from typer.testing import CliRunner

from coordinator.base.isolate import LoopGuard
from coordinator.cli import app
from coordinator.config.schema import Config, WatchConfig
from coordinator.errors import OperatorError, RetryError
from coordinator.intake import from_settings, pending
from coordinator.intake.from_settings import LmEvalVersion
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime.service import Service

pytestmark = pytest.mark.usefixtures("every_tick")


def read(ears: Service) -> pending.Checkpoints:
    return pending.read(ears.paths, time.time())


def test_what_one_notice_raises_costs_no_other_and_is_told(tmp_path: Path) -> None:
    """Names of no file, folders of no checkpoint, suites that there are not: the one that is whole is taken."""
    good, odd = small(tmp_path / "good"), small(tmp_path / "odd")
    (odd / "config.json").write_text('{"architectures": 5}')
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    ears = daemon(tmp_path / "work")
    announce(ears, tmp_path / ("x" * 300))
    announce(ears, odd)
    announce(ears, tmp_path / "circle")
    announce(ears, good, suite="quickstrat")
    announce(ears, good, suite="s" * 300)
    announce(ears, tmp_path / "nowhere")
    announce(ears, good)
    ears.tick()
    assert taken(ears) == ["good"]
    shown = read(ears)
    refused = [Path(r.checkpoint).name[:7] for r in shown.refused]
    assert refused == ["xxxxxxx", "circle", "good", "good", "nowhere"]
    assert "no such folder" in shown.refused[-1].why
    waits = {(Path(w.checkpoint).name, w.suite[:9]): w.why for w in shown.waiting}
    assert "no list of names" in waits["odd", SUITE[:9]]
    assert "no suite named 'quickstrat'" in shown.refused[2].why
    assert len(waits) == notices(ears) == 1
    told = CliRunner().invoke(app, ["status", "--json", "--work-dir", str(ears.paths.root)])
    status = json.loads(told.stdout)
    assert status["waiting"] == [w.model_dump() for w in shown.waiting]
    assert status["refused"] == [r.model_dump(exclude={"command"}) for r in shown.refused]


def test_a_bug_in_our_code_refuses_the_checkpoint_that_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With its traceback in the log; the next daemon does not meet it again."""
    ears = daemon(tmp_path / "work")
    make = from_settings.record_of

    def faulty(config: Config, checkpoint: str, *args: object, **more: object) -> object:
        if checkpoint.endswith("bad"):
            raise ZeroDivisionError("a faulty rule")
        return make(config, checkpoint, *args, **more)

    monkeypatch.setattr(from_settings, "record_of", faulty)
    for name in ("bad", "good"):
        announce(ears, small(tmp_path / name))
    ears.tick()
    assert taken(ears) == ["good"]
    assert notices(ears) == 0
    assert "Traceback" in caplog.text
    (refused,) = read(ears).refused
    assert "a faulty rule" in refused.why


def test_a_refused_checkpoint_that_is_announced_again_and_taken_is_shown_no_more(tmp_path: Path) -> None:
    ears = daemon(tmp_path / "work")
    announce(ears, tmp_path / "late")
    ears.tick()
    assert read(ears).refused
    announce(ears, small(tmp_path / "late"))
    ears.tick()
    assert taken(ears) == ["late"]
    assert read(ears) == pending.Checkpoints()


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """One that counts how often it is asked, and has no lm_eval until a file `has` appears."""
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\n[ -e {tmp_path}/hangs ] && exec sleep 60\n"
        f"[ -e {tmp_path}/has ] && echo 1.0 || {{ echo No package metadata >&2; exit 1; }}\n"
    )
    script.chmod(0o755)
    return script


def test_without_lm_eval_notices_wait_and_are_taken_once_it_is_there(
    tmp_path: Path, interpreter: Path
) -> None:
    """They stay in the inbox for the next daemon, too; an evaluation of an earlier one that has not begun waits, as well,
    and costs none that has."""
    work = tmp_path / "work"
    before = daemon(work)
    before.coordinator.accept(another(record(), 1))
    before.coordinator.performer.lm_eval_version = LmEvalVersion((str(interpreter),), {})
    with pytest.raises(OperatorError, match="no lm_eval"):
        before.coordinator.accept(another(record(), 2))
    ears = daemon(work)
    ears.coordinator.performer.lm_eval_version = LmEvalVersion((str(interpreter),), {}, rest=0.0)
    ears.coordinator.resume_all()
    assert list(ears.coordinator.running) == ["e1-suite-00000001"]
    assert ears.coordinator.busy
    announce(ears, small(tmp_path / "new"))
    ears.tick()
    assert notices(ears) == 1
    (waits,) = read(ears).waiting
    assert "install `evalspan[hf]` there" in waits.why
    (tmp_path / "has").touch()
    wait_until(lambda: ears.tick() or "new" in taken(ears))
    assert notices(ears) == 0
    assert not read(ears).waiting


def test_an_interpreter_that_does_not_answer_is_asked_again_after_a_rest(
    tmp_path: Path, interpreter: Path
) -> None:
    for name in ("hangs", "asked"):
        (tmp_path / name).touch()
    version = LmEvalVersion((str(interpreter),), {}, patience=0.2, rest=1000.0)
    for _ in range(3):
        with pytest.raises(RetryError, match="did not say"):
            version()
    assert (tmp_path / "asked").read_text().count("x") <= 1, "asked once, if it came so far"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which anybody may look."""
    folder = Path(tempfile.mkdtemp(prefix="pending-user-", dir="/dev/shm"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
def test_what_is_not_for_us_is_waited_for_and_hides_nothing(
    open_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed folder among the watched ones and a link into it; a notice of what lies in it stays until it is opened."""
    if not all(folder.stat().st_mode & 0o001 for folder in Path(pending.__file__).parents):
        pytest.skip("evalspan lies in a folder that no other user may enter")
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

    def looks() -> None:
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


def test_a_command_that_raises_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of an evaluation that there is not, or whose journal is damaged."""
    ears = daemon(tmp_path)
    broken = tmp_path / "e9-suite-00000009"
    broken.mkdir(parents=True)
    (broken / "journal.jsonl").write_text("{}\n{}\n")
    for name in ("nothing", broken.name):
        leave(ears.paths, Notice(command="retry", evaluation_id=name))
    running = ears.coordinator.accept(record())
    leave(ears.paths, Notice(command="cancel", evaluation_id=running.state.evaluation_id))
    with caplog.at_level(logging.WARNING):
        ears.tick()
    assert running.state.ending.cancelled
    assert notices(ears) == 0
    assert caplog.text.count("is passed over") == len(list(ears.paths.inbox.glob("refused/*.json"))) == 2


def test_a_part_that_raises_is_said_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    """And again when it raises anew after a turn that went well; the others are called all the same."""
    contained = LoopGuard(logging.getLogger("parts"))
    turns = iter([OSError("full"), OSError("full"), None, OSError("full"), ValueError("other")])

    def part() -> str:
        if (error := next(turns)) is not None:
            raise error
        return "done"

    assert [contained("the part", part) for _ in range(5)] == [None, None, "done", None, None]
    assert [(r.message, bool(r.exc_info)) for r in caplog.records] == [
        ("the part: full", False),
        ("the part: full", False),
        ("the part: other", True),
    ]


def test_a_damaged_journal_costs_no_other_evaluation(tmp_path: Path) -> None:
    """The next daemon takes the others up, is not kept up by it, and `status` shows them and names it."""
    before = daemon(tmp_path)
    for number in (1, 2):
        before.coordinator.accept(another(record(), number))
    journal = before.paths.evaluation("e2-suite-00000002").journal
    journal.write_bytes(b"{}\n" + journal.read_bytes())
    ears = daemon(tmp_path)
    after = ears.coordinator
    after.grace.uncertain = 0.0
    after.resume_all()
    assert list(after.running) == ["e1-suite-00000001"]
    after.cancel("e1-suite-00000001", "enough")
    until(ears, lambda: after.running["e1-suite-00000001"].state.ended_at is not None)
    assert not after.busy
    told = CliRunner().invoke(app, ["status", "--json", "--work-dir", str(tmp_path)])
    rows = {row["evaluation_id"]: row for row in json.loads(told.stdout)["evaluations"]}
    assert rows["e1-suite-00000001"]["stage"] == "cancelled"
    assert rows["e2-suite-00000002"]["stage"] == "parked"
    assert f"{journal}:1" in rows["e2-suite-00000002"]["fault"]
