"""Laws of the local cluster: jobs end with their coordinator, and nothing of a job outlives it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster import procs
from dev_cluster.testing import wait_until

from coordinator.site.cluster import COORDINATOR_ENDED, ClusterError, Job, RefusedError
from coordinator.site.cluster import local as local_module
from coordinator.site.cluster.local import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = """
import json, os, signal, sys, time
from pathlib import Path
from coordinator.site.cluster import Job
from coordinator.site.cluster.local import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), slots=2, gpus=[])
for fields in json.loads(sys.argv[2]):
    cluster.submit(Job(**{**fields, "argv": tuple(fields["argv"])}))
while not all(Path(path).exists() for path in json.loads(sys.argv[3])):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def cluster(folder, **more):
    return LocalCluster(folder / "jobs", **{"slots": 2, "gpus": [], **more})


def sh(folder, name, script, **more):
    fields = {"name": name, "argv": ("sh", "-c", script, name), "log": str(folder / f"{name}.%i"), **more}
    return Job(**fields)


def states(local):
    return {f"{s.name}.{s.index}": s for s in local.jobs()}


def phases(local):
    return {name: s.phase for name, s in states(local).items()}


def wait_ended(local, *names):
    wait_until(
        lambda: all(phases(local)[n] == "ended" for n in names or phases(local)),
        f"the end of {names or 'all'}",
    )


def gone(pid_file):
    return procs.identify(int(pid_file.read_text())) is None


