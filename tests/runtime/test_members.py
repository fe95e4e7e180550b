"""Members of the group that shares a work folder leave checkpoints; the evaluations are its user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import SUITE, announce, daemon, only, refused, small, taken
from support.with_root import GROUP, MEMBERS, as_user, needs_open_code
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.schema import Config, WatchConfig
from coordinator.errors import OperatorError
from coordinator.intake import work_folder
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime import service
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or len(MEMBERS) < 2, reason="not root, or no two users in one group here"
)
(ANN, ann), (BOB, bob) = (MEMBERS * 2)[:2] if MEMBERS else ((0, ""), (0, ""))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A work folder of root that the members of GROUP share, in `work`; a checkpoint and a suite beside it."""
    made = Path(tempfile.mkdtemp(prefix="members-"))
    made.chmod(0o755)
    monkeypatch.chdir(made)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("EVALSPAN_SHARED_GROUP", GROUP)
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(made / "work"))
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    work_folder.load(None, made / "work")
    small(made / "runs" / "step-1")
    (made / "mine.toml").write_text('name = "mine"\n[[task]]\nname = "toy"\n')
    yield made
    shutil.rmtree(made)


def ears_on(folder: Path) -> Service:
    """The daemon, on a simulated cluster."""
    watch = WatchConfig(roots=(folder / "runs",), suites=(folder / "mine.toml",))
    return daemon(folder / "work", Config(watch=watch))


def submits(
    folder: Path, place: Path | str, suite: object = SUITE, priority: int = 0, uid: int = ANN
) -> Path:
    """A member's submission."""
    notice = Notice(checkpoint=str(folder / place), suite=str(suite), priority=priority)
    file = leave(WorkPaths(folder / "work"), notice)
    os.chown(file, uid, -1)
    return file


def reasons(ears: Service) -> list[str]:
    return [each.why for each in refused(ears)]


def test_a_members_submission_counts_as_a_notice_does(folder: Path) -> None:
    """Below the roots, for a listed suite, by its name or its file; a later one raises the priority."""
    ears = ears_on(folder)
    submits(folder, "runs/step-1")
    ears.tick()
    assert taken(ears) == ["step-1"]
    submits(folder, "runs/step-1", priority=3, uid=BOB)
    ears.tick()
    assert only(ears).state.record.priority == 3
    submits(folder, "runs/step-1", "mine")
    submits(folder, "runs/step-1", folder / "mine.toml", uid=BOB)
    ears.tick()
    assert sorted(r.state.record.suite.name for r in ears.coordinator.running.values()) == ["mine", SUITE]
    assert not reasons(ears)


@pytest.mark.parametrize(("place", "suite", "setting"), [
    ("elsewhere/step-1", SUITE, "is not below any of [watch] roots"), ("runs/step-1", "other.toml", "list the file in [watch] suites"),
    ("runs/step-1", "other", "no suite named 'other': [watch] suites has: mine"),
])  # fmt: skip
def test_what_the_settings_do_not_list_is_refused_by_file_owner_and_setting(
    folder: Path, place: str, suite: str, setting: str
) -> None:
    """The daemon's user himself may submit it."""
    small(folder / "elsewhere" / "step-1")
    suite = str(folder / suite) if suite.endswith(".toml") else suite
    (folder / "other.toml").write_text('name = "other"\n[[task]]\nname = "toy"\n')
    ears = ears_on(folder)
    file = submits(folder, place, suite)
    ears.tick()
    (why,) = reasons(ears)
    assert why.startswith(f"{file} of {ann}: ")
    assert setting in why
    assert not any(part in why for part in ("\n", "evalspan submit"))
    assert not taken(ears)
    if suite != "other":
        submits(folder, place, suite, uid=0)
        ears.tick()
        assert taken(ears) == ["step-1"]


