"""The journal: whatever a crash or a full disk leaves of it, what was acknowledged is there and nothing else is."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.parts import record
from support.with_root import small_disk

from coordinator.errors import OperatorError
from coordinator.evaluation.events import CancelAsked, OutcomeSeen, Restarted, ResultsWritten
from coordinator.runtime import work_lock
from coordinator.runtime.journal import Journal, UnreadableEventError, read_events
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.outcomes import Failed

EVENTS = [CancelAsked(at=float(i), reason="grün " * i) for i in range(4)]


def written(path: Path) -> bytes:
    journal = Journal(path)
    journal.append(EVENTS)
    journal.close()
    assert path.stat().st_mtime == EVENTS[-1].at, (
        "the coordinator's time, not that of the file server's clock"
    )
    return path.read_bytes()


def test_a_tail_torn_at_any_byte_is_cut_and_the_rest_stays(tmp_path: Path) -> None:
    """For every length that a crash can leave: whole events are read, the torn one is gone, appending goes on. A plan's event
    is megabytes long: its torn beginning is found across blocks.
    """
    data = written(tmp_path / "whole")
    path = tmp_path / "torn"
    for torn in (*(data[:length] for length in range(len(data) + 1)), data + b"x" * 200_000):
        path.write_bytes(torn)
        whole = torn.count(b"\n")
        assert len(list(read_events(path))) == whole, "a reader beside the writer sees whole events only"
        journal = Journal(path)
        assert list(journal.replay()) == EVENTS[:whole]
        journal.append([ResultsWritten(at=9.0)])
        assert list(journal.replay()) == [*EVENTS[:whole], ResultsWritten(at=9.0)]
        journal.close()


def test_an_event_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    """JSON has no NaN: what stood there would come back as null, and no later start could read the journal."""
    data = written(tmp_path / "journal")
    journal = Journal(tmp_path / "journal")
    hostile = ResultsWritten.model_construct(at=float("nan"))
    with pytest.raises(UnreadableEventError, match="results-written"):
        journal.append([ResultsWritten(at=9.0), hostile])
    journal.close()
    assert (tmp_path / "journal").read_bytes() == data


def test_a_line_that_is_no_event_stops_us_and_is_named(tmp_path: Path) -> None:
    """To go on would be to forget."""
    lines = written(tmp_path / "journal").splitlines(keepends=True)
    (tmp_path / "journal").write_bytes(lines[0] + b'{"kind": "from-the-future"}\n' + lines[1])
    with pytest.raises(OperatorError, match="journal:2 "):
        list(read_events(tmp_path / "journal"))


def test_on_a_full_disk_an_append_leaves_nothing_and_works_again_later(tmp_path: Path) -> None:
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


def test_a_look_at_the_lock_is_taken_for_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks hears nothing of another that asks, and an owner waits until it has its answer."""
    monkeypatch.setattr(work_lock, "ASKING_SECONDS", 60.0)
    lock, path = WorkLock(tmp_path / "daemon.lock"), tmp_path / "daemon.lock"
    path.touch()
    with path.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not lock.held()
        owner = threading.Thread(target=lock.acquire)
        owner.start()
    owner.join()
    assert lock.held()
    lock.release()


def test_a_coordinator_leaves_signs_by_which_the_next_one_dates_its_end(tmp_path: Path) -> None:
    """The journal's age, not only its last event: `Restarted` keeps it, and it outlives a torn line."""
    coordinator = coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")]))
    running = coordinator.accept(record())
    path = running.journal.path
    os.utime(path, (1.0, 1.0))
    coordinator.tick()
    assert time.time() - path.stat().st_mtime < 600, "a tick without an event"
    running.journal.close()
    accepted = next(iter(read_events(path)))
    with path.open("ab") as file:
        file.write(b'{"kind": "torn')
    os.utime(path, (accepted.at - 5.0,) * 2)
    coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")])).accept(record())
    restarted = [event for event in read_events(path) if isinstance(event, Restarted)]
    assert [event.seen_at for event in restarted] == [pytest.approx(accepted.at - 5.0, abs=0.01)]


def test_an_outcome_is_dated_by_its_file(tmp_path: Path) -> None:
    """It may have been there for days; a file server's clock ahead of this host's dates nothing in the future."""
    coordinator = coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")]))
    running = coordinator.accept(record())
    for name, mtime in (("a", 1000.0), ("b", time.time() + 1e6)):
        path = running.paths.outcome("failed", name)
        outcome = Failed(name=name, job="execute", blame="retry", error="it died")
        path.write_text(outcome.model_dump_json())
        os.utime(path, (mtime, mtime))
    coordinator.tick()
    seen = [event for event in read_events(running.journal.path) if isinstance(event, OutcomeSeen)]
    assert [event.left_at for event in seen] == [1000.0, seen[1].at]


def test_a_time_in_this_process_is_no_absence(tmp_path: Path) -> None:
    """A parked evaluation had a coordinator."""
    coordinator = coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")]))
    running = coordinator.accept(record())
    path = running.journal.path
    coordinator._failed(running, RuntimeError("a fault"))
    coordinator._resume(running.paths.root)
    coordinator.running[running.state.evaluation_id].journal.close()
    coordinator_on(tmp_path / "work", FakeCluster(fleet=[fake_node("n1")])).accept(record()).journal.close()
    restarted = [event for event in read_events(path) if isinstance(event, Restarted)]
    assert [event.seen_at is None for event in restarted] == [True, False]
