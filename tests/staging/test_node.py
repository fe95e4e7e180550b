"""Node-side neighbours: the probe, the clean verb, room, and how a host job shares out its GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.node_memory import ROOT, NodeMemory

from evaljobs.errors import OperatorError
from evaljobs.staging import capacity, node_probe
from evaljobs.staging.capacity import V1, V2
from evaljobs.trial import hosted_trials


def test_the_probe_measures_and_leaves_nothing(world: NodeMemory) -> None:
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


def test_a_nonce_tells_a_shared_memory_from_a_private_one(world: NodeMemory) -> None:
    """Left by one process, found once by another that sees the same root; not found elsewhere."""
    code = "import sys; from evaljobs.staging.node_probe import nonce; print(nonce(sys.argv[1], 'abc', leave=False))"

    def look() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(world.root)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    assert look() == "False"
    assert node_probe.nonce(str(world.root), "abc", leave=True)
    assert look() == "True"
    assert look() == "False"
    assert world.nothing_left()


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    """cgroup v2 limits of all levels above a process are read, page cache counted as free; no limit is none."""
    job = tmp_path / "slurm" / "job"
    job.mkdir(parents=True)
    (tmp_path / "proc").write_text("0::/slurm/job\n")
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("5\n")
    (job.parent / "memory.max").write_text("1000\n")
    (job.parent / "memory.current").write_text("900\n")
    (job.parent / "memory.stat").write_text("anon 700\ninactive_file 150\nactive_file 50\n")
    assert capacity.cgroup_limits(tmp_path / "proc", tmp_path) == [(1000, 300)]


def test_kills_for_lack_of_memory_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """In this process's own group, under either version of cgroups; the job's limit may be a level above."""
    assert capacity.short_of_memory(tmp_path / "none", tmp_path) == (0, None)
    for version, base, line in (
        (V2, tmp_path, "0::/job/task"),
        (V1, tmp_path / "memory", "4:memory:/job/task"),
    ):
        task = base / "job" / "task"
        task.mkdir(parents=True)
        (tmp_path / "proc").write_text(line + "\n")
        (task.parent / version.limit).write_text(f"{100 << 20}\n")
        (task / version.events).write_text("under_oom 0\noom_kill 2\n")
        assert capacity.short_of_memory(tmp_path / "proc", tmp_path) == (2, 100)


@given(per=st.integers(1, 8), members=st.integers(1, 8), spare=st.integers(0, 3))
def test_gpus_are_shared_out_once_each(per: int, members: int, spare: int) -> None:
    """Each trial gets its number of GPUs, none is given twice; too few are refused."""
    gpus = [str(i) for i in range(per * members + spare)]
    given_out = [g for devices in hosted_trials.share(gpus, members, per) for g in (devices or "").split(",")]
    assert given_out == gpus[: per * members]
    if per * members > 1:
        with pytest.raises(OperatorError):
            hosted_trials.share(gpus[: per * members - 1], members, per)
    assert hosted_trials.share([], 1, per) == [None]
    assert hosted_trials.share([], members, 0) == [None] * members
    if members > 1:
        with pytest.raises(OperatorError):  # each would take all of them
            hosted_trials.share([], members, per)


@pytest.mark.parametrize("name", hosted_trials.GPU_VARIABLES)
def test_gpus_of_every_vendor_are_shared_out(name: str) -> None:
    assert hosted_trials.gpus_of({name: "0,MIG-a"}) == ((name,), ("0", "MIG-a"))
    assert hosted_trials.gpus_of({}) == ((), ())


def test_where_slurm_names_gpus_for_all_vendors_each_library_sees_the_trials_own() -> None:
    """HIP's variable beats CUDA's in ROCm, and both choose from what ROCR's leaves: that one stays whole."""
    assert hosted_trials.gpus_of(dict.fromkeys(hosted_trials.GPU_VARIABLES, "0,1")) == (
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        ("0", "1"),
    )
    numbered_anew = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}
    assert hosted_trials.gpus_of(numbered_anew) == (("HIP_VISIBLE_DEVICES",), ("0", "1"))
