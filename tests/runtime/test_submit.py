"""What is asked of a work folder, by `submit`, a notice or a command: what it waits for, what comes of it, and what is said."""

import json
import os
import shutil

import pytest
from support.commands import typed
from support.daemons import SUITE, announce, daemon, notices, obey, only, small, taken, until
from support.loops import coordinator_on
from support.simulated.parts import record

import evalspan
from coordinator.base import clock
from coordinator.base.clock import Throttle
from coordinator.decide.evaluation.state import EntryState, Phase, State
from coordinator.intake import from_settings, pending
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.intake.resubmit import resubmission_of
from coordinator.interface.cli.commands import _nothing_to_do
from coordinator.interface.page.index import standing_in_words
from coordinator.results.report.load_series import find_series
from coordinator.runtime.service import RULES_SECONDS, Service
from coordinator.runtime.submission import Submission, has_ended
from coordinator.runtime.summary import (
    Summary,
    Task,
    fields_of_record,
    halt_of,
    read_ended_summary,
    read_summary,
    write_summary,
)
from coordinator.runtime.work_lock import DAEMON, WorkLock
from coordinator.site.cluster.sbatch_text import SlurmOptions
from coordinator.site.cluster.slurm_cli import SlurmCli
from coordinator.site.cluster.slurm_parse import NODE_FIELDS
from coordinator.site.config.schema import ClusterConfig, Config, WatchConfig
from evaljobs.contract.paths import EvaluationPaths

pytestmark = pytest.mark.usefixtures("own_settings")
EVAL = "evalspan eval"


@pytest.fixture
def lock(work):
    return WorkLock(work.lock)


def told(*words):
    """A command's output on one line."""
    return " ".join(typed(*words).output.split())


def status():
    return json.loads(told("status", "--json"))


def submit(place, *options):
    return json.loads(typed("submit", place, "--suite", SUITE, "--json", *options).stdout)


# --- a submission that waits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["", EVAL])
def test_a_submission_without_a_daemon_says_so_and_is_listed_until_one_takes_it(tmp_path, lock, holder):
    """An `eval` in the work folder is no daemon, and is named; so is a notice of the hook listed."""
    place = small(tmp_path / "step-300")
    if holder:
        lock.acquire(holder)
    wait = "to start one then: `evalspan daemon --wait`" if holder else "to start one: `evalspan daemon`"
    for text in (told("submit", str(place), "--suite", SUITE), told("status")):
        assert "no daemon runs for this work folder" in text
        assert wait in text
        assert (f"{EVAL}, pid {os.getpid()} on " in text) == bool(holder)
    assert "daemon: not running" in text
    ears = daemon(tmp_path / "work", Config())
    leave_notice(ears.paths, Notice(checkpoint="/c", noticed_at=4e9))
    found = status()
    waits = [(str(place), SUITE), ("/c", "default")]
    assert [(w["checkpoint"], w["suite"]) for w in found["waiting"]] == waits
    assert found["daemon"] is False
    assert str(found["holder"]).startswith(EVAL) == bool(holder)
    lock.release()
    ears.tick()
    assert taken(ears) == ["step-300"]
    assert not status()["waiting"]


@pytest.mark.parametrize("held", [False, True])
def test_a_waiting_submission_is_listed_by_its_id_and_withdrawn_by_cancel(tmp_path, lock, held):
    """Before a daemon has looked at it, or while a daemon waits for the rest of its files; another one stays."""
    place = small(tmp_path / "step-300")
    name, kept = (submit(p)["evaluation_id"] for p in (place, small(tmp_path / "step-400")))
    ears = daemon(tmp_path / "work", Config())
    if held:
        lock.acquire(DAEMON)
        (place / "config.json").rename(tmp_path / "config.json")
        ears.tick()
    assert name in {w["evaluation_id"] for w in status()["waiting"]}
    assert name in told("status")
    assert told("cancel", name if held else name[:10]) == f"{name} is withdrawn: no daemon had started it"
    if held:
        (tmp_path / "config.json").rename(place / "config.json")
    ears._throttle = Throttle()
    ears.tick()
    assert taken(ears) == ["step-400"]
    assert name not in told("status")
    assert kept in told("status")
    assert notices(ears) == 0
    lock.release()
    assert "no evaluation in" in str(typed("cancel", name, code=1).exception)


# --- what it means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "step"), [("step-300", None, 300), ("step-300", 7, 7), ("final", None, None)]
)
def test_the_step_is_the_same_however_a_checkpoint_comes(tmp_path, name, said, step):
    """By `eval`, `submit` or a notice: what was said, else the number in the folder's own name, also behind a link."""
    place, link = small(tmp_path / name), tmp_path / "latest"
    link.symlink_to(place)
    for work in ("submit", "notice"):
        ears = daemon(tmp_path / work)
        performer = ears.coordinator.performer
        inputs = from_settings.inputs_for(performer.site, performer.lm_eval_version)
        for path in (str(place), "latest"):
            asked = from_settings.evaluation_record(Config(), path, SUITE, inputs, step=said)
            assert asked.checkpoint.step == step
        if work == "submit":
            option = [] if said is None else ["--step", str(said)]
            submit("latest", "--work-dir", str(tmp_path / work), *option)
        else:
            leave_notice(ears.paths, Notice(checkpoint=str(link), suite=SUITE, step=said))
        ears.tick()
        assert only(ears).state.record.checkpoint.step == step


