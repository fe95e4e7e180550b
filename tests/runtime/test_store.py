"""The journal, a coordinator and commands: whatever a crash or a full disk leaves, what was acknowledged is there and nothing
else is. Root mounts the disk; elsewhere its tests are skipped."""

import errno
import fcntl
import itertools
import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.daemons import obey
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record
from support.with_root import fill, no_room_for_an_event, small_disk

from coordinator.base.clock import Throttle
from coordinator.base.disk_space import FREE_SPACE_ADVICE
from coordinator.decide.evaluation.events import CancelAsked, OutcomeSeen, Restarted, ResultsWritten
from coordinator.errors import OperatorError, RetryError, TakenOverError
from coordinator.hook import pinned
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.interface import cli
from coordinator.runtime import registry, work_lock
from coordinator.runtime.journal import Journal, UnreadableEventError, read_events
from coordinator.runtime.service import Service
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

EVENTS = [CancelAsked(at=float(i), reason="grün " * i) for i in range(4)]


@pytest.fixture
def path(tmp_path):
    """A journal of EVENTS. Its age is the coordinator's time, not that of the file server's clock."""
    journal = Journal(tmp_path / "journal")
    journal.append(EVENTS)
    journal.close()
    assert journal.path.stat().st_mtime == EVENTS[-1].at
    return journal.path


def test_a_tail_torn_at_any_byte_is_cut_and_the_rest_stays(path):
    """For every length that a crash can leave: whole events are read, the torn one is gone, appending goes on. A plan's event
    is megabytes long: its torn beginning is found across blocks.
    """
    data = path.read_bytes()
    for torn in (*(data[:length] for length in range(len(data) + 1)), data + b"x" * 200_000):
        path.write_bytes(torn)
        whole = EVENTS[: torn.count(b"\n")]
        assert list(read_events(path)) == whole, "a reader beside the writer sees whole events only"
        journal = Journal(path)
        assert list(journal.replay()) == whole
        journal.append([ResultsWritten(at=9.0)])
        assert list(journal.replay()) == [*whole, ResultsWritten(at=9.0)]
        journal.close()


def test_what_could_not_be_read_back_is_not_written_and_a_line_that_is_no_event_is_named(path):
    """JSON has no NaN: what stood there would come back as null, and no later start could read the journal. To go on past a
    line that is no event would be to forget.
    """
    data = path.read_bytes()
    journal = Journal(path)
    hostile = ResultsWritten.model_construct(at=float("nan"))
    with pytest.raises(UnreadableEventError, match="results-written"):
        journal.append([ResultsWritten(at=9.0), hostile])
    journal.close()
    assert path.read_bytes() == data
    first, second, *_ = data.splitlines(keepends=True)
    path.write_bytes(first + b'{"kind": "from-the-future"}\n' + second)
    with pytest.raises(OperatorError, match="journal:2 "):
        list(read_events(path))


def test_on_a_full_disk_an_append_leaves_nothing_and_works_again_later(tmp_path):
    """All of a batch of events or none: half of it would be acted upon without the rest."""
    with small_disk(tmp_path / "small", "64k") as disk:
        journal = Journal(disk / "journal")
        journal.append(EVENTS)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (1 << 15))
        batch = [CancelAsked(at=1.0, reason="r" * 3000) for _ in range(20)]
        with pytest.raises(OSError, match="No space"):
            journal.append(batch)
        assert list(journal.replay()) == EVENTS
        filler.unlink()
        journal.append(batch[:3])
        assert list(journal.replay()) == [*EVENTS, *batch[:3]]
        journal.close()


def test_a_look_at_the_lock_is_taken_for_no_owner(tmp_path, monkeypatch):
    """One that asks hears nothing of another that asks, and an owner waits until it has its answer."""
    monkeypatch.setattr(work_lock, "ASKING_SECONDS", 60.0)
    lock = WorkLock(tmp_path / "daemon.lock")
    lock.path.touch()
    with lock.path.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not lock.held()
        owner = threading.Thread(target=lock.acquire)
        owner.start()
    owner.join()
    assert lock.held()
    lock.release()


# --- two coordinators whose locks do not see each other ------------------------------------------------------------------


def blinded(lock):
    """Free the flock of a lock that is held, as where each host locks by itself."""
    fcntl.flock(lock._fd, fcntl.LOCK_UN)


