"""What goes wrong with one evaluation is that one's fault alone: it is parked, read back, given up; others go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons import obey
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record
from support.with_root import USER, fill, no_room_for_an_event

from coordinator.base.signals import Signals
from coordinator.base.throttle import Throttle
from coordinator.cli.screen.sight import Sight
from coordinator.cli.screen.standing import Shown, all_of, json_of, standing
from coordinator.cli.screen.watching import _over
from coordinator.config.schema import ClusterConfig, Config
from coordinator.errors import RetryError
from coordinator.evaluation import step as machine
from coordinator.evaluation.actions import FindRequestSets
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import job_prefix
from coordinator.evaluation.state import State
from coordinator.hook import pinned
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime import registry
from coordinator.runtime.drive import drive
from coordinator.runtime.journal import alone
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.runner import MAX_ANSWERS, MAX_ANSWERS_AN_ENTRY
from coordinator.runtime.service import Service
from coordinator.runtime.summary import Parked, ended, of_record, read_file, read_summary, write_summary
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

GOOD, BAD = "ckpt-good-00000001", "ckpt-bad-00000002"


def jobs_of(cluster: FakeCluster, evaluation_id: str) -> list[str]:
    prefix = job_prefix(evaluation_id)
    return [j.name for j in cluster.jobs() if j.name.startswith(prefix) and j.phase != "ended"]


def accept(coordinator: Coordinator, *names: str) -> None:
    for name in names:
        coordinator.accept(record().model_copy(update={"evaluation_id": name}))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(
        fleet=[fake_node("n1", gpus=0, memory_mb=64_000)]
    )  # builds only: a holder ends by its files


@pytest.fixture
def pair(tmp_path: Path, cluster: FakeCluster) -> Iterator[Coordinator]:
    """A coordinator in charge of two evaluations, each with a job on the cluster."""
    with serving(tmp_path / "work", cluster) as coordinator:
        accept(coordinator, GOOD, BAD)
        until(coordinator, lambda: bool(jobs_of(cluster, GOOD) and jobs_of(cluster, BAD)))
        yield coordinator


def shown(coordinator: Coordinator) -> dict[str, Shown]:
    config = Config(work_dir=coordinator.performer.site.paths.root)
    found = all_of(config)
    return {
        one.summary.evaluation_id: one
        for one in standing(config, found, [s for s in found if not s.ended_at])
    }


def halted(coordinator: Coordinator) -> dict[str, str]:
    """What `watch` says of each evaluation that does not go on; "" where it does."""
    config = Config(work_dir=coordinator.performer.site.paths.root)
    views = Sight(config, "evalspan daemon", None).views(time.time())
    return {view.summary.evaluation_id: view.halt.word if view.halt else "" for view in views}


def again(coordinator: Coordinator, name: str = BAD) -> None:
    """A turn in which a parked evaluation is tried again."""
    coordinator.parked[name].until = 0.0
    coordinator.tick()


@pytest.mark.parametrize(
    "error", [TypeError("a bug"), OSError(28, "No space left on device"), RetryError("the site is away")]
)
def test_an_error_in_an_evaluations_turn_parks_it_and_its_journal_brings_it_back(
    pair: Coordinator, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Whatever the error: the other goes on, the traceback of a bug is told once, jobs go on, and `status` says why."""

    def refused(*_: object) -> None:
        raise error

    pair.running[BAD].observe = refused  # type: ignore[method-assign]
    bug = isinstance(error, TypeError)
    for _ in range(20):  # it does not spin
        pair.tick()
    assert list(pair.running) == [GOOD]
    assert caplog.text.count("Traceback") == bug
    assert jobs_of(cluster, BAD)
    assert pair.busy
    bad = shown(pair)[BAD]
    assert (bad.stage, bad.fault) == ("parked", "TypeError: a bug" if bug else str(error))
    assert shown(pair)[GOOD].fault == ""
    assert halted(pair) == {BAD: "parked", GOOD: ""}
    again(pair)
    assert sorted(pair.running) == [BAD, GOOD]
    assert shown(pair)[BAD].fault == ""