def test_a_step_that_is_no_exact_float_is_refused(tmp_path):
    said = typed("submit", small(tmp_path / "step-1"), "--suite", SUITE, "--step", 1 << 54, code=1).exception
    assert "step is a training step, from 0 to" in str(said)


def test_a_copy_of_a_checkpoint_is_one_evaluation_in_the_series_of_both_trainings(tmp_path):
    """Name, content and times are the same: a notice and a submission of it tell where it lies, too."""
    ears = daemon(tmp_path / "work")
    place = small(tmp_path / "a" / "step-10")
    announce(ears, place)
    ears.tick()
    announce(ears, shutil.copytree(place, tmp_path / "b" / "step-10"))
    ears.tick()
    submit(shutil.copytree(place, tmp_path / "c" / "step-10"))
    assert len(ears.coordinator.evaluations.running) == 1
    for training in "abc":
        (point,) = find_series(tmp_path / "work", str(tmp_path / training))
        assert point.checkpoint == str(tmp_path / training / "step-10")


# --- asked again -----------------------------------------------------------------------------------------------------


def test_a_higher_priority_is_taken_over_and_outlives_the_daemon(tmp_path):
    """By `submit` or by a notice of any kind; a lower one, or the same again, changes nothing, and that is said."""
    place = small(tmp_path / "step-1")
    ears = daemon(tmp_path / "work")
    announce(ears, place)
    ears.tick()
    assert submit(place)["what"] == "known"
    raised = submit(place, "--priority", "10")
    assert (raised["what"], raised["note"]) == ("priority-raised", "its priority is raised from 0 to 10")
    for _ in range(2):
        ears.tick()
        assert only(ears).state.record.priority == 10
        announce(ears, place, priority=3)
    ears.tick()
    assert "stays 10" in submit(place, "--priority", "3")["note"]
    assert notices(ears) == 0
    after = daemon(tmp_path / "work")
    after.coordinator.evaluations.resume_all()
    assert only(after).state.record.priority == 10


def test_a_pause_outlives_the_daemon_until_it_is_resumed_and_a_priority_goes_up_and_down(tmp_path, lock):
    """By the command line and from Python; the views say since when and why, and what lets it go on."""
    place = small(tmp_path / "step-1")
    ears = daemon(tmp_path / "work")
    announce(ears, place)
    ears.tick()
    name = only(ears).state.evaluation_id
    lock.acquire(DAEMON)

    def after(*words):
        assert "is asked for" in told(*words)
        obey(ears.coordinator)
        running = only(ears)
        running._summary = None  # it is made at most once a second
        running.write_summary()
        return running.state

    assert after("pause", name, "--reason", "GPUs for a deadline").nodes.paused == "GPUs for a deadline"
    assert "paused since" in told("status")
    assert f"GPUs for a deadline; `evalspan resume {name}` lets it go on" in told("status")
    shown = status()["evaluations"][0]
    assert (shown["stage"], shown["stopped"]) == ("paused", False)
    assert standing_in_words(read_summary(EvaluationPaths(tmp_path / "work" / name)), halt(ears, name), 0.0)[
        1
    ].startswith("paused")
    assert f"`evalspan resume {name}`" in submit(place)["note"]
    again = daemon(tmp_path / "work")
    again.coordinator.evaluations.resume_all()
    assert only(again).state.nodes.paused_at is not None
    assert after("priority", name, "-1").record.priority == -1
    assert after("priority", name, "7").record.priority == 7
    assert after("resume", name).nodes.paused_at is None
    assert "asked for" in evalspan.pause(name[:12], reason="again")
    assert "asked for" in evalspan.resume(name)
    assert "asked for" in evalspan.prioritize(name, 2)
    obey(ears.coordinator)
    assert (only(ears).state.nodes.paused_at, only(ears).state.record.priority) == (None, 2)


def halt(ears, name):
    paths = EvaluationPaths(ears.paths.root / name)
    return halt_of(read_summary(paths), paths, held=True)