@pytest.mark.parametrize("at", range(1, 4 * len(EVENTS) + 1))
def test_who_takes_over_knows_all_that_was_acted_upon_and_nothing_that_is_written_later(tmp_path, at):
    """Wherever the first one stands still meanwhile: before, between and after its looks at the token and its write."""
    first, second = WorkLock(tmp_path / "daemon.lock"), WorkLock(tmp_path / "daemon.lock")
    first.acquire("evalspan daemon")
    path, moments, acted, seen = tmp_path / "journal", itertools.count(1), [], []

    def stands_still():
        if next(moments) == at:
            blinded(first)
            second.acquire("evalspan eval")
            others.append(Journal(path, second.check))
            others[0].renew()
            seen.extend(others[0].replay())

    def fence():
        stands_still()
        first.check()
        stands_still()

    def act_on_all():
        for event in [*EVENTS, *EVENTS]:
            journal.append([event])
            acted.append(event)

    others, journal = [], Journal(path, fence)
    said = f"{tmp_path} was taken over by evalspan eval, pid {os.getpid()} "
    with pytest.raises(TakenOverError, match=said):
        act_on_all()
    assert seen[: len(acted)] == acted
    (other,) = others
    other.append([ResultsWritten(at=9.0)])
    with pytest.raises(TakenOverError):
        journal.append([EVENTS[0]])
    assert list(read_events(path)) == [*seen, ResultsWritten(at=9.0)]
    first.show_trouble("it is late")
    second.check()
    assert second.holder_and_trouble()[0].startswith("evalspan eval, pid ")


def test_a_coordinator_that_was_taken_over_ends_and_leaves_the_other_ones_files_and_jobs(tmp_path):
    """Its evaluation, its Redis' address and its summary are the other one's, and each job runs once."""
    cluster = FakeCluster(fleet=[fake_node("n1"), fake_node("n2")])
    first, second = (coordinator_on(tmp_path, cluster, redis=True) for _ in range(2))
    with ExitStack() as mine, ExitStack() as theirs:
        mine.enter_context(first.in_charge("evalspan daemon"))
        running = first.evaluations.accept(record())
        until(first, cluster.jobs)
        blinded(first.lock)
        theirs.enter_context(second.in_charge("evalspan daemon"))
        second.evaluations.resume_all()
        with pytest.raises(TakenOverError, match="run one coordinator"):
            first.evaluations.cancel(running.state.evaluation_id, "too late")
        mine.close()
        address = WorkPaths(tmp_path).redis_address.read_bytes()
        second.keeper.ensure()
        assert WorkPaths(tmp_path).redis_address.read_bytes() == address
        for _ in range(5):
            second.tick()
        assert not of_kind(CancelAsked, running.paths.journal)
        living = [job.name for job in cluster.jobs() if job.phase != "ended"]
        assert living
        assert len(living) == len({*living})


# --- signs of a coordinator's life -----------------------------------------------------------------------------------


def begun(work):
    """A coordinator that runs an evaluation."""
    coordinator = coordinator_on(work, FakeCluster(fleet=[fake_node("n1")]))
    return coordinator, coordinator.evaluations.accept(record())


def of_kind(kind, path):
    return [event for event in read_events(path) if isinstance(event, kind)]


def test_a_coordinator_leaves_signs_by_which_the_next_one_dates_its_end(tmp_path):
    """The journal's age, not only its last event: `Restarted` keeps it, and it outlives a torn line. A time in this process is
    no absence: a parked evaluation had a coordinator.
    """
    coordinator, running = begun(tmp_path)
    path, name = running.journal.path, running.state.evaluation_id
    os.utime(path, (1.0, 1.0))
    coordinator.tick()
    assert time.time() - path.stat().st_mtime < 600, "a tick without an event"
    coordinator.evaluations._failed(running, RuntimeError("a fault"))
    coordinator.evaluations.resume(running.paths.root)
    coordinator.evaluations.running[name].journal.close()
    assert [event.seen_at for event in of_kind(Restarted, path)] == [None]
    last = [*read_events(path)][-1].at
    with path.open("ab") as file:
        file.write(b'{"kind": "torn')
    os.utime(path, (last - 5.0,) * 2)
    begun(tmp_path)[1].journal.close()
    assert of_kind(Restarted, path)[-1].seen_at == pytest.approx(last - 5.0, abs=0.01)


def test_an_outcome_is_dated_by_its_file(tmp_path):
    """It may have been there for days; a file server's clock ahead of this host's dates nothing in the future."""
    coordinator, running = begun(tmp_path)
    for name, mtime in (("a", 1000.0), ("b", time.time() + 1e6)):
        path = running.paths.outcome("failed", name)
        outcome = Failed(name=name, job="execute", blame="retry", error="it died")
        path.write_text(outcome.model_dump_json())
        os.utime(path, (mtime, mtime))
    coordinator.tick()
    seen = of_kind(OutcomeSeen, running.journal.path)
    assert [event.left_at for event in seen] == [1000.0, seen[1].at]


def test_a_journal_that_takes_no_first_event_is_closed(tmp_path, monkeypatch):
    """However often a full disk refuses an evaluation, no descriptor is left of it."""

    def full(_self, _events):
        raise OSError(errno.ENOSPC, "No space left on device")

    coordinator = coordinator_on(tmp_path, FakeCluster(fleet=[fake_node("n1")]))
    monkeypatch.setattr(Journal, "append", full)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            coordinator.evaluations.accept(record(1))
    assert len([*Path("/proc/self/fd").iterdir()]) <= before


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PARKED_SECONDS", 1.0)
    with small_disk(tmp_path, "16m") as made:
        yield made


@pytest.fixture
def cluster():
    return FakeCluster(fleet=[fake_node("n1", gpus=0, memory_mb=64_000)])  # builds only