def test_an_evaluation_that_no_process_runs_is_listed_as_stopped(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    """By `status` and `watch`, as soon as the lock of the work folder is free; not while it is held."""
    with serving(tmp_path / "work", cluster) as coordinator:
        accept(coordinator, GOOD)
        assert shown(coordinator)[GOOD].stopped is False
        assert halted(coordinator) == {GOOD: ""}
    assert shown(coordinator)[GOOD].stopped is True
    assert halted(coordinator) == {GOOD: "stopped"}


def test_a_watch_of_one_evaluation_ends_where_it_is_given_up(
    pair: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is parked comes back by itself, one that is given up does not. Also where Slurm's commands are away."""
    paths = pair.running[BAD].paths
    monkeypatch.setenv("PATH", str(tmp_path))
    config = Config(work_dir=pair.performer.site.paths.root, cluster=ClusterConfig(kind="slurm"))
    for until_, ends in ((time.time() + 60.0, False), (None, True)):
        parked = Parked(at=1.0, error="no disk", until=until_)
        assert write_summary(paths, of_record(paths, "").model_copy(update={"parked": parked}))
        sight = Sight(config, "evalspan daemon", paths)
        assert bool(_over(sight, sight.views(time.time()), draws=True)) is ends


def test_one_that_is_faulty_again_and_again_is_given_up_and_its_jobs_end(
    pair: Coordinator, cluster: FakeCluster
) -> None:
    """A journal that is not ours to read, here: four looks, then nothing of it is left on the cluster. `retry` begins anew."""
    journal = pair.running[BAD].paths.journal
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"kind": "of-another-version"}\n')
    pair.running[BAD].state.jobs.live = None  # type: ignore[assignment]
    pair.tick()
    for _ in range(1, registry.MOST_TRIES):
        assert shown(pair)[BAD].stage == "parked"
        again(pair)
    assert shown(pair)[BAD].stage == "given up"
    until(pair, lambda: not jobs_of(cluster, BAD) and pair.lost(BAD))
    assert jobs_of(cluster, GOOD)
    assert "is no event of this version" in str(pair.lost(BAD))
    journal.write_bytes(whole)
    leave(pair.performer.site.paths, Notice(command="retry", evaluation_id=BAD))
    obey(pair)
    assert sorted(pair.running) == [BAD, GOOD]


def test_events_that_call_for_each_other_without_end_park_their_evaluation(
    pair: Coordinator, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each turn is bounded, also that of a restart: the last events are logged, the other evaluation and a signal go on."""
    step, asked = machine.step, list[AnyEvent]()

    def endless(state: State, site: Site, event: AnyEvent) -> machine.Step:
        found = step(state, site, event)
        if state.evaluation_id != BAD:
            return found
        asked.append(event)
        return replace(found, actions=(*found.actions, FindRequestSets(record=state.record)))

    monkeypatch.setattr(machine, "step", endless)
    most = MAX_ANSWERS + MAX_ANSWERS_AN_ENTRY * len(record().suite.tasks)
    journal = pair.running[BAD].paths.journal
    pair.prioritize(GOOD, 1)
    with pytest.raises(OSError, match="is parked"):
        pair.prioritize(BAD, 1)
    assert "the last is request-sets-found: a bug of evalspan" in str(shown(pair)[BAD].fault)
    for _ in range(2):
        assert len(asked) <= most + 1
        asked.clear()
        with Signals((signal.SIGTERM,)) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            pair.run(lambda: bool(signals.received))
            again(pair)
        assert list(pair.running) == [GOOD]
    assert caplog.text.count("its last events") == 3
    assert '"kind":"request-sets-found"' in caplog.text
    assert jobs_of(cluster, GOOD)
    assert len(journal.read_bytes().splitlines()) < 4 * (most + 10)
    monkeypatch.undo()
    again(pair)
    assert sorted(pair.running) == [BAD, GOOD]


def test_a_journal_of_another_version_costs_no_other_evaluation_its_start_or_its_row(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    """Named with its line, by the daemon that starts and by `status`; and it may be cancelled."""
    work = tmp_path / "work"
    with serving(work, cluster) as before:
        accept(before, GOOD, BAD)
        until(before, lambda: bool(jobs_of(cluster, BAD)))
    with (work / BAD / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"kind": "of-another-version"}\n')
    (work / "empty").mkdir()
    (work / "empty" / "journal.jsonl").touch()
    (work / BAD / "status.json").unlink()
    coordinator = coordinator_on(work, cluster, redis=True)
    assert shown(coordinator)[BAD].stage == "unreadable"
    assert f"{BAD}/journal.jsonl:" in str(shown(coordinator)[BAD].fault)
    with coordinator.in_charge():
        coordinator.resume_all()
        assert list(coordinator.running) == [GOOD]
        leave(WorkPaths(work), Notice(command="cancel", evaluation_id=BAD, reason="enough"))
        obey(coordinator)
        until(coordinator, lambda: not jobs_of(cluster, BAD) and coordinator.lost(BAD) is not None)
    coordinator.keeper.stop()
    summary = read_summary(EvaluationPaths(work / BAD))
    assert summary is not None
    assert summary.parked is not None
    assert (summary.parked.cancelled, summary.parked.until) == ("enough", None)
    lines = (work / BAD / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (work / BAD / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    with serving(work, cluster) as later:
        later.resume_all()
        assert later.running[BAD].state.ending.cancelled == "enough", "who was cancelled stays cancelled"


def test_a_run_of_one_evaluation_obeys_no_command_to_another(tmp_path: Path, cluster: FakeCluster) -> None:
    """Its jobs would end with the run. The command stays for the daemon."""
    with serving(tmp_path / "work", cluster) as coordinator:
        accept(coordinator, BAD)
        coordinator.cancel(BAD, "enough")
        until(coordinator, lambda: coordinator.running[BAD].state.ended_at is not None)
        coordinator.forget_ended()
        leave(WorkPaths(tmp_path / "work"), Notice(command="retry", evaluation_id=BAD))
        wanted = record().model_copy(update={"evaluation_id": GOOD})
        assert drive(coordinator, wanted, lambda: True).ended_at is not None
        assert list(coordinator.running) == [GOOD]
        obey(coordinator)
        assert coordinator.running[BAD].state.ended_at is None


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give a file away")
def test_a_command_that_another_user_left_is_passed_over(
    pair: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    left = leave(pair.performer.site.paths, Notice(command="cancel", evaluation_id=GOOD))
    os.chown(left, USER, -1)
    obey(pair)
    assert "left it: ask root" in caplog.text
    assert not left.exists()
    assert not pair.running[GOOD].state.ending.cancelled


def test_an_evaluation_whose_folder_was_removed_is_forgotten_with_its_jobs(
    pair: Coordinator, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; a job that writes its outcome brings back no evaluation. The work folder that is away is no removal."""
    work = pair.performer.site.paths.root
    shutil.rmtree(work / BAD)
    pair.tick()
    assert list(pair.running) == [GOOD]
    (work / BAD / "outcomes").mkdir(parents=True)
    until(pair, lambda: not jobs_of(cluster, BAD) and not pair.parked[BAD].ending)
    assert jobs_of(cluster, GOOD)
    pair.forget_ended()
    assert not pair.parked
    assert caplog.text.count("its folder has been removed; forgotten") == 1
    away = work.with_name("away")
    work.rename(away)
    pair.tick()
    assert pair.parked[GOOD].until is not None
    assert jobs_of(cluster, GOOD)
    away.rename(work)
    again(pair, GOOD)
    assert list(pair.running) == [GOOD]


def test_a_cancellation_that_a_full_disk_cut_short_ends_once_there_is_room(
    disk: Path, cluster: FakeCluster
) -> None:
    """The event found room in the journal's page, and nothing that it called for did."""
    with serving(disk / "work", cluster) as coordinator:
        accept(coordinator, GOOD)
        until(coordinator, lambda: bool(jobs_of(cluster, GOOD)))
        paths = coordinator.performer.site.paths
        leave(paths, Notice(command="cancel", evaluation_id=GOOD))
        filler = fill(disk)
        for _ in range(3):
            obey(coordinator)
            coordinator.tick()
        assert coordinator.busy
        filler.unlink()

        def over() -> bool:
            obey(coordinator)
            ended = coordinator.running.get(GOOD)
            return ended is not None and ended.state.ended_at is not None

        until(coordinator, over)
        assert coordinator.running[GOOD].state.ending.cancelled == "on request"
        assert json.loads(coordinator.running[GOOD].paths.results.read_text())["failed"]
        until(
            coordinator,
            lambda: not obey(coordinator) and not list(paths.inbox.glob("*.json")),
        )


def test_while_parked_a_checkpoint_stays_pinned_and_a_cancellation_is_kept(
    disk: Path, cluster: FakeCluster
) -> None:
    """Rotation may not take what is needed again in a moment; who asked is obeyed once it is back."""
    coordinator = coordinator_on(disk / "work", cluster, redis=True)
    checkpoint = disk / "ckpt"
    checkpoint.mkdir()
    service = Service(coordinator, Config(work_dir=disk / "work"))
    with coordinator.in_charge():
        wanted = record().model_copy(update={"evaluation_id": GOOD})
        source = wanted.checkpoint.model_copy(update={"source": str(checkpoint)})
        coordinator.accept(wanted.model_copy(update={"checkpoint": source}))
        service.tick()
        assert pinned(checkpoint)
        no_room_for_an_event(coordinator.running[GOOD].paths.journal)
        filler = fill(disk)
        until(coordinator, lambda: GOOD not in coordinator.running)
        service._throttle = Throttle()
        service.tick()
        assert pinned(checkpoint)
        filler.unlink()
        leave(coordinator.performer.site.paths, Notice(command="cancel", evaluation_id=GOOD))
        service._throttle = Throttle()
        service.tick()
        until(coordinator, lambda: GOOD in coordinator.running)
        service._throttle = Throttle()
        service.tick()
        assert coordinator.running[GOOD].state.ending.cancelled == "on request"
    coordinator.keeper.stop()


def cancelled(work: Path, cluster: FakeCluster) -> Coordinator:
    """A coordinator, stopped, whose evaluation was cancelled and has ended."""
    with serving(work, cluster) as before:
        accept(before, GOOD)
        before.cancel(GOOD, "asked")
        until(before, lambda: before.running[GOOD].state.ended_at is not None)
        before.forget_ended()
    return before


def test_what_was_cancelled_is_resumed_though_its_files_are_in_use_at_first(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    """Another process archives it when the same evaluation is asked for again: it is parked, then it goes on."""
    work = tmp_path / "work"
    cancelled(work, cluster)
    archiver = ExitStack()
    archiver.enter_context(alone(work / GOOD / "journal.jsonl"))
    with serving(work, cluster) as coordinator:

        def watch() -> bool:
            archiver.close()
            if GOOD in coordinator.parked:
                coordinator.parked[GOOD].until = 0.0
            return GOOD in coordinator.running and coordinator.running[GOOD].state.ending.retried

        assert drive(coordinator, record().model_copy(update={"evaluation_id": GOOD}), watch).ending.retried


def test_a_coordinator_keeps_the_summaries_of_what_it_runs(pair: Coordinator) -> None:
    """From the first turn on, and once more at the end, with the length of its journal."""
    paths = [pair.running[name].paths for name in (GOOD, BAD)]
    assert all(read_file(str(each.root)) is not None for each in paths)
    pair.cancel(GOOD, "asked")
    until(pair, lambda: pair.running[GOOD].state.ended_at is not None)
    over = read_file(str(paths[0].root))
    assert over is not None
    assert (over.cancelled, over.result, over.journal_bytes) == (
        "asked",
        "cancelled",
        paths[0].journal.stat().st_size,
    )


def test_of_what_has_ended_no_journal_is_read(tmp_path: Path, cluster: FakeCluster) -> None:
    """Neither by a daemon that starts nor by `status`; one whose summary was lost is read once."""
    work = tmp_path / "work"
    before = cancelled(work, cluster)
    paths = EvaluationPaths(work / GOOD)
    row, over = json_of(shown(before)[GOOD], work, 0.0), ended(paths)
    assert over is not None
    paths.status.unlink()
    assert json_of(shown(before)[GOOD], work, 0.0) == row
    coordinator = coordinator_on(work, cluster, redis=True)
    coordinator.resume_all()
    assert not coordinator.running
    assert over.like(ended(paths))
    paths.journal.write_bytes(b"x" * paths.journal.stat().st_size)
    coordinator.resume_all()
    assert not coordinator.parked
    assert shown(before)[GOOD].stage == "cancelled"
    with paths.journal.open("ab") as journal:
        journal.write(b"x")
    assert read_summary(paths) is None, "it was gone on with"


def test_a_copy_of_an_evaluations_folder_is_no_second_one(tmp_path: Path, cluster: FakeCluster) -> None:
    """A backup beside it, say: passed over, by `status` too; nothing is done twice and no job of the first ends."""
    work = tmp_path / "work"
    with serving(work, cluster) as before:
        accept(before, GOOD)
        until(before, lambda: bool(jobs_of(cluster, GOOD)))
    shutil.copytree(work / GOOD, work / "backup-00000001")
    with serving(work, cluster) as coordinator:
        coordinator.resume_all()
        for _ in range(5):
            coordinator.tick()
        assert list(coordinator.running) == [GOOD]
        assert not coordinator.parked
        assert jobs_of(cluster, GOOD)
        assert list(shown(coordinator)) == [GOOD]


@pytest.mark.parametrize("seconds", ["NaN", "1e999", "-Infinity"])
def test_an_outcome_that_no_journal_can_hold_is_passed_over_by_name(
    pair: Coordinator, seconds: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its evaluation goes on, and the next coordinator reads its journal."""
    paths = EvaluationPaths(pair.running[BAD].paths.root)
    told = (
        f'{{"kind": "built", "name": "x", "entry": 0, "batch_size": 8, "sets": {{}}, "seconds": {seconds}}}'
    )
    paths.outcome("built", "x").write_text(told)
    pair.tick()
    assert "x.built.json is no outcome of this version" in caplog.text
    assert set(pair.running) == {GOOD, BAD}
    pair.running.pop(BAD).journal.close()
    assert pair.accept(record().model_copy(update={"evaluation_id": BAD})).state.jobs.live
