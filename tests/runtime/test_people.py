"""Several users of one work folder: the owner of a file says who asked, and each commands what is that user's."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemons import SUITE, daemon, only, small
from support.with_root import GROUP, MEMBERS, USER, as_user, needs_open_code
from typer.testing import CliRunner, Result

from coordinator.allocation import cordons
from coordinator.allocation.fair_share import in_turn
from coordinator.cli import app
from coordinator.errors import OperatorError
from coordinator.intake import from_settings, pending, sources
from coordinator.intake.people import NotAMemberError, People
from coordinator.intake.sources import Notice
from coordinator.runtime import service
from coordinator.runtime.operator_commands import Command, leave_command
from coordinator.runtime.service import Service
from coordinator.runtime.shares import Shares
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or len(MEMBERS) < 2, reason="not root, or no two users in one group here"
)
(ANN, ann), (BOB, bob) = (MEMBERS * 2)[:2] if MEMBERS else ((0, ""), (0, ""))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A work folder of root that the members of GROUP share, in `work`; a checkpoint beside it."""
    made = Path(tempfile.mkdtemp(prefix="people-"))
    made.chmod(0o755)
    monkeypatch.chdir(made)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("EVALSPAN_SHARED_GROUP", GROUP)
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(made / "work"))
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    from_settings.load(None, made / "work")
    small(made / "step-1")
    yield made
    shutil.rmtree(made)


def ears_on(folder: Path, admins: tuple[str, ...] = ()) -> Service:
    """The daemon, on a simulated cluster."""
    ears = daemon(folder / "work")
    ears.coordinator.people = ears.people = People.of(folder / "work", admins)
    ears.coordinator.shares = Shares(ears.paths, 3600.0)
    return ears


def ask(folder: Path, uid: int, place: str = "step-1", priority: int = 0) -> None:
    """A member submits: the file is that member's."""
    file = sources.submit(
        WorkPaths(folder / "work"), Notice(checkpoint=str(folder / place), suite=SUITE, priority=priority)
    )
    os.chown(file, uid, -1)


def command(folder: Path, uid: int, evaluation: str, what: str = "cancel", **more: object) -> None:
    order = Command.model_validate({"command": what, "evaluation_id": evaluation, **more})
    os.chown(leave_command(WorkPaths(folder / "work"), order), uid, -1)


def askers(ears: Service) -> list[str]:
    return only(ears).state.users.asked_by


def refusals(ears: Service) -> list[tuple[str, str]]:
    return [(c.command, c.user) for c in pending.read(ears.paths.pending).refused_commands]


def test_who_asks_is_the_owner_of_the_file_and_nothing_in_it(folder: Path) -> None:
    """The first asker pays and names the priority; both stand in the record, the journal, the job's comment."""
    ask(folder, ANN, priority=3)
    ears = ears_on(folder)
    ears.tick()
    ask(folder, BOB, priority=100)
    ears.tick()
    state = only(ears).state
    assert (state.record.submitted_by, state.users.asked_by) == (ann, [ann, bob])
    assert state.record.priority == 3, "another user's priority moves it not"
    ask(folder, ANN, priority=5)
    ears.tick()
    assert state.record.priority == 5
    after = ears_on(folder)
    after.coordinator.resume_all()
    assert askers(after) == [ann, bob]
    alone = only(after).state.record.model_copy(update={"submitted_by": ""})
    assert alone.evaluation_id == state.evaluation_id, "no part of the id"


@pytest.mark.parametrize(
    "forged", ["stranger", "open to others", "a link to another's file", "a symbolic link"]
)
def test_a_file_that_is_no_members_for_certain_asks_for_nothing(folder: Path, forged: str) -> None:
    """It becomes a `*.bad` file, and the status says why."""
    ask(folder, USER if forged == "stranger" else ANN)
    (file,) = (folder / "work" / "submissions").glob("*.json")
    if forged == "open to others":
        file.chmod(0o660)
    elif forged == "a link to another's file":
        os.link(file, folder / "elsewhere")
    elif forged == "a symbolic link":
        file.rename(folder / "elsewhere.json")
        file.symlink_to(folder / "elsewhere.json")
    ears = ears_on(folder)
    ears.tick()
    assert not ears.coordinator.running
    assert [r.why for r in pending.read(ears.paths.pending).refused]
    assert not list((folder / "work" / "submissions").glob("*.json"))


