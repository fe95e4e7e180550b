"""What goes wrong with one evaluation is that one's fault alone: it is parked, read back, given up, or left alone; others go on."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from support.commands import typed
from support.daemons import obey
from support.fake_cluster import FakeCluster, fake_node
from support.loops import serving, until
from support.simulated.parts import record

from coordinator.base.signals import Signals
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.actions import FindRequestSets
from coordinator.decide.evaluation.events import EVENT
from coordinator.decide.evaluation.records import JOURNAL_FORMAT, job_prefix
from coordinator.errors import RetryError
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.interface.cli.screen.evaluation_views import all_summaries, evaluation_views, view_as_json
from coordinator.interface.cli.screen.work_folder_view import WorkFolderView, _over
from coordinator.runtime import journal, registry, runner
from coordinator.runtime.journal import JournalError, OtherFormatError, exclude_coordinators, read_events
from coordinator.runtime.runner import MAX_ANSWERS, MAX_ANSWERS_AN_ENTRY
from coordinator.runtime.summary import read_ended_summary, read_summary
from coordinator.site.config.schema import ClusterConfig, Config

GOOD, BAD = "ckpt-good-00000001", "ckpt-bad-00000002"
NO_EVENT = b'{"kind": "of-another-version"}\n'
FIELDS = "a17b2062"


def named(name):
    return record().model_copy(update={"evaluation_id": name})


def jobs_of(cluster, name):
    prefix = job_prefix(name)
    return [j.name for j in cluster.jobs() if j.name.startswith(prefix) and j.phase != "ended"]


def accept(coordinator, *names):
    """Accept these evaluations, and wait until each has a job."""
    for name in names:
        coordinator.evaluations.accept(named(name))
    until(coordinator, lambda: all(jobs_of(coordinator.cluster, name) for name in names))


@pytest.fixture
def cluster():
    return FakeCluster(fleet=[fake_node("n1", gpus=0, memory_mb=64_000)])  # builds only


@pytest.fixture
def pair(work, cluster):
    """A coordinator in charge of two evaluations, each with a job on the cluster."""
    with serving(work.root, cluster) as coordinator:
        accept(coordinator, GOOD, BAD)
        yield coordinator


@pytest.fixture
def left(work, cluster):
    """The work folder of two evaluations that have jobs, and that no process runs."""
    with serving(work.root, cluster) as coordinator:
        accept(coordinator, GOOD, BAD)
    return work


@pytest.fixture
def over(work, cluster):
    """The work folder of an evaluation that was cancelled and has ended."""
    with serving(work.root, cluster) as coordinator:
        accept(coordinator, GOOD)
        coordinator.evaluations.cancel(GOOD, "asked")
        until(coordinator, lambda: coordinator.evaluations.running[GOOD].state.ended_at is not None)
        coordinator.evaluations.forget_ended()
    return work


def shown(work):
    """What `status` says of each evaluation."""
    config = Config(work_dir=work.root)
    found = all_summaries(config)
    rows = evaluation_views(config, found, [s for s in found if not s.ended_at])
    return {row.summary.evaluation_id: row for row in rows}


def halted(work):
    """What `watch` says of each evaluation that does not go on; "" where it does."""
    views = WorkFolderView(Config(work_dir=work.root), "evalspan daemon", None).views(time.time())
    return {view.summary.evaluation_id: view.halt.word if view.halt else "" for view in views}


def watch_ends(work):
    """Whether `watch` of the bad evaluation has come to its end, on a site whose Slurm commands are away."""
    config = Config(work_dir=work.root, cluster=ClusterConfig(kind="slurm"))
    sight = WorkFolderView(config, "evalspan daemon", work.evaluation(BAD))
    return bool(_over(sight, sight.views(time.time()), draws=True))


def again(coordinator, name=BAD):
    """A turn in which a parked evaluation is tried again."""
    coordinator.evaluations.parked[name].until = 0.0
    coordinator.tick()


# --- while a coordinator runs it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [TypeError("a bug"), OSError(28, "No space left on device"), RetryError("the site is away")]
)
def test_an_error_in_an_evaluations_turn_parks_it_and_its_journal_brings_it_back(
    pair, work, cluster, caplog, error
):
    """Whatever the error: the other goes on, the traceback of a bug is told once, jobs go on, and `status` says why."""

    def refused(*_):
        raise error

    pair.evaluations.running[BAD].observe = refused
    bug = isinstance(error, TypeError)
    for _ in range(20):  # it does not spin
        pair.tick()
    assert list(pair.evaluations.running) == [GOOD]
    assert caplog.text.count("Traceback") == bug
    assert jobs_of(cluster, BAD)
    assert pair.evaluations.busy
    rows = shown(work)
    assert (rows[BAD].stage, rows[BAD].fault) == ("parked", "TypeError: a bug" if bug else str(error))
    assert (rows[GOOD].stopped, rows[GOOD].fault) == (False, "")
    assert halted(work) == {BAD: "parked", GOOD: ""}
    again(pair)
    assert sorted(pair.evaluations.running) == [BAD, GOOD]
    assert shown(work)[BAD].fault == ""


def test_one_that_is_faulty_again_and_again_is_given_up_and_its_jobs_end(pair, work, cluster, monkeypatch):
    """A journal that cannot be read, here: four looks, then nothing of it is left on the cluster, and a `watch` of it ends.
    `retry` begins anew.
    """
    journal = work.evaluation(BAD).journal
    whole = journal.read_bytes()
    journal.write_bytes(whole + NO_EVENT)
    pair.evaluations.running[BAD].state.jobs.live = None
    monkeypatch.setenv("PATH", str(work.root))
    pair.tick()
    for _ in range(1, registry.MOST_TRIES):
        assert (shown(work)[BAD].stage, watch_ends(work)) == ("parked", False)
        again(pair)
    assert (shown(work)[BAD].stage, watch_ends(work)) == ("given up", True)
    until(pair, lambda: not jobs_of(cluster, BAD) and pair.evaluations.lost(BAD))
    assert jobs_of(cluster, GOOD)
    assert "is not an event of this version" in str(pair.evaluations.lost(BAD))
    journal.write_bytes(whole)
    leave_notice(work, Notice(command="retry", evaluation_id=BAD))
    obey(pair)
    assert sorted(pair.evaluations.running) == [BAD, GOOD]


def test_events_that_call_for_each_other_without_end_park_their_evaluation(
    pair, work, cluster, monkeypatch, caplog
):
    """Each turn is bounded, also that of a restart: the last events are logged, the other evaluation and a signal go on."""
    step, asked = machine.step, []

    def endless(state, site, events):
        found = step(state, site, events)
        if state.evaluation_id != BAD:
            return found
        asked.extend(events)
        return replace(found, actions=(*found.actions, FindRequestSets(record=state.record)))

    monkeypatch.setattr(machine, "step", endless)
    most = MAX_ANSWERS + MAX_ANSWERS_AN_ENTRY * len(record().suite.tasks)
    journal = work.evaluation(BAD).journal
    pair.evaluations.prioritize(GOOD, 1)
    with pytest.raises(OSError, match="is parked"):
        pair.evaluations.prioritize(BAD, 1)
    assert "the last is request-sets-found: a bug of evalspan" in str(shown(work)[BAD].fault)
    for _ in range(2):
        assert len(asked) <= most + 1
        asked.clear()
        with Signals((signal.SIGTERM,)) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            pair.run(lambda: bool(signals.received))
            again(pair)
        assert list(pair.evaluations.running) == [GOOD]
    assert caplog.text.count("its last events") == 3
    assert '"kind":"request-sets-found"' in caplog.text
    assert jobs_of(cluster, GOOD)
    assert len(journal.read_bytes().splitlines()) < 4 * (most + 10)
    monkeypatch.undo()
    again(pair)
    assert sorted(pair.evaluations.running) == [BAD, GOOD]


def test_an_evaluation_whose_folder_was_removed_is_forgotten_with_its_jobs(pair, work, cluster, caplog):
    """Said once; a job that writes its outcome brings back no evaluation. The work folder that is away is no removal."""
    shutil.rmtree(work.root / BAD)
    pair.tick()
    assert list(pair.evaluations.running) == [GOOD]
    (work.root / BAD / "outcomes").mkdir(parents=True)
    until(pair, lambda: not jobs_of(cluster, BAD) and not pair.evaluations.parked[BAD].ending)
    assert jobs_of(cluster, GOOD)
    pair.evaluations.forget_ended()
    assert not pair.evaluations.parked
    assert caplog.text.count("its folder has been removed; forgotten") == 1
    away = work.root.with_name("away")
    work.root.rename(away)
    pair.tick()
    assert pair.evaluations.parked[GOOD].until is not None
    assert jobs_of(cluster, GOOD)
    shutil.rmtree(work.root, ignore_errors=True)  # on a slow machine the turn has begun a folder anew
    away.rename(work.root)
    again(pair, GOOD)
    assert list(pair.evaluations.running) == [GOOD]


@pytest.mark.parametrize("seconds", ["NaN", "1e999", "-Infinity"])
def test_an_outcome_that_no_journal_can_hold_is_passed_over_by_name(pair, work, seconds, caplog):
    """Its evaluation goes on, and the next coordinator reads its journal."""
    fields = '"kind": "built", "name": "x", "entry": 0, "batch_size": 8, "sets": {}'
    work.evaluation(BAD).outcome("built", "x").write_text(f'{{{fields}, "seconds": {seconds}}}')
    pair.tick()
    assert "x.built.json is not an outcome of this version" in caplog.text
    assert set(pair.evaluations.running) == {GOOD, BAD}
    pair.evaluations.running.pop(BAD).journal.close()
    assert pair.evaluations.accept(named(BAD)).state.jobs.live


def test_an_end_that_the_disk_does_not_show_is_told_once(pair, monkeypatch):
    real = runner.write_summary
    monkeypatch.setattr(runner, "write_summary", lambda p, s: s.ended_at is None and real(p, s))
    pair.evaluations.cancel(GOOD, "x")
    until(pair, lambda: pair.evaluations.running[GOOD].state.ended_at is not None)
    told = 0
    for _ in range(3):
        told += sum(summary.ended_at is not None for summary in pair.evaluations.summaries())
        pair.evaluations.forget_ended()
    assert told == 1


# --- at a coordinator's start ----------------------------------------------------------------------------------------


def test_a_damaged_journal_costs_no_other_evaluation_its_start_or_its_row(left, cluster):
    """Named with its line, by the daemon that starts and by `status`; and it may be cancelled. Until one starts, both read
    "stopped"; the damage is no other format.
    """
    assert halted(left) == {GOOD: "stopped", BAD: "stopped"}
    assert shown(left)[GOOD].stopped
    paths, empty = left.evaluation(BAD), left.root / "empty" / "journal.jsonl"
    whole = paths.journal.read_bytes()
    paths.journal.write_bytes(whole + NO_EVENT)
    with pytest.raises(JournalError) as damaged:
        list(read_events(paths.journal))
    assert not isinstance(damaged.value, OtherFormatError)
    empty.parent.mkdir()
    empty.touch()
    paths.status.unlink()
    row = shown(left)[BAD]
    assert row.stage == "unreadable"
    assert f"{BAD}/journal.jsonl:" in str(row.fault)
    with serving(left.root, cluster) as coordinator:
        coordinator.evaluations.resume_all()
        assert list(coordinator.evaluations.running) == [GOOD]
        leave_notice(left, Notice(command="cancel", evaluation_id=BAD, reason="enough"))
        obey(coordinator)
        until(
            coordinator, lambda: not jobs_of(cluster, BAD) and coordinator.evaluations.lost(BAD) is not None
        )
    summary = read_summary(paths)
    assert (summary.parked.cancelled, summary.parked.until) == ("enough", None)
    paths.journal.write_bytes(paths.journal.read_bytes().replace(NO_EVENT, b""))
    with serving(left.root, cluster) as later:
        later.evaluations.resume_all()
        assert later.evaluations.running[BAD].state.ending.cancelled == "enough", (
            "who was cancelled stays cancelled"
        )


def test_a_copy_of_an_evaluations_folder_is_no_second_one(left, cluster):
    """A backup beside it, say: passed over, by `status` too; nothing is done twice and no job of the first ends."""
    shutil.copytree(left.root / GOOD, left.root / "backup-00000001")
    with serving(left.root, cluster) as coordinator:
        coordinator.evaluations.resume_all()
        for _ in range(5):
            coordinator.tick()
        assert sorted(coordinator.evaluations.running) == [BAD, GOOD]
        assert not coordinator.evaluations.parked
        assert jobs_of(cluster, GOOD)
        assert sorted(shown(left)) == [BAD, GOOD]


def test_a_run_of_one_evaluation_obeys_no_command_to_another(over, cluster):
    """Its jobs would end with the run. The command stays for the daemon."""
    leave_notice(over, Notice(command="retry", evaluation_id=GOOD))
    with serving(over.root, cluster) as coordinator:
        assert coordinator.run_one(named(BAD), lambda: True).ended_at is not None
        assert list(coordinator.evaluations.running) == [BAD]
        obey(coordinator)
        assert coordinator.evaluations.running[GOOD].state.ended_at is None


def test_what_was_cancelled_is_resumed_though_its_files_are_in_use_at_first(over, cluster):
    """Another process archives it when the same evaluation is asked for again: it is parked, then it goes on."""
    archiver = ExitStack()
    archiver.enter_context(exclude_coordinators(over.evaluation(GOOD).journal))
    with serving(over.root, cluster) as coordinator:

        def watch():
            archiver.close()
            if GOOD in coordinator.evaluations.parked:
                coordinator.evaluations.parked[GOOD].until = 0.0
            return (
                GOOD in coordinator.evaluations.running
                and coordinator.evaluations.running[GOOD].state.ending.retried
            )

        assert coordinator.run_one(named(GOOD), watch).ending.retried


def test_of_what_has_ended_no_journal_is_read(over, cluster):
    """Neither by a daemon that starts nor by `status`: its summary is kept. One whose summary was lost is read once."""
    paths = over.evaluation(GOOD)
    row, last = view_as_json(shown(over)[GOOD], over.root, 0.0), read_ended_summary(paths)
    assert (last.cancelled, last.result) == ("asked", "cancelled")
    assert last.journal_bytes == paths.journal.stat().st_size
    paths.status.unlink()
    assert view_as_json(shown(over)[GOOD], over.root, 0.0) == row
    with serving(over.root, cluster) as coordinator:
        coordinator.evaluations.resume_all()
        assert not coordinator.evaluations.running
        assert last.like(read_ended_summary(paths))
        paths.journal.write_bytes(b"x" * (paths.journal.stat().st_size - 1) + b"\n")
        coordinator.evaluations.resume_all()
        assert not coordinator.evaluations.parked
    assert shown(over)[GOOD].stage == "cancelled"
    with paths.journal.open("ab") as journal:
        journal.write(b"x")
    assert read_summary(paths) is None, "it was gone on with"


# --- another journal format ------------------------------------------------------------------------------------------


def words_of(shape):
    """The words and records that a field's type names."""
    if isinstance(shape, dict):
        yield from (str(shape[key]) for key in ("const", "enum", "$ref", "type") if key in shape)
    for inner in shape.values() if isinstance(shape, dict) else shape if isinstance(shape, list) else ():
        yield from words_of(inner)