def test_started_again_on_a_full_disk_it_waits_for_room_and_goes_on(disk, cluster, caplog):
    """Lock, lease, Redis and journals are opened as far as the disk allows. What has begun is waited for; what has not is
    refused and leaves nothing to resume. With room again all are there, Redis too.
    """
    work = WorkPaths(disk / "work")
    with serving(work.root, cluster) as before:
        begun = before.evaluations.accept(record()).state.evaluation_id
    no_room_for_an_event(before.evaluations.running[begun].paths.journal)
    filler = fill(disk)
    coordinator = coordinator_on(work.root, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.evaluations.resume_all()
        for _ in range(3):
            coordinator.tick()
        assert caplog.messages == [coordinator.evaluations.trouble], (
            "once, whatever met it: Redis, the lease, a journal"
        )
        assert coordinator.evaluations.trouble.startswith(f"the disk of {work.root} is full (0.0 MB")
        coordinator.evaluations.accept_or_wait(record())
        assert coordinator.evaluations.busy
        assert begun not in coordinator.evaluations.running
        for name in ("another", "torn"):
            with pytest.raises(OSError, match="No space left"):
                coordinator.evaluations.accept_or_wait(record().model_copy(update={"evaluation_id": name}))
            filler.unlink()
            if name == "another":
                work.evaluation("torn").root.mkdir()
                work.evaluation("torn").journal.write_bytes(b'{"kind":"accep')
                filler = fill(disk)
        until(coordinator, lambda: begun in coordinator.evaluations.running and work.redis_address.exists())
        assert list(coordinator.evaluations.running) == [begun]
        with redis_client.make_client(redis_client.read_address(work.redis_address)) as client:
            assert client.ping()
    coordinator.keeper.stop()


def test_a_command_that_a_full_disk_refuses_is_one_line_and_cancels_nothing(
    disk, cluster, monkeypatch, capsys
):
    """With the folder, the free space and what to type, no traceback; Ctrl-C of a run also says what becomes of the jobs.
    The same command resumes the evaluation once there is room.
    """
    with serving(disk / "work", cluster) as coordinator:
        name = coordinator.evaluations.accept(record()).state.evaluation_id
        no_room_for_an_event(coordinator.evaluations.running[name].paths.journal)
        filler = fill(disk)
        monkeypatch.chdir("/")  # the error's file counts, not the current folder
        monkeypatch.setattr("sys.argv", ["evalspan", "cancel", name, "--work-dir", str(disk / "work")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 3
        said = f"evalspan: the disk of {disk}/work/inbox is full (0.0 MB free): {FREE_SPACE_ADVICE}\n"
        assert capsys.readouterr().err == said
        with pytest.raises(RetryError, match=r"not cancelled, its jobs go on .*/work is full .*resumes it"):
            coordinator.interrupt(name)
        filler.unlink()
        coordinator.run(lambda: name in coordinator.evaluations.running)
        assert not coordinator.evaluations.running[name].state.ending.cancelled
        coordinator.interrupt(name)
        assert coordinator.evaluations.running[name].state.ending.cancelled


@pytest.mark.parametrize("for_the_event", [True, False], ids=["room for the event alone", "no room"])
def test_a_cancellation_on_a_full_disk_is_kept_and_ends_once_there_is_room(disk, cluster, for_the_event):
    """Also where the journal's page takes the event, and nothing that it calls for finds room. While the evaluation is
    parked its checkpoint stays pinned: rotation may not take what is needed again in a moment.
    """
    coordinator = coordinator_on(disk / "work", cluster, redis=True)
    service = Service(coordinator, Config(work_dir=disk / "work"))
    (checkpoint := disk / "ckpt").mkdir()
    spec = record().checkpoint.model_copy(update={"source": str(checkpoint)})
    with coordinator.in_charge():
        running = coordinator.evaluations.accept(record().model_copy(update={"checkpoint": spec}))
        name, inbox = running.state.evaluation_id, service.paths.inbox
        until(coordinator, lambda: any(job.phase != "ended" for job in cluster.jobs()))
        service.tick()
        assert pinned(checkpoint)
        if not for_the_event:
            no_room_for_an_event(running.paths.journal)
        leave_notice(service.paths, Notice(command="cancel", evaluation_id=name))
        filler = fill(disk)
        for _ in range(3):
            obey(coordinator)
            coordinator.tick()
        assert coordinator.evaluations.busy
        service._throttle = Throttle()
        service.tick()
        assert pinned(checkpoint)
        filler.unlink()

        def ended():
            obey(coordinator)
            return (
                name in coordinator.evaluations.running
                and coordinator.evaluations.running[name].state.ended_at is not None
            )

        until(coordinator, ended)
        assert coordinator.evaluations.running[name].state.ending.cancelled == "on request"
        assert json.loads(running.paths.results.read_text())["failed"]
        until(coordinator, lambda: not obey(coordinator) and not list(inbox.glob("*.json")))
    coordinator.keeper.stop()
