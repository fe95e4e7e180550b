"""Members of the group that shares a work folder leave checkpoints; the evaluations are its user's."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support.commands import typed
from support.daemons import SUITE, announce, daemon, only, refused, small
from support.with_root import GROUP, MEMBERS, as_user

from coordinator.errors import OperatorError
from coordinator.intake import work_folder
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.runtime import service
from coordinator.site.config.schema import Config, WatchConfig
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or len(MEMBERS) < 2, reason="not root, or no two users in one group here"
)
(ANN, ann), (BOB, bob) = (MEMBERS * 2)[:2] if MEMBERS else ((0, ""), (0, ""))


@pytest.fixture
def folder(monkeypatch):
    """A work folder of root that the members of GROUP share, in `work`; a checkpoint and suites beside it."""
    made = Path(tempfile.mkdtemp(prefix="members-"))
    made.chmod(0o755)
    monkeypatch.chdir(made)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("EVALSPAN_SHARED_GROUP", GROUP)
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(made / "work"))
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    work_folder.load_settings(None, made / "work")
    for place in ("runs", "elsewhere"):
        small(made / place / "step-1", seed=len(place))
    for name in ("mine", "other"):
        (made / f"{name}.toml").write_text(f'name = "{name}"\n[[task]]\nname = "toy"\n')
    yield made
    shutil.rmtree(made)


@pytest.fixture
def ears(folder):
    """The daemon, on a simulated cluster."""
    watch = WatchConfig(roots=(folder / "runs",), suites=(folder / "mine.toml",))
    return daemon(folder / "work", Config(watch=watch))


@pytest.fixture
def submits(folder):
    """`submits(place, suite)`: a member's submission, and its file."""

    def submits(place="runs/step-1", suite=SUITE, *, uid=ANN, **more):
        notice = Notice(checkpoint=str(folder / place), suite=str(suite), **more)
        file = leave_notice(WorkPaths(folder / "work"), notice)
        os.chown(file, uid, -1)
        return file

    return submits


@pytest.mark.parametrize("forged", ["open to others", "a link to another's file", "a symbolic link"])
def test_a_file_that_may_be_another_users_asks_for_nothing(folder, ears, submits, forged):
    """It is refused, and the status says why of a submission."""
    announce(ears, folder / "runs" / "step-1")
    ears.tick()
    order = Notice(command="cancel", evaluation_id=only(ears).state.evaluation_id)
    files = [submits(suite="mine", uid=0), leave_notice(ears.paths, order)]
    for number, file in enumerate(files):
        aside = folder / f"elsewhere{number}.json"
        if forged == "open to others":
            file.chmod(0o660)
        elif forged == "a link to another's file":
            os.link(file, aside)
        else:
            file.rename(aside)
            file.symlink_to(aside)
    ears.tick()
    assert not only(ears).state.ending.cancelled
    refuses = forged != "a symbolic link"  # which is no file
    assert len(refused(ears)) == refuses
    assert any(map(os.path.lexists, files)) != refuses


def test_what_the_daemons_user_may_not_read_is_refused_by_name(folder, ears):
    """In one line with the user and the file, at once: the submitter can mend it."""
    ears.tick()  # imports
    place, closed = folder / "ann", folder / "runs" / "step-3"
    place.mkdir()
    os.chown(place, ANN, -1)
    small(closed, seed=3).chmod(0o700)
    work = place / "work"

    def share():
        os.environ["EVALSPAN_WORK_DIR"] = str(work)
        work_folder.load_settings(None, work)

    def serve():
        theirs = daemon(work, Config(watch=WatchConfig(roots=(folder / "runs",))))
        theirs.tick()
        own, other = (each.why for each in refused(theirs))
        assert "Permission denied" in own
        assert f"{ann}, as whom the daemon runs, may not read {closed}" in other
        assert (other.startswith(f"{left} of {bob}: "), "\n" in other) == (True, False)

    as_user(share, member=True, uid=ANN)
    unread, left = (
        leave_notice(WorkPaths(work), Notice(checkpoint=str(closed), suite=SUITE)) for _ in range(2)
    )
    unread.chmod(0o600)
    for file in (unread, left):
        os.chown(file, BOB, -1)
    as_user(serve, member=True, uid=ANN)


def test_a_member_leaves_checkpoints_and_commands_nothing(folder, ears):
    """In that user's own process: each command is refused with the user to ask, and writes nothing."""
    (folder / "evalspan.toml").write_text(f'[watch]\nroots = ["{folder}/runs"]\n')
    os.close(make_file(ears.paths.lock))
    step, other = str(folder / "runs" / "step-1"), str(small(folder / "runs" / "step-2", seed=2))
    announce(ears, other)
    ears.tick()
    ended = only(ears).state.evaluation_id
    ears.coordinator.evaluations.cancel(ended, "no use")
    announce(ears, step)
    ears.tick()
    submit = ["submit", "--suite", SUITE]
    typed(*submit, step)  # imports, too
    for file in ears.paths.inbox.glob("*.json"):
        file.unlink()

    def act():
        typed(*submit, step, "--priority", 9)
        for words in (
            ["cancel", ended], ["retry", ended], ["cancel", "nothing"], ["release", "n1"],
            ["release", "n1", "--minutes", "0"], [*submit, other], [*submit, step, "--limit", "3"],
        ):  # fmt: skip
            refused = typed(*words, code=1).exception
            assert isinstance(refused, OperatorError), words
            assert str(refused).startswith(f"evaluations of {ears.paths.root} are root's: ask root"), words

    as_user(act, member=True, uid=BOB)
    assert len(list(ears.paths.inbox.glob("*.json"))) == 1
    ears.tick()
    assert [r.state.record.priority for r in ears.coordinator.evaluations.running.values()][-1] == 9