def test_other_fields_in_a_journal_are_another_format():
    """Who changes an event raises `JOURNAL_FORMAT`, and writes here what this test says."""
    rows = {
        f"{name}.{field} {field in one.get('required', ())} {sorted(words_of(shape))}"
        for name, one in EVENT.json_schema()["$defs"].items()
        for field, shape in one.get("properties", {}).items()
    }
    found = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:8]
    assert (JOURNAL_FORMAT, found) == (10, FIELDS)


def test_an_unfinished_evaluation_of_an_earlier_format_is_read_and_gone_on_with(left, cluster, monkeypatch):
    """Through `UPCASTS`: `status` shows it as before and changes no file; a daemon brings its journal to the present format."""
    paths = left.evaluation(BAD)
    events = list(read_events(paths.journal))
    earlier = [json.loads(line) for line in paths.journal.read_bytes().splitlines()]
    earlier[0]["journal_format"] = JOURNAL_FORMAT - 1
    lines = [json.dumps({"when" if key == "at" else key: e[key] for key in e}) for e in earlier]
    as_then = ("\n".join(lines) + '\n{"torn').encode()
    paths.journal.write_bytes(as_then)
    paths.status.unlink(missing_ok=True)
    monkeypatch.setattr(journal, "UPCASTS", {})
    assert "journal format" in shown(left)[BAD].fault
    upcasts = {JOURNAL_FORMAT - 1: lambda line: {"at" if key == "when" else key: line[key] for key in line}}
    monkeypatch.setattr(journal, "UPCASTS", upcasts)
    assert shown(left)[BAD].fault == ""
    assert list(read_events(paths.journal)) == events
    assert paths.journal.read_bytes() == as_then
    with serving(left.root, cluster) as coordinator:
        coordinator.evaluations.resume_all()
        assert sorted(coordinator.evaluations.running) == [BAD, GOOD]
        assert jobs_of(cluster, BAD)
    monkeypatch.undo()
    assert list(read_events(paths.journal))[: len(events)] == events


