"""Who may write a notice may not run code: a notice names shipped or listed suites, and checkpoints below the roots."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.daemons import SUITE, daemon, notices, small, taken
from support.served import served_work
from typer.testing import CliRunner

from coordinator import hook
from coordinator.cli import app
from coordinator.config.loading import load
from coordinator.config.schema import CheckpointConfig, Config, RedisConfig, WatchConfig
from coordinator.errors import OperatorError
from coordinator.intake import pending
from coordinator.intake.admission import (
    NotAdmittedError,
    admitted_suite,
    check_place,
    loaded_suites,
    missing_places,
    suite_files,
)
from coordinator.intake.sources import Notice, spool, submit
from coordinator.intake.suites import names
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

pytestmark = pytest.mark.usefixtures("every_tick")
MINE = 'name = "mine"\n[[task]]\nname = "toy"\n'


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "suites").mkdir()
    file = tmp_path / "suites" / "mine.toml"
    file.write_text(MINE)
    return file


@pytest.fixture(scope="module")
def served() -> Iterator[WorkPaths]:
    with served_work("admission") as made:
        yield made


def by_spool(work: WorkPaths, notice: dict[str, object]) -> None:
    spool(work, Notice(checkpoint="/placeholder"))
    (file,) = work.spool.glob("*.json")
    file.rename(file.with_name("a-strangers.json"))
    (work.spool / "a-strangers.json").write_text(json.dumps(notice))


def by_stream(work: WorkPaths, notice: dict[str, object]) -> None:
    with redis_client.connect(work.redis_address) as client:
        client.xadd(hook.STREAM, {"notice": json.dumps(notice)})


def refusal(ears: Service) -> pending.Refused:
    """The one refusal that `evalspan status` shows; nothing was taken, and nothing waits."""
    ears.tick()
    assert not taken(ears)
    assert not notices(ears)
    told = CliRunner().invoke(app, ["status", "--json", "--work-dir", str(ears.paths.root)])
    status = json.loads(told.stdout)
    assert not status["evaluations"]
    assert not status["waiting"]
    (refused,) = status["refused"]
    return pending.Refused.model_validate(refused)


@pytest.mark.parametrize("way", [by_spool, by_stream])
@pytest.mark.parametrize("what", ["a suite file", "a place", "an unknown field", "a converter"])
def test_a_stranger_runs_nothing(
    tmp_path: Path, suite: Path, served: WorkPaths, way: object, what: str
) -> None:
    """By whatever way the notice comes, it is refused by name and with the reason, and is not there any more."""
    run = tmp_path / "run"
    good, other = small(run / "step-1"), small(tmp_path / "other" / "step-2")
    (run / "link").symlink_to(other)
    work = tmp_path / "work"
    config = Config(
        watch=WatchConfig(roots=(run,), suite=SUITE),
        checkpoint=CheckpointConfig(convert=f"touch {tmp_path}/ran {{src}} {{dst}}"),
    )
    notice, why = {
        "a suite file": ({"checkpoint": str(good), "suite": str(suite)}, "announce 'mine'"),
        "a place": ({"checkpoint": str(run / "link")}, f"{other} is not below any of [watch] roots"),
        "an unknown field": ({"checkpoint": str(good), "allow_bin": True}, "allow_bin"),
        "a converter": ({"checkpoint": str(other / ".."), "suite": SUITE}, "is not below"),
    }[what]
    ears = daemon(work, config)
    if way is by_stream:
        ears.paths.redis.mkdir(parents=True)
        ears.paths.redis_address.write_bytes(served.redis_address.read_bytes())
        by_stream(served, notice)
    else:
        by_spool(ears.paths, notice)
    refused = refusal(ears)
    assert refused.checkpoint == notice["checkpoint"]
    assert why in refused.why
    assert not (tmp_path / "ran").exists()
    if way is by_stream:
        with redis_client.connect(served.redis_address) as client:
            assert client.xlen(hook.STREAM) == 0


def test_notices_without_a_signature_are_counted_and_none_of_their_words_shown(
    tmp_path: Path, served: WorkPaths
) -> None:
    """At a Redis of the site's, however many come: they push no real refusal out of what `status` shows."""
    ears = daemon(
        tmp_path / "work", Config(redis=RedisConfig(url="redis://site"), watch=WatchConfig(suite=SUITE))
    )
    ears.paths.redis.mkdir(parents=True)
    ears.paths.redis_address.write_bytes(served.redis_address.read_bytes())
    spool(ears.paths, Notice(checkpoint="/real", suite="/no/suite.toml"))
    for number in range(2 * pending.MOST_REFUSED):
        by_stream(served, {"checkpoint": f"/forged/{number}", "suite": SUITE})
    ears.tick()
    work_dir = ["--work-dir", str(ears.paths.root)]
    status = json.loads(CliRunner().invoke(app, ["status", "--json", *work_dir]).stdout)
    assert [bad["checkpoint"] for bad in status["refused"]] == ["/real"]
    assert status["unsigned"] == 2 * pending.MOST_REFUSED
    assert "forged" not in json.dumps(status)
    shown = " ".join(CliRunner().invoke(app, ["status", *work_dir]).stdout.split())
    assert f"refused without this work folder's signature: {2 * pending.MOST_REFUSED}, the last at" in shown
    with redis_client.connect(served.redis_address) as client:
        assert client.xlen(hook.STREAM) == 0


