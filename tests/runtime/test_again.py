"""Submitting, retrying and raising what is known already: it does what a person expects, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.daemons import SUITE, announce, daemon, notices, only, small, until
from support.simulated.parts import record
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.commands import _nothing_to_do
from coordinator.config.schema import Config, WatchConfig
from coordinator.evaluation.state import EntryState, Phase, State
from coordinator.intake import from_settings, work_folder
from coordinator.intake.resubmit import submitted
from coordinator.runtime import wiring
from coordinator.runtime.summary import Summary, Task, known_by, write_summary
from evaljobs.contract.paths import EvaluationPaths

pytestmark = pytest.mark.usefixtures("own_settings")


def submit(place: Path, *options: str) -> dict[str, Any]:
    told = CliRunner().invoke(app, ["submit", str(place), "--suite", SUITE, "--json", *options])
    assert told.exit_code == 0, told.output
    return dict(json.loads(told.stdout))


def test_a_higher_priority_is_taken_over_and_outlives_the_daemon(tmp_path: Path) -> None:
    """By `submit` or by a notice of any kind; a lower one, or the same again, changes nothing, and that is said."""
    place = small(tmp_path / "step-1")
    ears = daemon(tmp_path / "work")
    announce(ears, place)
    ears.tick()
    assert submit(place)["what"] == "known"
    raised = submit(place, "--priority", "10")
    assert (raised["what"], raised["note"]) == ("priority-raised", "its priority is raised from 0 to 10")
    ears.tick()
    assert only(ears).state.record.priority == 10
    announce(ears, place, priority=3)
    ears.tick()
    assert only(ears).state.record.priority == 10
    assert "stays 10" in submit(place, "--priority", "3")["note"]
    assert notices(ears) == 0
    after = daemon(tmp_path / "work")
    after.coordinator.resume_all()
    assert only(after).state.record.priority == 10


@pytest.mark.parametrize("reason", ["asked", "stale"])
def test_what_was_cancelled_is_resumed_by_a_submission_and_by_no_notice(tmp_path: Path, reason: str) -> None:
    """One that was dropped as stale is not dropped once more; a notice that comes twice revives nothing."""
    old, new = small(tmp_path / "run" / "step-1"), small(tmp_path / "run" / "step-2", seed=1)
    ears = daemon(tmp_path / "work", Config(backlog="latest", watch=WatchConfig(roots=(tmp_path,))))
    announce(ears, old)
    ears.tick()
    running = only(ears)
    name = running.state.evaluation_id
    if reason == "stale":
        announce(ears, new)
    else:
        ears.coordinator.cancel(name, reason)
    until(ears, lambda: running.state.ended_at is not None)
    assert reason in running.state.ending.cancelled
    ears.coordinator.forget_ended()
    announce(ears, old)
    ears.tick()
    assert ears.coordinator.running[name].state.ending.cancelled
    ears.coordinator.forget_ended()
    again = submit(old, "--priority", "2")
    assert again["what"] == "taken-up-again"
    assert reason in again["note"]
    for _ in range(3):
        ears.tick()
    state = ears.coordinator.running[name].state
    assert not state.ending.cancelled
    assert state.ended_at is None
    assert state.record.priority == 2


def test_of_what_is_scored_nothing_is_done_again(tmp_path: Path) -> None:
    """Whatever asks for it, and each says so; what has no score is tried again."""
    rec = record(2)
    entries = [EntryState(index=i, name=t.name, status="scored") for i, t in enumerate(rec.suite.tasks)]
    state = State(record=rec, entries=entries, batch_size=rec.suite.batch_size)
    state.ending.phase, state.ending.ended_at = Phase.ENDED, 1.0
    answer = submitted(state, 10)
    assert (answer.what, answer.announce, answer.again) == ("ended", False, False)
    paths = EvaluationPaths(tmp_path / rec.evaluation_id)
    paths.root.mkdir()
    paths.journal.write_text("{}\n")
    over = Summary(**known_by(rec), written_at=1.0, ended_at=1.0, journal_bytes=3)
    failed = over.model_copy(update={"tasks": (Task(name="a", state="failed", error="no data"),)})
    for summary, results, left in (
        (over, {}, False),
        (failed, {}, True),
        (over, {"unscored": {"a": 1}}, True),
    ):
        assert write_summary(paths, summary)
        paths.results.write_text(json.dumps(results))
        assert bool(_nothing_to_do(paths, "retry")) is not left
        assert _nothing_to_do(paths, "cancel")


TRIAL = """#!/bin/sh
[ "$1" = -c ] && echo 1.0 && exit
echo no such thing >&2
exit 1
"""


def test_a_retry_without_a_daemon_ends_as_what_it_retried(tmp_path: Path) -> None:
    """A trial interpreter that can do nothing: exit code 1 and the tasks with their reason; submitting it says how to try again."""
    place = small(tmp_path / "step-1")
    (tmp_path / "python").write_text(TRIAL)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "evalspan.toml").write_text(f'[trial]\npython = "{tmp_path}/python"\n')
    config = work_folder.load(None)
    coordinator = wiring.coordinator_of(config)
    inputs = from_settings.inputs_for(coordinator.performer.site, coordinator.performer.lm_eval_version)
    record = from_settings.record_of(config, str(place), SUITE, inputs)
    with coordinator.in_charge():
        running = coordinator.accept(record)
        coordinator.run(lambda: running.state.ended_at is not None)
    assert running.state.failed_entries()
    assert "evalspan retry" in submit(place)["note"]
    told = CliRunner().invoke(app, ["retry", record.evaluation_id])
    assert told.exit_code == 1, told.output
    assert f"{record.evaluation_id}: " in told.stdout
    assert "settings of the model" not in told.output
    with (tmp_path / "evalspan.toml").open("a") as file:
        file.write('device = "cpu"\n')
    told = CliRunner().invoke(app, ["retry", record.evaluation_id])
    assert "keeps the settings of the model" in told.output, "a new device is used by a new evaluation alone"