@pytest.mark.parametrize("forged", ["open to others", "a link to another's file", "a symbolic link"])
def test_a_file_that_may_be_another_users_asks_for_nothing(folder: Path, forged: str) -> None:
    """It is refused, and the status says why of a submission."""
    ears = ears_on(folder)
    announce(ears, folder / "runs" / "step-1")
    ears.tick()
    order = Notice(command="cancel", evaluation_id=only(ears).state.evaluation_id)
    files = [submits(folder, "runs/step-1", "mine", uid=0), leave(ears.paths, order)]
    for number, file in enumerate(files):
        if forged == "open to others":
            file.chmod(0o660)
        elif forged == "a link to another's file":
            os.link(file, folder / f"elsewhere{number}")
        else:
            file.rename(folder / f"elsewhere{number}.json")
            file.symlink_to(folder / f"elsewhere{number}.json")
    ears.tick()
    assert not only(ears).state.ending.cancelled
    refuses = forged != "a symbolic link"  # which is no file
    assert len(reasons(ears)) == refuses
    assert any(map(os.path.lexists, files)) != refuses


@needs_open_code
def test_what_the_daemons_user_may_not_read_is_refused_by_name(folder: Path) -> None:
    """In one line with the user and the file, at once: the submitter can mend it."""
    ears_on(folder).tick()  # imports
    place = folder / "ann"
    place.mkdir()
    os.chown(place, ANN, -1)
    closed = small(folder / "runs" / "step-3", seed=3)
    closed.chmod(0o700)
    work = place / "work"

    def share() -> None:
        os.environ["EVALSPAN_WORK_DIR"] = str(work)
        work_folder.load(None, work)

    def serve() -> None:
        ears = Service(daemon(work).coordinator, Config(watch=WatchConfig(roots=(folder / "runs",))))
        ears.tick()
        own, why = reasons(ears)
        assert "Permission denied" in own
        assert f"{ann}, as whom the daemon runs, may not read {closed}" in why
        assert (why.startswith(f"{left} of {bob}: "), "\n" in why) == (True, False)

    as_user(share, member=True, uid=ANN)
    unread, left = (leave(WorkPaths(work), Notice(checkpoint=str(closed), suite=SUITE)) for _ in range(2))
    unread.chmod(0o600)
    for file in (unread, left):
        os.chown(file, BOB, -1)
    as_user(serve, member=True, uid=ANN)


@needs_open_code
def test_a_member_leaves_checkpoints_and_commands_nothing(folder: Path) -> None:
    """In that user's own process: each command is refused with the user to ask, and writes nothing."""
    paths, config = WorkPaths(folder / "work"), folder / "evalspan.toml"
    config.write_text(f'[watch]\nroots = ["{folder}/runs"]\n')
    ears = ears_on(folder)
    os.close(make_file(paths.lock))
    step = str(folder / "runs" / "step-1")
    small(folder / "runs" / "step-2", seed=2)
    announce(ears, folder / "runs" / "step-2")
    ears.tick()
    ended = only(ears).state.evaluation_id
    ears.coordinator.cancel(ended, "no use")
    announce(ears, folder / "runs" / "step-1")
    ears.tick()
    assert CliRunner().invoke(app, ["submit", step, "--suite", SUITE]).exit_code == 0  # imports, too
    for file in paths.inbox.glob("*.json"):
        file.unlink()

    def act() -> None:
        asked = CliRunner().invoke(app, ["submit", step, "--suite", SUITE, "--priority", "9"])
        assert asked.exit_code == 0, asked.exception
        for words in (
            ["cancel", ended], ["retry", ended], ["cancel", "nothing"], ["release", "n1"], ["release", "n1", "--minutes", "0"],
            ["submit", str(folder / "runs" / "step-2"), "--suite", SUITE], ["submit", step, "--suite", SUITE, "--limit", "3"],
        ):  # fmt: skip
            done = CliRunner().invoke(app, words)
            assert isinstance(done.exception, OperatorError), (words, done.output, done.exception)
            assert str(done.exception).startswith(f"evaluations of {paths.root} are root's: ask root"), words

    as_user(act, member=True, uid=BOB)
    assert len(list(paths.inbox.glob("*.json"))) == 1
    ears.tick()
    assert [r.state.record.priority for r in ears.coordinator.running.values()][-1] == 9