def test_a_notice_of_the_hook_is_its_trainings_users(folder: Path) -> None:
    """An older hook leaves files that the group may write: these are taken, too, as the daemon's user's."""
    small(folder / "step-2", seed=2)
    for place, uid, mode in (("step-1", BOB, 0o640), ("step-2", BOB, 0o664)):
        sources.spool(WorkPaths(folder / "work"), Notice(checkpoint=str(folder / place), suite=SUITE))
        (file,) = (f for f in (folder / "work" / "spool").glob("*.json") if f.stat().st_uid == 0)
        os.chown(file, uid, -1)
        file.chmod(mode)
    ears = ears_on(folder)
    ears.tick()
    asked = {
        Path(r.state.record.checkpoint.source).name: r.state.users.asked_by
        for r in ears.coordinator.running.values()
    }
    assert asked == {"step-1": [bob], "step-2": ["root"]}


@needs_open_code
def test_what_the_daemons_user_may_not_read_is_refused_by_name(folder: Path) -> None:
    """In one line with the user and the file, at once: the submitter can mend it."""
    ears_on(folder).tick()  # imports
    place = folder / "ann"
    place.mkdir()
    os.chown(place, ANN, -1)
    closed = small(folder / "step-3", seed=3)
    closed.chmod(0o700)

    def share() -> None:
        os.environ["EVALSPAN_WORK_DIR"] = str(place / "work")
        from_settings.load(None, place / "work")

    def serve() -> None:
        ears = ears_on(place)
        sources.submit(ears.paths, Notice(checkpoint=str(closed), suite=SUITE))
        ears.tick()
        own, refused = pending.read(ears.paths.pending).refused
        assert (own.checkpoint, "Permission denied" in own.why) == (str(unread), True)
        assert f"{ann}, as whom the daemon runs, may not read {closed}" in refused.why
        assert (refused.user, "\n" in refused.why) == (ann, False)

    as_user(share, member=True, uid=ANN)
    unread = sources.submit(WorkPaths(place / "work"), Notice(checkpoint="/c"))
    unread.chmod(0o600)
    os.chown(unread, BOB, -1)
    as_user(serve, member=True, uid=ANN)


def test_a_member_cancels_and_retries_that_members_evaluations_alone(folder: Path) -> None:
    """Where two asked, the one who cancels leaves; the last one's cancellation ends it."""
    ask(folder, ANN)
    ears = ears_on(folder)
    ears.tick()
    name = only(ears).state.evaluation_id
    for what in ("cancel", "retry"):
        command(folder, BOB, name, what)
    command(folder, BOB, "", "release", nodes=["n1"], seconds=60.0)
    ears.tick()
    assert not only(ears).state.ending.cancelled
    assert refusals(ears) == [("cancel", bob), ("retry", bob), ("release", bob)]
    assert not (folder / "work" / "nodes.json").exists()
    ask(folder, BOB)
    ears.tick()
    command(folder, ANN, name)
    ears.tick()
    assert (askers(ears), only(ears).state.ending.cancelled) == ([bob], "")
    command(folder, ANN, name)
    ears.tick()
    assert refusals(ears)[-1] == ("cancel", ann), "she had left"
    command(folder, BOB, name, reason="no use")
    ears.tick()
    assert only(ears).state.ending.cancelled == "no use"


def test_an_admin_and_the_daemons_user_command_all(folder: Path) -> None:
    ask(folder, ANN)
    ears = ears_on(folder, admins=(bob,))
    ears.tick()
    name = only(ears).state.evaluation_id
    command(folder, BOB, "", "release", nodes=["n1"], seconds=60.0)
    command(folder, BOB, name, reason="by an admin")
    ears.tick()
    assert only(ears).state.ending.cancelled == "by an admin"
    assert "n1" in cordons.read(ears.paths.nodes, time.time())
    assert not refusals(ears)


