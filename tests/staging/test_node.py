"""Node-side neighbours: the probe, room, GPUs of a host job, engines' shared memory, and storage that answers with errors."""

import argparse
import ctypes
import json
import os
import secrets
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.node_memory import ROOT

from evaljobs.contract.outcomes import Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, StageSpec
from evaljobs.errors import OperatorError
from evaljobs.scoring.worker import MUTE_RENEWALS, Supervisor
from evaljobs.staging import capacity, node_probe, precursor, segments, store
from evaljobs.staging.capacity import V1, V2
from evaljobs.staging.coordinator_lease import CoordinatorLease
from evaljobs.staging.precursor import RELEASED_REASON, StagedCheckpoint, hold_weights
from evaljobs.trial import hosted_trials


def test_the_probe_measures_and_leaves_nothing(world):
    """One JSON object: what the root is, whether it can be used, rates of a real sample; nothing stays."""
    record = node_probe.probe_node([str(world.root), "/nowhere"], sample_mb=16)
    here, nowhere = record["roots"]
    assert (here["fs"], here["rung"], here["usable"]) == ("tmpfs", "shm", True)
    assert here["sample"] == 16 << 20
    assert here["write_rate"] > 0
    assert here["read_rate"] > 0
    assert nowhere["usable"] is False
    assert "/nowhere" in nowhere["why"]
    assert json.loads(json.dumps(record)) == record
    assert world.nothing_left()


def test_a_nonce_tells_a_shared_memory_from_a_private_one(world):
    """Left by one process, found once by another that sees the same root; not found elsewhere."""
    code = "import sys; from evaljobs.staging.node_probe import exchange_nonce; print(exchange_nonce(sys.argv[1], 'abc', leave=False))"
    look = [sys.executable, "-c", code, str(world.root)]
    assert subprocess.check_output(look, cwd=ROOT) == b"False\n"
    assert node_probe.exchange_nonce(str(world.root), "abc", leave=True)
    assert [subprocess.check_output(look, cwd=ROOT) for _ in range(2)] == [b"True\n", b"False\n"]
    assert world.nothing_left()


def test_the_tightest_limit_counts_and_kills_are_the_kernels_count(tmp_path):
    """cgroup limits of all levels above a process are read, under either version; page cache counts as free, no limit as none."""
    assert capacity.short_of_memory(tmp_path / "none", tmp_path) == (0, None)
    for version, base, line in (
        (V2, tmp_path, "0::/job/task"),
        (V1, tmp_path / "memory", "4:memory:/job/task"),
    ):
        task = base / "job" / "task"
        task.mkdir(parents=True)
        (tmp_path / "proc").write_text(line + "\n")
        files = {
            task / version.limit: "max",
            task / version.usage: "5",
            task / version.events: "under_oom 0\noom_kill 2",
            task.parent / version.limit: f"{100 << 20}",
            task.parent / version.usage: f"{90 << 20}",
            task.parent / "memory.stat": "anon 700\ninactive_file 150\nactive_file 50",
        }
        for file, text in files.items():
            file.write_text(text + "\n")
        assert capacity.cgroup_limits(tmp_path / "proc", tmp_path) == [(100 << 20, (10 << 20) + 200)]
        assert capacity.short_of_memory(tmp_path / "proc", tmp_path) == (2, 100)


@given(per=st.integers(1, 8), members=st.integers(1, 8), spare=st.integers(0, 3))
def test_gpus_are_shared_out_once_each(per, members, spare):
    """Each trial gets its number of GPUs, none is given twice; too few are refused."""
    gpus = [str(i) for i in range(per * members + spare)]
    given_out = [
        g for devices in hosted_trials.share_gpus(gpus, members, per) for g in (devices or "").split(",")
    ]
    assert given_out == gpus[: per * members]
    if per * members > 1:
        with pytest.raises(OperatorError):
            hosted_trials.share_gpus(gpus[: per * members - 1], members, per)
    assert hosted_trials.share_gpus([], 1, per) == [None]
    assert hosted_trials.share_gpus([], members, 0) == [None] * members
    if members > 1:
        with pytest.raises(OperatorError):  # each would take all of them
            hosted_trials.share_gpus([], members, per)


