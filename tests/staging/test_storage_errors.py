"""A moment in which shared storage answers with an error changes nothing: precursors hold on, workers work on."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import pytest

from evaljobs.contract.outcomes import Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, StageSpec
from evaljobs.scoring.supervisor import Supervisor
from evaljobs.staging.coordinator_lease import CoordinatorLease
from evaljobs.staging.precursor import RELEASED, Holding, hold


class Storage:
    """A folder on storage that answers every look with an OSError (the name that a link points to is too long)."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self._there = tmp_path / "storage", tmp_path / "there"
        self._there.mkdir()
        self.path.symlink_to("x" * 300)

    def back(self) -> None:
        """It answers again."""
        fresh = self.path.with_name("fresh")
        fresh.symlink_to(self._there)
        fresh.replace(self.path)


class Looks(threading.Event):
    """A stop that is never set; the storage is back after the third look at it."""

    def __init__(self, storage: Storage, released: Path) -> None:
        super().__init__()
        self.storage, self.released, self.count = storage, released, 0

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 (threading's name)
        self.count += 1
        assert self.count < 10, "the release was not seen"
        if self.count == 3:
            self.storage.back()
            self.released.parent.mkdir(parents=True)
            self.released.touch()
        return False


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_a_precursor_holds_on_until_storage_shows_its_release(storage: Storage, tmp_path: Path) -> None:
    """Weights stay where they are while the release file cannot be looked for."""
    lease = tmp_path / "lease"
    lease.touch()
    spec = StageSpec(
        name="es-1-stage-n1-a0",
        evaluation_dir=str(storage.path),
        node="n1",
        checkpoint=CheckpointSpec(source="/c", digest="d", files=()),
        roots=(),
        lease_file=str(lease),
        lease_seconds=900.0,
    )
    staged = Staged(
        name=spec.name, node="n1", path="/c", rung="storage", bytes=0, storage_bytes=0, seconds=0.0
    )
    looks = Looks(storage, EvaluationPaths(storage.path).release_file(spec.name))
    assert hold(Holding(spec=spec, staged=staged, slot=None), looks) == RELEASED
    assert looks.count == 3


def test_workers_work_on_until_storage_shows_their_stop(storage: Storage) -> None:
    """The supervisor's look at its stop file."""
    options = argparse.Namespace(
        stop_file=storage.path / "stop",
        burst_idle=None,
        lease_file=storage.path / "lease",
        lease_seconds=900.0,
    )
    supervisor = Supervisor(options, lambda: None)
    assert not supervisor._over()
    storage.back()
    assert not supervisor._over()
    options.stop_file.touch()
    assert supervisor._over()


def test_a_lease_that_cannot_be_read_stands_still(storage: Storage) -> None:
    """An error renews nothing: a dead coordinator's lease ends in its time on storage that comes and goes."""
    lease = CoordinatorLease(storage.path / "lease", 0.0)
    assert lease.expired()
    storage.back()
    (storage.path / "lease").touch()
    assert not CoordinatorLease(storage.path / "lease", 900.0).expired()