@pytest.mark.parametrize("reason", ["asked", "stale"])
def test_what_was_cancelled_is_resumed_by_a_submission_and_by_nothing_else(tmp_path, reason):
    """A notice that comes twice, a priority and a second cancellation leave it with a valid summary, whether the daemon has
    forgotten it or not. One that was dropped as stale is not dropped once more.
    """
    old, new = small(tmp_path / "run" / "step-1"), small(tmp_path / "run" / "step-2", seed=1)
    watch = WatchConfig(roots=(tmp_path,))
    ears = daemon(tmp_path / "work", Config(work_dir=tmp_path / "work", backlog="latest", watch=watch))
    announce(ears, old)
    ears.tick()
    running = only(ears)
    name = running.state.evaluation_id
    if reason == "stale":
        announce(ears, new)
    else:
        ears.coordinator.evaluations.cancel(name, reason)
    until(ears, lambda: running.state.ended_at is not None)
    assert reason in running.state.ending.cancelled
    asks = (
        lambda: announce(ears, old),
        lambda: announce(ears, old, priority=7),
        lambda: leave_notice(ears.paths, Notice(command="cancel", evaluation_id=name)),
    )
    known = Submission(evaluation_id=name, checkpoint="", suite="", what="known")
    ears.coordinator.evaluations.summaries()
    for ask in asks:
        for forgotten in (False, True):
            if not forgotten:
                ears.coordinator.evaluations.revive(name)
            ask()
            ears.tick()
            ears.coordinator.evaluations.summaries()
            ears.coordinator.evaluations.forget_ended()
            assert name not in ears.coordinator.evaluations.running
            assert read_ended_summary(running.paths) is not None
            assert has_ended(ears.config, known)
    again = submit(old, "--priority", "8")
    assert again["what"] == "taken-up-again"
    assert reason in again["note"]
    for _ in range(3):
        ears.tick()
    state = ears.coordinator.evaluations.running[name].state
    assert not state.ending.cancelled
    assert state.ended_at is None
    assert state.record.priority == 8


def test_of_what_is_scored_nothing_is_done_again(tmp_path):
    """Whatever asks for it, and each says so; what has no score is tried again."""
    rec = record(2)
    entries = [EntryState(index=i, name=t.name, status="scored") for i, t in enumerate(rec.suite.tasks)]
    state = State(record=rec, entries=entries, batch_size=rec.suite.batch_size)
    state.ending.phase, state.ending.ended_at = Phase.ENDED, 1.0
    answer = resubmission_of(state, 10)
    assert (answer.what, answer.announce, answer.again) == ("ended", False, False)
    paths = EvaluationPaths(tmp_path / rec.evaluation_id)
    paths.root.mkdir()
    paths.journal.write_text("{}\n")
    over = Summary(**fields_of_record(rec), written_at=1.0, ended_at=1.0, journal_bytes=3)
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


# --- what the daemon does not take -----------------------------------------------------------------------------------


def test_a_command_is_obeyed_before_what_was_submitted_after_it(tmp_path):
    """A submission that was withdrawn leaves a command, which must not end the same submission of later."""
    place = small(tmp_path / "step-1")
    name = submit(place)["evaluation_id"]
    ears = daemon(tmp_path / "other")
    leave_notice(ears.paths, Notice(command="cancel", evaluation_id=name))
    leave_notice(ears.paths, Notice(checkpoint=str(place), suite=SUITE, evaluation_id=name))
    ears.tick()
    assert only(ears).state.evaluation_id == name
    assert not only(ears).state.ending.cancelled


# the commands' answers: settings, then partitions; each call is a line in `calls`
SLURM = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in --Node*) printf '{no_nodes}' ;; *partition*) echo "PartitionName=gpu Default=YES State=UP" ;; *) echo "SelectType = select/cons_tres" ;; esac
"""


def test_a_wrong_partition_is_a_pending_checkpoints_reason_and_slurm_is_not_asked_each_second(
    tmp_path, monkeypatch, caplog
):
    """Nodes and rules are asked for at the first look and after RULES_SECONDS, not between; nothing is accepted, and that the
    checkpoint changed since its last evaluation is not logged at each look.
    """
    caplog.set_level("INFO")
    before = daemon(tmp_path / "work")
    announce(before, small(tmp_path / "step-1"))
    before.tick()
    assert taken(before) == ["step-1"]
    shutil.copytree(small(tmp_path / "later", seed=1), tmp_path / "step-1", dirs_exist_ok=True)
    calls, commands, no_nodes = tmp_path / "calls", tmp_path / "bin", "\\037".join(NODE_FIELDS) + "\\036\\n"
    commands.mkdir()
    for name in ("scontrol", "sinfo"):
        (commands / name).write_text(SLURM.format(calls=calls, no_nodes=no_nodes))
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    now, asked = clock.now(), []
    cluster = ClusterConfig(kind="slurm", partition="nope")
    config = Config(cluster=cluster, watch=WatchConfig(roots=(tmp_path,)))
    monkeypatch.setattr(clock, "now", lambda: now)
    ears = Service(coordinator_on(tmp_path / "work", SlurmCli(SlurmOptions(settings=config))), config)
    announce(ears, tmp_path / "step-1")
    for seconds in (0.0, 2.0, RULES_SECONDS / 2, RULES_SECONDS + 1.0):
        monkeypatch.setattr(clock, "now", lambda seconds=seconds: now + seconds)
        ears.tick()
        asked.append(len(calls.read_text().splitlines()))
    assert asked[0] == asked[1] == asked[2] < asked[3] <= 2 * asked[0]
    (waiting,) = pending.read_pending(ears.paths, 0.0).waiting
    known = "(--partition, [cluster] partition); it has: gpu (default)"
    assert waiting.why == f"the cluster has no partition 'nope' {known}"
    assert not ears.coordinator.evaluations.running
    assert "changed since" not in caplog.text