def test_jobs_end_with_a_killed_coordinator(tmp_path):
    """SIGKILL of the coordinator: within 10 s no process of its jobs is left, wherever it went and whatever it ignores.

    The next coordinator lists them as ended with it, also where a record was cut short. Until their last process is gone
    they run, and no job starts; numbers are not used again.
    """
    script = f"trap '' TERM; echo $$ > {tmp_path}/$0; while :; do sleep 0.05; done"
    nested = f"setsid sh -c '{script.replace(chr(39), chr(34))}' far & exec sleep 600"
    jobs = [
        sh(tmp_path, "deaf", script, gpus=1),
        sh(tmp_path, "nest", nested, gpus=1),
        sh(tmp_path, "side", "true"),
    ]
    jobs.append(sh(tmp_path, "late", f"touch {tmp_path}/late-ran", gpus=1))
    fields = [{**{f: getattr(j, f) for f in Job.__dataclass_fields__}, "env": dict(j.env)} for j in jobs]
    pids = [tmp_path / "deaf", tmp_path / "far"]
    argv = [
        sys.executable,
        "-c",
        COORDINATOR,
        str(tmp_path / "jobs"),
        json.dumps(fields),
        json.dumps([*map(str, pids)]),
    ]
    done = subprocess.run(argv, cwd=ROOT, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with (tmp_path / "jobs" / "jobs.jsonl").open("a") as record:
        record.write('{"job_id": "5", "na')
    local = cluster(tmp_path)
    local.submit(sh(tmp_path, "next", f"touch {tmp_path}/ran", gpus=1))
    assert (phases(local)["deaf.0"], phases(local)["next.0"]) == ("running", "pending")
    wait_until(lambda: all(map(gone, pids)), "no process is left", 10)
    wait_ended(local)
    seen = states(local)
    assert [s.state for s in seen.values()] == [COORDINATOR_ENDED] * 4 + ["COMPLETED"]
    assert len({s.job_id for s in seen.values()}) == len(seen) == 5
    assert (tmp_path / "ran").exists()
    assert not (tmp_path / "late-ran").exists()


def test_nothing_of_a_job_outlives_it(tmp_path):
    """Grandchildren in sessions of their own go when the job's own process has ended. One that ignores SIGTERM is killed after
    the grace, for which no caller waits: each look only sees whether it is over.
    """
    local = cluster(tmp_path, kill_seconds=0.2)
    pid = tmp_path / "pid"
    local.submit(
        sh(
            tmp_path,
            "a",
            f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & until [ -s {pid} ]; do sleep 0.02; done",
        )
    )
    deaf = local.submit(
        sh(tmp_path, "b", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done")
    )
    wait_until((tmp_path / "ready").exists, "it runs")
    local.cancel([deaf])
    wait_ended(local)
    wait_until(lambda: gone(pid), "its grandchild is gone")
    assert (states(local)["b.0"].state, states(local)["b.0"].reason) == ("CANCELLED", "signal 9")


def test_gpu_jobs_start_in_the_order_of_their_submission(tmp_path):
    """A job of two slots is not starved by jobs of one; a job without GPUs does not wait for a slot. One that was cancelled
    while it waited never runs, and a command beside the daemon, which asks for nodes, starts nothing in its place.
    """
    local = cluster(tmp_path)
    one = local.submit(sh(tmp_path, "one", "exec sleep 600", gpus=1))
    cancelled = local.submit(sh(tmp_path, "never", f"touch {tmp_path}/never-ran", gpus=2))
    pid, gate = tmp_path / "pid", tmp_path / "gate"
    local.submit(sh(tmp_path, "two", f"echo $$ > {pid}; until [ -e {gate} ]; do sleep 0.02; done", gpus=2))
    local.submit(sh(tmp_path, "three", f"touch {tmp_path}/three-ran", gpus=1))
    local.submit(sh(tmp_path, "side", "exec sleep 600"))
    local.cancel([cancelled])
    begun = {
        "one.0": "running",
        "never.0": "ended",
        "two.0": "pending",
        "three.0": "pending",
        "side.0": "running",
    }
    assert phases(local) == begun
    local.cancel([one])
    wait_until(lambda: phases(local)["two.0"] == "running", "two slots are free")
    assert phases(local)["three.0"] == "pending"
    wait_until(lambda: pid.exists() and pid.read_text(), "it runs")
    gate.touch()
    wait_until(lambda: gone(pid), "its slots are free")
    assert cluster(tmp_path).nodes()[0].gpus == 2
    assert not (tmp_path / "three-ran").exists()
    wait_ended(local, "three.0")
    local.cancel([s.job_id for s in local.jobs()])
    wait_ended(local)
    assert (tmp_path / "three-ran").exists()
    assert not (tmp_path / "never-ran").exists()
    assert states(local)["never.0"].state == "CANCELLED"


def test_ended_jobs_are_forgotten(tmp_path, monkeypatch):
    """A coordinator lives for months. A job that runs stays listed, and no id is given twice."""
    local = cluster(tmp_path)
    ended, running = (
        local.submit(sh(tmp_path, name, script)) for name, script in (("a", "true"), ("b", "exec sleep 600"))
    )
    wait_ended(local, "a.0")
    monkeypatch.setattr(local_module, "ENDED_SECONDS", 0.0)
    assert [s.job_id for s in local.jobs()] == [running]
    file = tmp_path / "jobs" / "jobs.jsonl"
    old = json.loads(file.read_text().splitlines()[0]) | {"job_id": "1", "submitted_at": 0.0}
    file.write_text("".join(f"{json.dumps(old)}\n" * 1000) + file.read_text())
    local._shortened_at = float("-inf")
    third = local.submit(sh(tmp_path, "c", "true"))
    assert len(file.read_text().splitlines()) == 3
    file.write_text("".join(f"{json.dumps(old)}\n" * 1000) + file.read_text())
    local.close()
    after = cluster(tmp_path)
    after.jobs()
    assert len(file.read_text().splitlines()) == 3
    ids = [int(job_id) for job_id in (ended, running, third)]
    assert int(after.submit(sh(tmp_path, "d", "true"))) > max(ids)


def test_the_end_says_how(tmp_path):
    """Of a job past its time limit, too; the member's index is put into the log's file name alone."""
    folder = tmp_path / "100%in 'quotes' $HOME"
    local = cluster(folder)
    local.submit(sh(tmp_path, "long", "exec sleep 600", gpus=1, time_limit_seconds=0))
    local.submit(sh(folder / "%i", "two", "echo $EVALSPAN_INDEX", count=2))
    for name, script in (("good", "true"), ("bad", "exit 3"), ("shot", "kill -9 $$")):
        local.submit(sh(tmp_path, name, script))
    local.submit(sh(tmp_path, "none", "", argv=("/no/such/program",)))
    wait_ended(local)
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


def test_a_slot_has_its_gpu_and_a_job_without_slots_sees_none(tmp_path):
    local = LocalCluster(tmp_path / "jobs", gpus=["0, NVIDIA X", "3, NVIDIA X"])
    script = f"echo [$CUDA_VISIBLE_DEVICES]; until [ -e {tmp_path}/gate ]; do sleep 0.02; done"
    for name, gpus in (("a", 1), ("b", 1), ("side", 0)):
        local.submit(sh(tmp_path, name, script, gpus=gpus))
    node = local.nodes()[0]
    assert (node.gpus, node.gpus_free, node.gpu_type) == (2, 0, "NVIDIA X")
    (tmp_path / "gate").touch()
    wait_ended(local)
    logs = {name: (tmp_path / f"{name}.0").read_text() for name in ("a", "b", "side")}
    assert logs == {"a": "[0]\n", "b": "[3]\n", "side": "[]\n"}
    with pytest.raises(RefusedError):
        LocalCluster(tmp_path / "jobs", gpus=["0, NVIDIA X"], slots=2)


def test_a_state_folder_that_cannot_be_written_is_a_cluster_error(tmp_path):
    """And the job that could not be put on record did not start."""
    local = cluster(tmp_path)
    (tmp_path / "jobs").write_text("")
    with pytest.raises(ClusterError):
        local.submit(sh(tmp_path, "a", f"touch {tmp_path}/ran"))
    assert not (tmp_path / "ran").exists()