def test_a_notice_names_what_the_settings_list(tmp_path: Path, suite: Path) -> None:
    """Its own suites by their files' names, below a root or a watched folder."""
    config = Config(watch=WatchConfig(roots=(tmp_path / "a",), folders=(tmp_path / "b",), suites=(suite,)))
    config = config.model_copy(update={"watch": config.watch.model_copy(update={"suite": SUITE})})
    ears = daemon(tmp_path / "work", config)
    for place, named in ((tmp_path / "a" / "x" / "step-1", "mine"), (tmp_path / "b" / "step-2", SUITE)):
        spool(ears.paths, Notice(checkpoint=str(small(place)), suite=named))
    ears.tick()
    suites = {Path(r.state.record.checkpoint.source).name: r.state.record.suite.name
              for r in ears.coordinator.running.values()}  # fmt: skip
    assert suites == {"step-1": "mine", "step-2": SUITE}


def test_a_person_submits_any_suite_file_and_any_place(tmp_path: Path, suite: Path) -> None:
    """Through a folder that only the daemon's user may write; where others may write it, it is as good as the spool folder."""
    place = small(tmp_path / "anywhere" / "step-7")
    ears = daemon(tmp_path / "work", Config())
    submit(ears.paths, Notice(checkpoint=str(place), suite=str(suite)))
    assert ears.paths.submissions.stat().st_mode & 0o777 == 0o700
    ears.tick()
    assert taken(ears) == ["step-7"]
    assert not notices(ears)
    later = daemon(tmp_path / "later", Config())
    submit(later.paths, Notice(checkpoint=str(place), suite=str(suite)))
    later.paths.submissions.chmod(0o770)
    assert "a notice names a suite, not a file" in refusal(later).why


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give a folder to another user")
def test_a_submissions_folder_of_another_user_is_as_good_as_the_spool_folder(
    tmp_path: Path, suite: Path
) -> None:
    ears = daemon(tmp_path / "work", Config())
    submit(ears.paths, Notice(checkpoint=str(small(tmp_path / "step-1")), suite=str(suite)))
    os.chown(ears.paths.submissions, 12_345, -1)
    assert "a notice names a suite, not a file" in refusal(ears).why


def test_two_suites_of_one_name_are_refused_by_the_settings(tmp_path: Path) -> None:
    for files in (("a/x.toml", "b/x.toml"), ("a/quickstart.toml",), ("default.toml",)):
        with pytest.raises(OperatorError, match="rename the file"):
            suite_files(WatchConfig(suites=tuple(tmp_path / f for f in files)))


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
    return top


@given(start=st.sampled_from(["root", "root-other", "to-root", "."]), parts=PARTS)
def test_a_place_counts_by_where_its_links_and_dots_lead(tree: Path, start: str, parts: list[str]) -> None:
    """The root may be named by a link, too."""
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


def test_without_roots_no_place_is_taken_and_the_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        NotAdmittedError,
        match=r"is not below \[watch\] roots: set roots to the folder .* daemon anew, or .* `evalspan submit /",
    ):
        check_place(str(tmp_path), WatchConfig())
    for odd in ("no\0name", str(tmp_path / "circle")):
        (tmp_path / "circle").unlink(missing_ok=True)
        (tmp_path / "circle").symlink_to(tmp_path / "circle")
        with pytest.raises(NotAdmittedError):
            check_place(odd, WatchConfig(roots=(tmp_path,)))


def test_a_default_suite_is_one_of_the_listed_files_by_the_name_of_a_notice(
    tmp_path: Path, suite: Path
) -> None:
    """`suite = "mine"` means the file that a notice names "mine"; relative ones are beside the settings."""
    own = tmp_path / "evalspan.toml"
    own.write_text('[watch]\nroots = ["."]\nsuites = ["suites/mine.toml"]\nsuite = "mine"\n')
    watch = load(own, {}).watch
    assert watch.suite == str(suite)
    assert [s.name for s in loaded_suites(watch)] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('suites = ["mni.toml"]', r"line 3: \[watch\] suites: no suite file .*/mni.toml"),
        ('suite = "mien"', r"line 3: \[watch\] suite: no suite named 'mien'"),
        (
            'suites = ["suites/mine.toml", "other/mine.toml"]',
            r"line 3: \[watch\] suites: a notice would name .*mine",
        ),
    ],
)
def test_a_wrong_suite_of_the_settings_is_named_with_its_line_at_the_daemons_start(
    tmp_path: Path, suite: Path, line: str, why: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.toml").write_bytes(suite.read_bytes())
    own = tmp_path / "evalspan.toml"
    own.write_text(f'[watch]\nroots = ["/"]\n{line}\n')
    answer = CliRunner().invoke(app, ["daemon", "--config", str(own), "--work-dir", str(tmp_path / "work")])
    assert isinstance(answer.exception, OperatorError)
    assert re.search(f"{own}, {why}", str(answer.exception))


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A misspelt folder would refuse every checkpoint; a glob may match later."""
    watch = WatchConfig(roots=(tmp_path / "no", tmp_path), folders=(tmp_path / "run*", tmp_path / "nor"))
    assert missing_places(watch) == [
        f"[watch] roots: {tmp_path}/no does not exist",
        f"[watch] folders: {tmp_path}/nor does not exist",
    ]


def test_a_notice_with_a_mistyped_suite_is_refused_at_once(tmp_path: Path, suite: Path) -> None:
    """Waiting mends no name: the settings are read at the start alone."""
    ears = daemon(tmp_path / "work", Config(watch=WatchConfig(roots=(tmp_path,), suites=(suite,))))
    spool(ears.paths, Notice(checkpoint=str(small(tmp_path / "run" / "step-1")), suite="mien"))
    assert "no suite named 'mien': [watch] suites has: mine" in refusal(ears).why
