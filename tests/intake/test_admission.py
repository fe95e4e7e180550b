"""What a notice may name: its own user's all, a member's shipped or listed suites, and checkpoints below the roots."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.daemons import SUITE, announce, daemon, notices, put, small, taken
from support.with_root import USER
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.loading import load
from coordinator.config.schema import CheckpointConfig, Config, WatchConfig
from coordinator.intake.admission import (
    NotAdmittedError,
    admitted_suite,
    check_place,
    loaded_suites,
    missing_places,
    suite_files,
)
from coordinator.intake.suites import names
from coordinator.intake.work_folder import DROP
from coordinator.runtime.service import Service

pytestmark = pytest.mark.usefixtures("every_tick")
MINE = 'name = "mine"\n[[task]]\nname = "toy"\n'


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "suites").mkdir()
    file = tmp_path / "suites" / "mine.toml"
    file.write_text(MINE)
    return file


def refusal(ears: Service) -> dict[str, Any]:
    """The one refusal that `evalspan status` shows; nothing was taken, and nothing waits."""
    ears.tick()
    assert not taken(ears)
    assert not notices(ears)
    told = CliRunner().invoke(app, ["status", "--json", "--work-dir", str(ears.paths.root)])
    status = json.loads(told.stdout)
    assert not status["evaluations"]
    assert not status["waiting"]
    (refused,) = status["refused"]
    return dict(refused)


def by_member(ears: Service, notice: dict[str, object]) -> None:
    """As a member of the group leaves it that shares the work folder."""
    ears.paths.inbox.mkdir(parents=True)
    ears.paths.inbox.chmod(DROP)
    os.chown(put(ears, json.dumps(notice)), USER, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give a file to another user")
@pytest.mark.parametrize(
    "what", ["a suite file", "a place", "an unknown field", "a converter", "a suite mistyped"]
)
def test_a_member_runs_nothing(tmp_path: Path, suite: Path, what: str) -> None:
    """The notice is refused at once, by name and with the reason, and is not there any more."""
    run = tmp_path / "run"
    good, other = small(run / "step-1"), small(tmp_path / "other" / "step-2")
    (run / "link").symlink_to(other)
    config = Config(
        watch=WatchConfig(roots=(run,), suite=SUITE, suites=(suite,)),
        checkpoint=CheckpointConfig(convert=f"touch {tmp_path}/ran {{src}} {{dst}}"),
    )
    theirs = suite.with_name("theirs.toml")
    theirs.write_text(MINE)
    notice, why = {
        "a suite file": ({"checkpoint": str(good), "suite": str(theirs)}, "announce 'theirs'"),
        "a place": ({"checkpoint": str(run / "link")}, f"{other} is not below any of [watch] roots"),
        "an unknown field": ({"checkpoint": str(good), "allow_bin": True}, "allow_bin"),
        "a converter": ({"checkpoint": str(other / ".."), "suite": SUITE}, "is not below"),
        "a suite mistyped": ({"checkpoint": str(good), "suite": "mien"}, "[watch] suites has: mine"),
    }[what]
    ears = daemon(tmp_path / "work", config)
    by_member(ears, notice)
    refused = refusal(ears)
    assert refused["checkpoint"] == notice["checkpoint"]
    assert why in refused["why"]
    assert not (tmp_path / "ran").exists()


def test_its_own_user_names_any_place_and_any_suite(tmp_path: Path, suite: Path) -> None:
    """A shipped one, one of the settings by its file's name, or a file; none: the settings'."""
    other = suite.with_name("other.toml")
    other.write_text(MINE.replace("mine", "other"))
    ears = daemon(tmp_path / "work", Config(watch=WatchConfig(suites=(suite,), suite=SUITE)))
    for number, named in enumerate(("mine", SUITE, "default", str(suite), str(other))):
        announce(ears, small(tmp_path / str(number), seed=number), named)
    ears.tick()
    assert {Path(r.state.record.checkpoint.source).name: r.state.record.suite.name
            for r in ears.coordinator.running.values()} == {
        "0": "mine", "1": SUITE, "2": SUITE, "3": "mine", "4": "other"}  # fmt: skip


@given(st.text())
def test_a_notice_reaches_no_suite_file_that_is_not_listed(name: str) -> None:
    """Whatever it writes: a listed file, the operator's own default, or a name, which only a shipped suite has."""
    watch = WatchConfig(suite="/etc/own.toml", suites=(Path("/suites/mine.toml"),))
    files = suite_files(watch)
    try:
        found = admitted_suite(name, watch, files)
    except NotAdmittedError:
        assert name not in (*names(), "default", "own", "mine")
    else:
        assert found in ("/etc/own.toml", "/suites/mine.toml") or (
            found == name and "/" not in found and not found.endswith(".toml")
        )


PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", "inside", "link"]), max_size=5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`root` with a folder and a link out of it; `other` beside it, whose name begins like it."""
    top = tmp_path_factory.mktemp("tree").resolve()
    for folder in ("root/inside/a", "root-other/a", "outside/a"):
        (top / folder).mkdir(parents=True)
    (top / "root" / "link").symlink_to(top / "outside")
    (top / "to-root").symlink_to(top / "root")
    (top / "circle").symlink_to(top / "circle")
    return top


@given(start=st.sampled_from(["root", "root-other", "to-root", "."]), parts=PARTS)
def test_a_place_counts_by_where_its_links_and_dots_lead(tree: Path, start: str, parts: list[str]) -> None:
    """The root may be named by a link, too. Without roots none is taken, nor what is no place."""
    place = tree.joinpath(start, *parts)
    real = os.path.realpath(place)
    below = real == str(tree / "root") or real.startswith(f"{tree}/root/")
    for root in ("root", "to-root", "r[o]ot"):
        watch = WatchConfig(roots=(tree / root,))
        if below:
            check_place(str(place), watch)
        else:
            with pytest.raises(NotAdmittedError, match="is not below any of"):
                check_place(str(place), watch)
    for odd, roots in ((tree, ()), ("no\0name", (tree,)), (tree / "circle", (tree,))):
        with pytest.raises(NotAdmittedError):
            check_place(str(odd), WatchConfig(roots=roots))


def test_a_default_suite_is_one_of_the_listed_files_by_the_name_of_a_notice(
    tmp_path: Path, suite: Path
) -> None:
    """`suite = "mine"` means the file that a notice names "mine"; relative ones are beside the settings."""
    own = tmp_path / "evalspan.toml"
    own.write_text('[watch]\nroots = ["."]\nsuites = ["suites/mine.toml"]\nsuite = "mine"\n')
    watch = load(own, {}).watch
    assert watch.suite == str(suite)
    assert [s.name for s in loaded_suites(watch)] == ["mine", "mine"]


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A misspelt folder would refuse every checkpoint; a glob may match later."""
    watch = WatchConfig(roots=(tmp_path / "no", tmp_path), folders=(tmp_path / "run*", tmp_path / "nor"))
    assert missing_places(watch) == [
        f"[watch] roots: {tmp_path}/no does not exist",
        f"[watch] folders: {tmp_path}/nor does not exist",
    ]
