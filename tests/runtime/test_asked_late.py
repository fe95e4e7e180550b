"""Laws of a daemon whose evaluations end, fail to be shown, or are asked about late: each is told once and stops no other."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.daemons import SUITE, announce, daemon, notices, only, put, refused, small, taken

from coordinator.config.schema import Config, WatchConfig
from coordinator.evaluation.state import State
from coordinator.intake import inbox
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime import runner, service
from coordinator.runtime.runner import Running
from coordinator.runtime.service import Service
from coordinator.runtime.submission import Submission, has_ended
from coordinator.runtime.summary import Summary, ended
from evaljobs.contract.paths import EvaluationPaths

pytestmark = pytest.mark.usefixtures("own_settings")


@pytest.fixture
def ears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    return begun(tmp_path / "work")


def begun(work: Path, **settings: Any) -> Service:
    made = daemon(work, Config(work_dir=work, watch=WatchConfig(suite=SUITE), **settings))
    made.paths.inbox.mkdir(exist_ok=True)
    return made


def cancelled(ears: Service, folder: Path) -> Running:
    """An evaluation that has ended and that the daemon has not forgotten yet."""
    announce(ears, small(folder))
    ears.tick()
    running = only(ears)
    ears.coordinator.cancel(running.state.evaluation_id, "x")
    until = time.monotonic() + 60
    while running.state.ended_at is None:
        assert time.monotonic() < until
        ears.coordinator.tick()
        ears.coordinator.cluster.advance()
    ears.coordinator.summaries()
    return running


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(
    "asked", [lambda _: {"priority": 7}, lambda name: {"command": "cancel", "evaluation_id": name}]
)
def test_what_is_asked_of_an_evaluation_that_has_ended_leaves_a_valid_summary(
    asked: Callable[[str], dict[str, Any]], forgotten: bool, tmp_path: Path, ears: Service
) -> None:
    """Else it is never archived, each reader replays its journal, and `wait` waits for ever."""
    running = cancelled(ears, tmp_path / "step-1")
    if forgotten:
        ears.coordinator.forget_ended()
    name = running.state.evaluation_id
    if "command" in (late := asked(name)):
        leave(ears.paths, Notice(**late))
    else:
        announce(ears, tmp_path / "step-1", **late)
    ears.tick()
    ears.coordinator.summaries()
    ears.coordinator.forget_ended()
    assert not ears.coordinator.running
    assert ended(running.paths) is not None
    known = Submission(evaluation_id=name, checkpoint="", suite="", what="known")
    assert has_ended(ears.config, known)


def test_an_end_that_the_disk_does_not_show_is_told_once(
    tmp_path: Path, ears: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runner.write_summary

    def refuse(paths: EvaluationPaths, summary: Summary) -> bool:
        return summary.ended_at is None and real(paths, summary)

    monkeypatch.setattr(runner, "write_summary", refuse)
    cancelled(ears, tmp_path / "step-1")
    told = 0
    for _ in range(3):
        told += sum(summary.ended_at is not None for summary in ears.coordinator.summaries())
        ears.coordinator.forget_ended()
    assert told == 1


def test_an_evaluation_that_cannot_be_shown_stops_no_other(
    tmp_path: Path, ears: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a turn nor at a daemon's start."""
    for step in (1, 2):
        announce(ears, small(tmp_path / f"step-{step}", seed=step))
        ears.tick()
    real = runner.summary_now

    def faulty(state: State, *more: Any, **named: Any) -> Summary:
        if "step-1" in state.evaluation_id:
            raise KeyError("x")
        return real(state, *more, **named)

    monkeypatch.setattr(runner, "summary_now", faulty)
    monkeypatch.setattr(runner, "SUMMARY_SECONDS", -1.0)
    assert [s.step for s in ears.coordinator.summaries()] == [2]
    ears.coordinator.close()
    fresh = begun(tmp_path / "work")
    fresh.coordinator.resume_all()
    assert taken(fresh) == ["step-2"]


def test_a_command_is_obeyed_before_what_was_submitted_after_it(tmp_path: Path, ears: Service) -> None:
    """A submission that was withdrawn leaves a command, which must not end the same submission of later."""
    announce(ears, small(tmp_path / "step-1"))
    ears.tick()
    name = only(ears).state.evaluation_id
    later = begun(tmp_path / "work2")
    leave(later.paths, Notice(command="cancel", evaluation_id=name))
    leave(later.paths, Notice(checkpoint=str(tmp_path / "step-1"), suite=SUITE, evaluation_id=name))
    later.tick()
    assert only(later).state.evaluation_id == name
    assert not only(later).state.ending.cancelled


def test_odd_files_of_the_inbox_are_refused_and_hide_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that no float holds, a name too long for one more letter, and files that storage does not give."""
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    ears = begun(tmp_path / "work", backlog={"keep_every": 2})
    real = inbox.read_with_status

    def away(path: Path, most: int) -> Any:
        if path.name.startswith("00"):
            raise OSError(errno.EIO, "x")
        return real(path, most)

    monkeypatch.setattr(inbox, "read_with_status", away)
    ears._inbox.most = 3
    for n in range(3):
        put(ears, "{}", f"00{n}.json")
    put(ears, json.dumps({"checkpoint": str(small(tmp_path / "step-4")), "step": 10**400}), "1.json")
    put(ears, "{", f"{'2' * 245}.json")
    announce(ears, small(tmp_path / "good"))
    for _ in range(2):
        ears.tick()
    assert taken(ears) == ["good"]
    assert len(refused(ears)) == 2
    assert notices(ears) == 3
    ears.coordinator.close()
    begun(tmp_path / "work", backlog={"keep_every": 2})
