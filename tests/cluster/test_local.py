"""Laws of the local cluster: jobs end with their coordinator, and nothing of a job outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until

from coordinator.cluster import COORDINATOR_ENDED, ClusterError, Job, JobState, RefusedError
from coordinator.cluster.local import LocalCluster, parse_gpus

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = """
import json, os, signal, sys, time
from pathlib import Path
from coordinator.cluster import Job
from coordinator.cluster.local import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), slots=2, gpus=[])
for fields in json.loads(sys.argv[2]):
    cluster.submit(Job(**{**fields, "argv": tuple(fields["argv"])}))
while not all(Path(path).exists() for path in json.loads(sys.argv[3])):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def cluster(folder: Path, **more: object) -> LocalCluster:
    return LocalCluster(folder / "jobs", **{"slots": 2, "gpus": [], **more})  # type: ignore[arg-type]


def sh(folder: Path, name: str, script: str, **more: object) -> Job:
    fields = {"name": name, "argv": ("sh", "-c", script), "log": str(folder / f"{name}.%i"), **more}
    return Job(**fields)  # type: ignore[arg-type]


def states(local: LocalCluster) -> dict[str, JobState]:
    return {f"{s.name}.{s.index}": s for s in local.jobs()}


def killed_coordinator(folder: Path, jobs: list[Job], until: tuple[str, ...] = ()) -> None:
    """A process that submits these jobs as their coordinator, waits for these files, and dies by SIGKILL."""
    fields = [{**{f: getattr(j, f) for f in Job.__dataclass_fields__}, "env": dict(j.env)} for j in jobs]
    files = json.dumps([str(folder / name) for name in until])
    done = subprocess.run(
        [sys.executable, "-c", COORDINATOR, str(folder / "jobs"), json.dumps(fields), files],
        cwd=ROOT,
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_jobs_end_with_a_killed_coordinator(tmp_path: Path) -> None:
    """SIGKILL of the coordinator: within 10 s no process of its jobs is left, wherever it went and whatever it ignores."""
    script = f"trap '' TERM; echo $$ >> {tmp_path}/$0; while :; do sleep 0.05; done"
    nested = f"setsid sh -c '{script.replace(chr(39), chr(34))}' far & exec sleep 600"
    jobs = [
        sh(tmp_path, "deaf", "", argv=("sh", "-c", script, "deaf"), gpus=1),
        sh(tmp_path, "nest", nested, gpus=1),
        sh(tmp_path, "late", f"touch {tmp_path}/late-ran", gpus=1),
    ]
    killed_coordinator(tmp_path, jobs, until=("deaf", "far"))
    pids = [int((tmp_path / name).read_text()) for name in ("deaf", "far")]
    wait_until(lambda: all(_gone(pid) for pid in pids), "no process is left", 10)
    assert not (tmp_path / "late-ran").exists()


def test_jobs_of_an_earlier_coordinator_are_listed_as_ended_with_it(tmp_path: Path) -> None:
    """They run until their last process is gone; no job starts before; numbers are not used again."""
    script = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    killed_coordinator(
        tmp_path, [sh(tmp_path, "a", script, gpus=1), sh(tmp_path, "b", "true")], until=("ready",)
    )
    local = cluster(tmp_path)
    assert states(local)["a.0"].phase == "running"
    new = local.submit(sh(tmp_path, "c", f"touch {tmp_path}/ran", gpus=1))
    assert states(local)["c.0"].phase == "pending"
    wait_until(lambda: states(local)["c.0"].phase == "ended", "the new job ran")
    seen = states(local)
    assert (seen["a.0"].phase, seen["a.0"].state) == ("ended", COORDINATOR_ENDED)
    assert seen["b.0"].phase == "ended"
    assert len({s.job_id for s in seen.values()}) == 3
    assert seen["c.0"].job_id == new
    assert (tmp_path / "ran").exists()


def test_a_record_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    killed_coordinator(tmp_path, [sh(tmp_path, "a", "true")])
    record = tmp_path / "jobs" / "jobs.jsonl"
    record.write_text(record.read_text() + '{"job_id": "2", "na')
    assert [s.name for s in cluster(tmp_path).jobs()] == ["a"]


def test_a_command_that_asks_for_nodes_moves_no_job(tmp_path: Path) -> None:
    """A command beside the daemon starts nothing in its place, though a slot is free."""
    local = cluster(tmp_path, slots=1)
    local.submit(sh(tmp_path, "a", f"touch {tmp_path}/a-ran", gpus=1))
    local.submit(sh(tmp_path, "b", f"touch {tmp_path}/ran", gpus=1))
    wait_until((tmp_path / "a-ran").exists, "the first ran")
    assert cluster(tmp_path, slots=1).nodes()[0].gpus == 1
    assert not (tmp_path / "ran").exists()
    wait_until(lambda: states(local)["b.0"].phase == "ended", "the second is over")
    assert (tmp_path / "ran").exists()


def test_nothing_of_a_job_outlives_it(tmp_path: Path) -> None:
    """Grandchildren in sessions of their own go when the job's own process has ended."""
    script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & until [ -s {tmp_path}/pid ]; do sleep 0.02; done"
    local = cluster(tmp_path)
    local.submit(sh(tmp_path, "a", script, gpus=1))
    wait_until(lambda: states(local)["a.0"].phase == "ended", "ended")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: _gone(pid), "its grandchild is gone")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    """No caller waits for it: each look only sees whether the grace is over."""
    local = cluster(tmp_path, kill_seconds=0.2)
    job = sh(tmp_path, "a", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done", gpus=1)
    job_id = local.submit(job)
    wait_until((tmp_path / "ready").exists, "it runs")
    local.cancel([job_id])
    wait_until(lambda: states(local)["a.0"].phase == "ended", "killed")
    assert (states(local)["a.0"].state, states(local)["a.0"].reason) == ("CANCELLED", "signal 9")


def test_a_cancelled_job_that_waited_never_runs(tmp_path: Path) -> None:
    local = cluster(tmp_path, slots=1)
    first = local.submit(sh(tmp_path, "first", "exec sleep 600", gpus=1))
    second = local.submit(sh(tmp_path, "second", f"touch {tmp_path}/ran", gpus=1))
    local.cancel([second])
    assert states(local)["second.0"].state == "CANCELLED"
    local.cancel([first])
    wait_until(lambda: states(local)["first.0"].phase == "ended", "the first is over")
    assert states(local)["second.0"].state == "CANCELLED"
    assert not (tmp_path / "ran").exists()


def test_gpu_jobs_start_in_the_order_of_their_submission(tmp_path: Path) -> None:
    """A job of two slots is not starved by jobs of one; a job without GPUs does not wait for a slot."""
    local = cluster(tmp_path)
    one = local.submit(sh(tmp_path, "one", "exec sleep 600", gpus=1))
    local.submit(sh(tmp_path, "two", "exec sleep 600", gpus=2))
    local.submit(sh(tmp_path, "three", "exec sleep 600", gpus=1))
    local.submit(sh(tmp_path, "side", "exec sleep 600"))
    assert {n: s.phase for n, s in states(local).items()} == {
        "one.0": "running",
        "two.0": "pending",
        "three.0": "pending",
        "side.0": "running",
    }
    local.cancel([one])
    wait_until(lambda: states(local)["two.0"].phase == "running", "two slots free")
    assert states(local)["three.0"].phase == "pending"
    local.cancel([s.job_id for s in local.jobs()])
    wait_until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")


def test_the_end_says_how(tmp_path: Path) -> None:
    """Of a job past its time limit, too; the member's index is put into the log's file name alone."""
    folder = tmp_path / "100%in 'quotes' $HOME"
    local = cluster(folder)
    local.submit(sh(tmp_path, "long", "exec sleep 600", gpus=1, time_limit_seconds=0))
    local.submit(sh(folder / "%i", "two", "echo $EVALSPAN_INDEX", count=2))
    local.submit(sh(tmp_path, "good", "true"))
    local.submit(sh(tmp_path, "bad", "exit 3"))
    local.submit(sh(tmp_path, "shot", "kill -9 $$"))
    local.submit(sh(tmp_path, "none", "", argv=("/no/such/program",)))
    wait_until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")
    assert {n: (s.state, s.reason) for n, s in states(local).items()} == {
        "good.0": ("COMPLETED", ""),
        "bad.0": ("FAILED", "exit code 3"),
        "shot.0": ("FAILED", "signal 9"),
        "none.0": ("FAILED", "exit code 127"),
        "long.0": ("TIMEOUT", "signal 15"),
        "two.0": ("COMPLETED", ""),
        "two.1": ("COMPLETED", ""),
    }
    assert [(folder / "%i" / f"two.{i}").read_text() for i in (0, 1)] == ["0\n", "1\n"]


def test_a_slot_has_its_gpu_and_a_job_without_slots_sees_none(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path / "jobs", gpus=["0, NVIDIA X", "3, NVIDIA X"])
    for name, gpus in (("a", 1), ("b", 1), ("side", 0)):
        local.submit(
            sh(
                tmp_path,
                name,
                f"echo [$CUDA_VISIBLE_DEVICES]; until [ -e {tmp_path}/gate ]; do sleep 0.02; done",
                gpus=gpus,
            )
        )
    node = local.nodes()[0]
    assert (node.gpus, node.gpus_free, node.gpu_type) == (2, 0, "NVIDIA X")
    (tmp_path / "gate").touch()
    wait_until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")
    logs = {name: (tmp_path / f"{name}.0").read_text() for name in ("a", "b", "side")}
    assert logs == {"a": "[0]\n", "b": "[3]\n", "side": "[]\n"}
    with pytest.raises(RefusedError):
        LocalCluster(tmp_path / "jobs", gpus=["0, NVIDIA X"], slots=2)


def test_only_the_gpus_left_to_us_are_counted() -> None:
    text = "GPU 0: NVIDIA A (UUID: GPU-aa)\nGPU 1: NVIDIA B (UUID: GPU-bb)\n"
    assert parse_gpus(text, None) == ("0, NVIDIA A", "1, NVIDIA B")
    assert parse_gpus(text, "1") == ("1, NVIDIA B",)
    assert parse_gpus(text, "GPU-aa") == ("0, NVIDIA A",)
    assert parse_gpus(text, "") == ()


def test_the_slices_of_a_gpu_stand_in_its_place() -> None:
    """A process sees one slice (MIG) at most, and names it by its UUID."""
    text = (
        "GPU 0: NVIDIA A (UUID: GPU-aa)\n"
        "  MIG 1g.5gb      Device  0: (UUID: MIG-1)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-2)\n"
        "GPU 1: NVIDIA A (UUID: GPU-bb)\n"
    )
    slices = ("MIG-1, NVIDIA A MIG 1g.5gb", "MIG-2, NVIDIA A MIG 3g.20gb")
    assert parse_gpus(text, None) == (*slices, "1, NVIDIA A")
    assert parse_gpus(text, "0") == slices
    assert parse_gpus(text, "MIG-2") == slices[1:]
    assert parse_gpus(text, "GPU-bb,MIG-1") == (slices[0], "1, NVIDIA A")


def test_a_state_folder_that_cannot_be_written_is_a_cluster_error(tmp_path: Path) -> None:
    """And the job that could not be put on record did not start."""
    local = cluster(tmp_path)
    (tmp_path / "jobs").write_text("")
    with pytest.raises(ClusterError):
        local.submit(sh(tmp_path, "a", f"touch {tmp_path}/ran"))
    assert not (tmp_path / "ran").exists()