@pytest.mark.parametrize(
    ("environment", "theirs"),
    [
        *(({name: "0,MIG-a"}, ((name,), ("0", "MIG-a"))) for name in hosted_trials.GPU_VARIABLES),
        ({}, ((), ())),
        (
            dict.fromkeys(hosted_trials.GPU_VARIABLES, "0,1"),
            (("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), ("0", "1")),
        ),
        (  # numbered anew
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},
            (("HIP_VISIBLE_DEVICES",), ("0", "1")),
        ),
    ],
    ids=str,
)
def test_where_slurm_names_gpus_for_all_vendors_each_library_sees_the_trials_own(environment, theirs):
    """HIP's variable beats CUDA's in ROCm, and both choose from what ROCR's leaves: that one stays whole."""
    assert hosted_trials.gpus_of(environment) == theirs


# --- shared memory of engines' processes: what is ours and in no process is swept, all else stays ---------------------


@pytest.fixture
def dead():
    """A segment with PREFIX that no process has mapped."""
    place = segments.FOLDER / f"{segments.PREFIX}{secrets.token_hex(4)}"
    place.write_bytes(b"\0" * 4096)
    yield place
    place.unlink(missing_ok=True)


def test_segments_are_ours_by_name_within_the_context_alone_and_those_in_use_stay(dead):
    """A name that is gone already is removed without an error: its maker, a library, does so after the trial has."""
    with segments.named_segments():
        used = shared_memory.SharedMemory(create=True, size=1)
    foreign = shared_memory.SharedMemory(create=True, size=1)
    try:
        assert [s.name.startswith(segments.PREFIX) for s in (used, foreign)] == [True, False]
        segments.sweep_segments()
        assert [(segments.FOLDER / s.name).exists() for s in (used, foreign)] == [True, True]
        assert not dead.exists()
        assert segments.unlink_mapped() >= 1
        assert [(segments.FOLDER / s.name).exists() for s in (used, foreign)] == [False, True]
    finally:
        for segment in (used, foreign):
            segment.close()
            segment.unlink()


def test_a_semaphore_counts_as_mapped_though_it_was_made_under_another_name():
    libc, name = ctypes.CDLL(None, use_errno=True), f"{segments.PREFIX}{secrets.token_hex(4)}"
    libc.sem_open.restype = ctypes.c_void_p
    assert libc.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    try:
        assert f"sem.{name}" in segments.mapped_files([os.getpid()])
    finally:
        libc.sem_unlink(f"/{name}".encode())


def holding(folder, lease):
    """A precursor whose trials read from storage."""
    checkpoint = CheckpointSpec(source="/c", digest="d", files=())
    names = {"name": "stage", "node": "n1"}
    spec = StageSpec(**names, evaluation_dir=str(folder), checkpoint=checkpoint, lease_file=str(lease))
    staged = Staged(**names, path="/c", rung="storage", bytes=0, storage_bytes=0, seconds=0.0)
    return StagedCheckpoint(spec=spec, staged=staged, slot=None)


@pytest.mark.parametrize("who", ["a precursor that clears", "clean"])
def test_segments_of_the_dead_are_swept(who, dead, tmp_path):
    if who == "clean":
        assert store.clean_main(["--root", str(tmp_path)]) == 0
    else:
        precursor.clear_weights(holding(tmp_path, tmp_path / "lease"), "released")
    assert not dead.exists()


# --- a moment in which shared storage answers with an error changes nothing ---------------------------------------


class Storage:
    """A folder on storage that answers every look with an OSError (the name that a link points to is too long)."""

    def __init__(self, tmp_path):
        self.path, self._there = tmp_path / "storage", tmp_path / "there"
        self._there.mkdir()
        self.path.symlink_to("x" * 300)

    def back(self):
        """It answers again."""
        fresh = self.path.with_name("fresh")
        fresh.symlink_to(self._there)
        fresh.replace(self.path)


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path)


def test_an_error_of_storage_is_no_release_of_weights_and_no_stop_of_workers(storage, tmp_path):
    """A precursor holds on, and workers work on, until storage shows the file that ends them."""
    held, stop = holding(storage.path, tmp_path / "lease"), threading.Event()
    lease, release = Path(held.spec.lease_file), EvaluationPaths(storage.path).release_file(held.spec.name)
    supervisor = Supervisor(argparse.Namespace(stop_file=release, lease_file=lease, lease_seconds=900.0))
    lease.touch()
    stop.set()
    assert (hold_weights(held, stop), supervisor._over()) == ("terminated", False)
    storage.back()
    release.parent.mkdir(parents=True)
    assert (hold_weights(held, stop), supervisor._over()) == ("terminated", False)
    release.touch()
    assert (hold_weights(held, stop), supervisor._over()) == (RELEASED_REASON, True)


def test_workers_that_do_not_reach_the_redis_of_a_living_coordinator_end_and_say_so(tmp_path, caplog):
    """Their job is none of this host's: without a coordinator they wait, however long, and by its life they know."""
    lease = tmp_path / "lease"
    lease.touch()
    options = argparse.Namespace(
        stop_file=None, lease_file=lease, lease_seconds=900.0, redis_file=tmp_path / "address", queue="e"
    )
    supervisor = Supervisor(options)
    for look in range(1, 10):
        supervisor._look(float(10 * look))
        assert not supervisor._over()
    for renewal in range(1, MUTE_RENEWALS + 1):
        os.utime(lease, (renewal, renewal))
        supervisor._look(float(100 + 10 * renewal))
        assert supervisor._over() == (renewal == MUTE_RENEWALS)
    assert supervisor.status == 1
    assert "cannot reach Redis" in caplog.text


def test_a_lease_that_cannot_be_read_stands_still(storage):
    """An error renews nothing: a dead coordinator's lease ends in its time on storage that comes and goes."""
    lease = CoordinatorLease(storage.path / "lease", 0.0)
    assert lease.expired()
    storage.back()
    (storage.path / "lease").touch()
    assert not CoordinatorLease(storage.path / "lease", 900.0).expired()


def test_a_lease_that_goes_and_comes_back_unchanged_stands_still(tmp_path, monkeypatch):
    """A dead coordinator's folder may be moved and put back: that is no sign of life."""
    now, file = 0.0, tmp_path / "lease"
    monkeypatch.setattr("time.monotonic", lambda: now)
    file.touch()
    lease, gone = CoordinatorLease(file, 10.0), file.with_name("gone")
    for at, act in ((8.0, lambda: file.rename(gone)), (9.0, lambda: gone.rename(file)), (11.0, lambda: None)):
        assert not lease.expired()
        now = at
        act()
    assert lease.expired()
