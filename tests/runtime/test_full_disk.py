"""A coordinator and commands on a work folder whose disk is full. Root mounts the disk; elsewhere they are skipped."""

from __future__ import annotations

import errno
import json
from contextlib import suppress

import pytest
from support.daemons import obey
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record
from support.with_root import fill, no_room_for_an_event, small_disk

from coordinator import cli
from coordinator.base.disk_space import RESUMES, shortage
from coordinator.base.throttle import Throttle
from coordinator.config.schema import Config
from coordinator.errors import OperatorError, RetryError
from coordinator.hook import pinned
from coordinator.intake import work_folder
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime import registry
from coordinator.runtime.drive import _cancel
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


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
        begun = before.accept(record()).state.evaluation_id
    no_room_for_an_event(before.running[begun].paths.journal)
    filler = fill(disk)
    coordinator = coordinator_on(work.root, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.resume_all()
        for _ in range(3):
            coordinator.tick()
        assert caplog.messages == [coordinator.trouble], "once, whatever met it: Redis, the lease, a journal"
        assert coordinator.trouble.startswith(f"the disk of {work.root} is full (0.0 MB")
        coordinator.accept_or_wait(record())
        assert coordinator.busy
        assert begun not in coordinator.running
        for name in ("another", "torn"):
            with pytest.raises(OSError, match="No space left"):
                coordinator.accept_or_wait(record().model_copy(update={"evaluation_id": name}))
            filler.unlink()
            if name == "another":
                work.evaluation("torn").root.mkdir()
                work.evaluation("torn").journal.write_bytes(b'{"kind":"accep')
                filler = fill(disk)
        until(coordinator, lambda: begun in coordinator.running and work.redis_address.exists())
        assert list(coordinator.running) == [begun]
        with redis_client.connect(work.redis_address) as client:
            assert client.ping()
    coordinator.keeper.stop()


def test_a_command_that_a_full_disk_refuses_is_one_line_and_cancels_nothing(
    disk, cluster, monkeypatch, capsys
):
    """With the folder, the free space and what to type, no traceback; Ctrl-C of a run also says what becomes of the jobs.
    The same command resumes the evaluation once there is room.
    """
    with serving(disk / "work", cluster) as coordinator:
        name = coordinator.accept(record()).state.evaluation_id
        no_room_for_an_event(coordinator.running[name].paths.journal)
        filler = fill(disk)
        monkeypatch.chdir("/")  # the error's file counts, not the current folder
        monkeypatch.setattr("sys.argv", ["evalspan", "cancel", name, "--work-dir", str(disk / "work")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 3
        said = f"evalspan: the disk of {disk}/work/inbox is full (0.0 MB free): {RESUMES}\n"
        assert capsys.readouterr().err == said
        with pytest.raises(RetryError, match=r"not cancelled, its jobs go on .*/work is full .*resumes it"):
            _cancel(coordinator, name)
        filler.unlink()
        coordinator.run(lambda: name in coordinator.running)
        assert not coordinator.running[name].state.ending.cancelled
        _cancel(coordinator, name)
        assert coordinator.running[name].state.ending.cancelled


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
        running = coordinator.accept(record().model_copy(update={"checkpoint": spec}))
        name, inbox = running.state.evaluation_id, service.paths.inbox
        until(coordinator, lambda: any(job.phase != "ended" for job in cluster.jobs()))
        service.tick()
        assert pinned(checkpoint)
        if not for_the_event:
            no_room_for_an_event(running.paths.journal)
        leave(service.paths, Notice(command="cancel", evaluation_id=name))
        filler = fill(disk)
        for _ in range(3):
            obey(coordinator)
            coordinator.tick()
        assert coordinator.busy
        service._throttle = Throttle()
        service.tick()
        assert pinned(checkpoint)
        filler.unlink()

        def ended():
            obey(coordinator)
            return name in coordinator.running and coordinator.running[name].state.ended_at is not None

        until(coordinator, ended)
        assert coordinator.running[name].state.ending.cancelled == "on request"
        assert json.loads(running.paths.results.read_text())["failed"]
        until(coordinator, lambda: not obey(coordinator) and not list(inbox.glob("*.json")))
    coordinator.keeper.stop()


def test_a_used_up_quota_is_named_like_a_full_disk(tmp_path):
    """Wherever in the chain of causes; any other error is no shortage."""
    quota = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "a" / "b"))
    assert shortage(quota, tmp_path).startswith(f"your disk quota for {tmp_path} is used up (")
    wrapped = RetryError("Redis does not start")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert shortage(wrapped, tmp_path).startswith(f"the disk of {tmp_path} is full (")
    assert shortage(OSError(errno.EIO, "Input/output error"), tmp_path) == ""


def test_a_folder_that_never_served_and_has_no_room_is_refused(disk):
    """In one line, at once; one that has served before is waited for. What is used up here: the files that there may be."""
    lock = WorkPaths(disk / "old").lock
    lock.parent.mkdir(parents=True)
    lock.touch()
    with suppress(OSError):
        for number in range(10_000):
            (disk / str(number)).touch()
    with pytest.raises(OperatorError, match=r"and 0 files free.*--work-dir"):
        work_folder.load(None, disk / "new")
    assert work_folder.load(None, disk / "old").work_dir == disk / "old"