@pytest.mark.parametrize("number", [0, JOURNAL_FORMAT + 1], ids=["earlier", "later"])
def test_an_unfinished_evaluation_of_another_format_is_refused_and_left_alone(
    left, cluster, caplog, tmp_path, number
):
    """In one line with its folder, how to end its jobs and no others, and what to type: by daemon, `status` and commands.
    The other evaluation goes on; no file of it changes and no job of it ends, however often it is looked at.
    """
    paths = left.evaluation(BAD)
    first, *rest = paths.journal.read_text().splitlines()
    first = json.dumps(json.loads(first) | {"journal_format": number})
    paths.journal.write_text("\n".join([first, *rest, '{"kind": "a-kind-of-then"}\n']))
    files = {p: p.read_bytes() for p in paths.root.rglob("*") if p.is_file()}
    with serving(left.root, cluster) as coordinator:
        coordinator.evaluations.resume_all()
        for _ in range(8):
            again(coordinator)
        assert list(coordinator.evaluations.running) == [GOOD]
        assert coordinator.evaluations.lost(BAD) is None
    with pytest.raises(OtherFormatError) as refused:
        list(read_events(paths.journal))
    (said,) = [text for line in caplog.records if BAD in (text := line.getMessage())]
    (row,) = [s for s in all_summaries(Config(work_dir=left.root)) if s.evaluation_id == BAD]
    assert row.fault in said
    for part in (
        str(paths.root),
        "journal format",
        f"grep ' {job_prefix(BAD)}'",
        "`evalspan submit /c --suite suite`",
    ):
        assert part in said
    assert "\n" not in said
    for command in ("cancel", "retry", "report"):
        refusal = typed(command, BAD, "--work-dir", left.root, code=1).exception
        assert isinstance(refusal, OtherFormatError)
        assert str(refusal).startswith(f"{BAD} was begun by ")
    assert {p: p.read_bytes() for p in paths.root.rglob("*") if p.is_file()} == files
    assert jobs_of(cluster, BAD)
    listed = f"echo '71 {job_prefix(BAD)}trial-n1-a0'; echo '72 {job_prefix(GOOD)}trial-n1-a0'"
    for name, does in {"squeue": listed, "scancel": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    run = f"PATH={shlex.quote(str(tmp_path))}:$PATH; {str(refused.value).split('`')[1]}"
    assert subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=True).stdout == "71\n"