def test_who_asks_for_a_cancelled_evaluation_pays_from_then_on(folder: Path) -> None:
    """By `submit`, not by a retry."""
    ask(folder, ANN)
    ears = ears_on(folder)
    ears.tick()
    name = only(ears).state.evaluation_id
    command(folder, ANN, name, reason="no use")
    ears.tick()
    command(folder, BOB, name, "retry")
    ears.tick()
    assert askers(ears) == [ann]
    command(folder, BOB, name, "retry", submits=True)
    ears.tick()
    assert askers(ears) == [bob]
    assert refusals(ears) == [("retry", bob)]


def test_use_outlives_the_daemon_and_counts_once(folder: Path) -> None:
    """A restarted daemon goes on with the sums, and knows what of an open evaluation is in them."""
    ask(folder, ANN)
    ears = ears_on(folder)
    ears.tick()
    state, now = only(ears).state, only(ears).state.users.counted_at
    state.users.gpu_seconds = 500.0
    shares = ears.coordinator.shares
    assert shares is not None
    shares.count([state], now)
    shares.write()
    after = Shares(ears.paths, 3600.0)
    after.count([state], now)
    assert after.usage.gpu_seconds == {ann: pytest.approx(500.0, abs=1.0)}
    (folder / "work" / "users.json").write_text("{")
    assert not Shares(ears.paths, 3600.0).usage.gpu_seconds, (
        "lost: earlier use is forgotten, and nothing fails"
    )


@needs_open_code
def test_two_users_of_a_group_share_a_daemon(folder: Path) -> None:
    """Each in that user's own process, which may write to the drop folders alone."""
    paths = WorkPaths(folder / "work")
    small(folder / "step-2", seed=2)

    def leaves(place: str, priority: int) -> Callable[[], object]:
        notice = Notice(checkpoint=str(folder / place), suite=SUITE, priority=priority)
        return lambda: sources.submit(paths, notice)

    as_user(leaves("step-1", 0), member=True, uid=ANN)
    as_user(leaves("step-2", 100), member=True, uid=BOB)
    ears = ears_on(folder)
    os.close(make_file(paths.lock))
    ears.tick()
    owners = {r.state.record.submitted_by: name for name, r in ears.coordinator.running.items()}
    assert set(owners) == {ann, bob}
    assert [s.users.payer for s in in_turn(ears.coordinator._states(), ears.coordinator._users())] == [
        ann,
        bob,
    ], "the older wish first, whatever the priority"
    index = CliRunner().invoke(app, ["submit", str(folder / "step-1"), "--suite", SUITE])  # imports, too
    assert index.exit_code == 0, index.exception

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, list(words))

    def bob_acts() -> None:
        refused = run("cancel", owners[ann])
        assert isinstance(refused.exception, OperatorError)
        assert f"{bob} may not cancel {owners[ann]}: {ann}" in str(refused.exception)
        assert isinstance(run("release", "n1").exception, OperatorError)
        assert not list((paths.spool / "commands").iterdir())
        asked = run("submit", str(folder / "step-1"), "--suite", SUITE, "--priority", "9")
        assert asked.exit_code == 0, asked.exception
        assert f"{ann} asked first" in asked.output
        withdrawn = run("cancel", owners[bob])
        assert "is asked for" in withdrawn.output, withdrawn.exception

    as_user(bob_acts, member=True, uid=BOB)
    ears.tick()
    states = {name: r.state for name, r in ears.coordinator.running.items()}
    assert bob in states[owners[ann]].users.asked_by
    assert states[owners[bob]].ending.cancelled
    assert not states[owners[ann]].ending.cancelled


def test_the_author_of_a_file_is_of_the_group(folder: Path) -> None:
    people = People.of(folder / "work")
    assert people is not None
    place = folder / "note"
    place.write_text("")
    os.chown(place, ANN, -1)
    assert people.author(place.stat()) == ann
    os.chown(place, USER, -1)
    with pytest.raises(NotAMemberError, match="not a member"):
        people.author(place.stat())
    (folder / "work").chmod(0o700)
    assert People.of(folder / "work") is None, "one user has it"
