"""A coordinator that is started again while its work folder's disk is full. Root mounts the disk; elsewhere it is skipped."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on, serving
from support.simulated.parts import record
from support.with_root import fill, no_room_for_an_event

from coordinator import cli
from coordinator.base.disk_space import RESUMES, shortage
from coordinator.errors import OperatorError, RetryError
from coordinator.intake import work_folder
from coordinator.runtime.drive import _cancel
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


def test_started_again_on_a_full_disk_it_waits_for_room_and_goes_on(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lock, lease, Redis and journals are opened as far as the disk allows; with room again all are there, Redis too."""
    work = disk / "work"
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    with serving(work, cluster) as before:
        accepted = before.accept(record()).state.evaluation_id
    filler = fill(disk)
    coordinator = coordinator_on(work, cluster, redis=True)
    address = WorkPaths(work).redis_address
    with coordinator.in_charge():
        coordinator.resume_all()
        for _ in range(3):
            coordinator.tick()
        assert coordinator.busy
        assert caplog.messages == [coordinator.trouble], "once, whatever met it: Redis, the lease, a journal"
        assert coordinator.trouble.startswith(f"the disk of {work} is full (0.0 MB")
        filler.unlink()
        end = time.monotonic() + 60
        while accepted not in coordinator.running or not address.exists():
            assert time.monotonic() < end, coordinator.trouble
            coordinator.tick()
            time.sleep(0.05)
        with redis_client.connect(address) as client:
            assert client.ping()
    coordinator.keeper.stop()


def test_an_evaluation_asked_for_again_on_a_full_disk_is_resumed_once_there_is_room(disk: Path) -> None:
    """One that has begun is waited for; one that has not is refused, and leaves nothing to resume."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    with serving(disk / "work", cluster) as before:
        accepted = before.accept(record()).state.evaluation_id
    journal = before.running[accepted].paths.journal
    no_room_for_an_event(journal)
    filler = fill(disk)
    with serving(disk / "work", cluster) as coordinator:
        coordinator.accept_or_wait(record())
        assert coordinator.busy
        assert accepted not in coordinator.running
        with pytest.raises(OSError, match="No space left"):
            coordinator.accept_or_wait(record().model_copy(update={"evaluation_id": "another"}))
        filler.unlink()
        torn = coordinator.performer.site.paths.evaluation("torn").journal
        torn.parent.mkdir()
        torn.write_bytes(b'{"kind":"accep')
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            coordinator.accept_or_wait(record().model_copy(update={"evaluation_id": "torn"}))
        filler.unlink()
        coordinator.run(lambda: accepted in coordinator.running)
        assert list(coordinator.running) == [accepted]


def test_a_cancel_that_a_full_disk_refuses_ends_the_command_and_says_what_becomes_of_the_jobs(
    disk: Path,
) -> None:
    """In one line with the folder, and nothing is cancelled: the same command resumes it once there is room."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    with serving(disk / "work", cluster) as coordinator:
        accepted = coordinator.accept(record()).state.evaluation_id
        no_room_for_an_event(coordinator.running[accepted].paths.journal)
        filler = fill(disk)
        with pytest.raises(
            RetryError, match=r"is not cancelled, its jobs go on .*/work is full .*resumes it"
        ):
            _cancel(coordinator, accepted)
        filler.unlink()
        coordinator.run(lambda: accepted in coordinator.running)
        assert not coordinator.running[accepted].state.ending.cancelled
        _cancel(coordinator, accepted)
        assert coordinator.running[accepted].state.ending.cancelled


def test_a_command_that_a_full_disk_refuses_is_one_line(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the folder, the free space and what to type; no traceback."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    with serving(disk / "work", cluster) as coordinator:
        accepted = coordinator.accept(record()).state.evaluation_id
        fill(disk)
        monkeypatch.chdir("/")  # the error's file counts, not the current folder
        monkeypatch.setattr("sys.argv", ["evalspan", "cancel", accepted, "--work-dir", str(disk / "work")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert said == f"evalspan: the disk of {disk}/work/inbox is full (0.0 MB free): {RESUMES}\n"


def test_a_used_up_quota_is_named_like_a_full_disk(tmp_path: Path) -> None:
    """Wherever in the chain of causes; any other error is no shortage."""
    quota = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "a" / "b"))
    assert shortage(quota, tmp_path).startswith(f"your disk quota for {tmp_path} is used up (")
    wrapped = RetryError("Redis does not start")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert shortage(wrapped, tmp_path).startswith(f"the disk of {tmp_path} is full (")
    assert shortage(OSError(errno.EIO, "Input/output error"), tmp_path) == ""


def test_a_folder_that_never_served_and_has_no_room_is_refused(disk: Path) -> None:
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
