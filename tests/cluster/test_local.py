"""Laws of the local cluster: what a killed coordinator leaves is found, and nothing of a job outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator import processes
from coordinator.cluster import ClusterError, Job, JobState, RefusedError
from coordinator.cluster import local_process as process
from coordinator.cluster.local import LocalCluster, parse_gpus

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = """
import json, os, signal, sys
from pathlib import Path
from coordinator.cluster import Job
from coordinator.cluster.local import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), slots=2, gpus=[])
for fields in json.loads(sys.argv[2]):
    cluster.submit(Job(**{**fields, "argv": tuple(fields["argv"])}))
os.kill(os.getpid(), signal.SIGKILL)
"""

FORGETTING = """
import itertools, os, signal, sys
from pathlib import Path
from coordinator.cluster.local import LocalCluster
steps = itertools.count(1)
def audited(event, arguments):
    if event == "os.remove" and next(steps) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audited)
LocalCluster(Path(sys.argv[1]), slots=2, gpus=[])
"""


def until(law: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def cluster(folder: Path, **more: object) -> LocalCluster:
    return LocalCluster(folder / "jobs", **{"slots": 2, "gpus": [], **more})  # type: ignore[arg-type]


def sh(folder: Path, name: str, script: str, **more: object) -> Job:
    fields = {"name": name, "argv": ("sh", "-c", script), "log": str(folder / f"{name}.%i"), **more}
    return Job(**fields)  # type: ignore[arg-type]


def states(local: LocalCluster) -> dict[str, JobState]:
    return {f"{s.name}.{s.index}": s for s in local.jobs()}


def killed_coordinator(folder: Path, jobs: list[Job]) -> None:
    """A coordinator of its own process that submits these jobs and dies by SIGKILL."""
    fields = [{**{f: getattr(j, f) for f in Job.__dataclass_fields__}, "env": dict(j.env)} for j in jobs]
    done = subprocess.run(
        [sys.executable, "-c", COORDINATOR, str(folder / "jobs"), json.dumps(fields)],
        cwd=ROOT,
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_what_a_killed_coordinator_left_goes_on_and_its_end_is_seen(tmp_path: Path) -> None:
    """Running jobs run on, waiting jobs still wait, each runs once; a job that ended while nobody looked has ended."""
    wait = f"echo started >> {tmp_path}/$0; until [ -e {tmp_path}/gate ]; do sleep 0.05; done"
    jobs = [
        sh(tmp_path, "long", wait, gpus=1, argv=("sh", "-c", wait, "long-ran")),
        sh(tmp_path, "short", f"until [ -e {tmp_path}/soon ]; do sleep 0.02; done", gpus=1),
        sh(tmp_path, "late", wait, gpus=1, argv=("sh", "-c", wait, "late-ran")),
    ]
    killed_coordinator(tmp_path, jobs)
    (tmp_path / "soon").touch()
    until(lambda: _has_run(tmp_path, 2), "the short job ends")
    local = cluster(tmp_path)
    seen = states(local)
    assert seen["long.0"].phase == "running"
    assert (seen["short.0"].phase, seen["short.0"].state) == ("ended", "EXITED")
    assert seen["late.0"].phase == "running"  # on the slot that is free now
    assert local.nodes()[0].gpus_free == 0
    (tmp_path / "gate").touch()
    until(lambda: all(s.phase == "ended" for s in local.jobs()), "all ended")
    assert (tmp_path / "long-ran").read_text() == "started\n"
    assert (tmp_path / "late-ran").read_text() == "started\n"
    again = cluster(tmp_path)
    assert {s.phase for s in again.jobs()} == {"ended"}


def _has_run(folder: Path, number: int) -> bool:
    claim = process.read_claim(folder / "jobs" / f"{number}.0.run")
    return claim is not None and not processes.alive(claim[0])


@pytest.mark.parametrize("step", range(1, 5))
def test_a_forgetting_that_is_cut_short_starts_nothing_again(tmp_path: Path, step: int) -> None:
    """SIGKILL at any removal of an old job's files: it has ended or is unknown, and a next job by its number is a new one."""
    local = cluster(tmp_path)
    number = local.submit(sh(tmp_path, "a", f"echo ran >> {tmp_path}/ran"))
    until(lambda: states(local)["a.0"].phase == "ended", "ended")
    end = tmp_path / "jobs" / f"{number}.0.end"
    end.write_text(json.dumps({**json.loads(end.read_text()), "at": 1.0}))
    done = subprocess.run(
        [sys.executable, "-c", FORGETTING, str(tmp_path / "jobs"), str(step)], cwd=ROOT, check=False
    )
    assert done.returncode in (-signal.SIGKILL, 0)
    after = cluster(tmp_path)
    assert [s.phase for s in after.jobs()] in ([], ["ended"])
    assert (tmp_path / "ran").read_text() == "ran\n"
    last = after.submit(sh(tmp_path, "b", "exec sleep 600"))
    assert {s.job_id: s.phase for s in cluster(tmp_path).jobs()}[last] == "running"
    after.cancel([last])
    until(lambda: states(after)["b.0"].phase == "ended", "ended")


def test_an_adopted_job_can_be_cancelled(tmp_path: Path) -> None:
    """Its new coordinator is not its parent, and ends it all the same."""
    killed_coordinator(tmp_path, [sh(tmp_path, "a", "exec sleep 600", gpus=1)])
    local = cluster(tmp_path)
    until(lambda: states(local)["a.0"].phase == "running", "adopted")
    local.cancel([states(local)["a.0"].job_id])
    until(lambda: states(local)["a.0"].phase == "ended", "ended")
    assert states(local)["a.0"].state == "CANCELLED"


def test_of_two_coordinators_that_start_one_member_one_wins(tmp_path: Path) -> None:
    """A job that its dying coordinator starts at the same moment as the next one runs once."""
    count = tmp_path / "ran"
    local = cluster(tmp_path, slots=1)
    local.submit(sh(tmp_path, "first", f"until [ -e {tmp_path}/gate ]; do sleep 0.02; done", gpus=1))
    local.submit(sh(tmp_path, "a", f"echo ran >> {count}; exec sleep 600", gpus=1))
    other = cluster(tmp_path, slots=1)  # both have the job as pending
    (tmp_path / "gate").touch()
    until(lambda: states(local)["a.0"].phase == "running", "started by one")
    until(lambda: [other.jobs(), states(other)["a.0"].phase == "running"][1], "known to the other")
    until(count.exists, "it runs")
    other.cancel(["2"])
    until(lambda: states(other)["a.0"].phase == "ended", "ended for one")
    until(lambda: [states(local)["a.0"].phase, other.jobs()][0] == "ended", "ended for both")
    assert count.read_text() == "ran\n"


def test_who_was_there_first_hands_over_all_that_it_submitted(tmp_path: Path) -> None:
    """Also what the next one, which waited for its turn, could not find when it was started."""
    first, second = cluster(tmp_path), cluster(tmp_path)
    job_id = first.submit(sh(tmp_path, "a", "exec sleep 600", gpus=1))
    assert states(second)["a.0"].phase == "running"
    second.cancel([job_id])
    until(lambda: [first.jobs(), states(second)["a.0"].phase == "ended"][1], "ended")


def test_who_only_asks_for_nodes_moves_no_job(tmp_path: Path) -> None:
    """A command beside the daemon starts nothing in its place, though a slot is free."""
    local = cluster(tmp_path, slots=1)
    local.submit(sh(tmp_path, "a", f"until [ -e {tmp_path}/gate ]; do sleep 0.02; done", gpus=1))
    last = local.submit(sh(tmp_path, "b", f"touch {tmp_path}/ran", gpus=1))
    (tmp_path / "gate").touch()
    until(lambda: _has_run(tmp_path, 1), "the first is over")
    assert cluster(tmp_path, slots=1).nodes()[0].gpus == 1
    assert not (tmp_path / "jobs" / f"{last}.0.run").exists()
    until(lambda: states(local)["b.0"].phase == "ended", "the second is over")
    assert (tmp_path / "ran").exists()


def test_nothing_of_a_job_outlives_it(tmp_path: Path) -> None:
    """Grandchildren in sessions of their own go when the job's own process has ended."""
    script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & until [ -s {tmp_path}/pid ]; do sleep 0.02; done"
    local = cluster(tmp_path)
    local.submit(sh(tmp_path, "a", script, gpus=1))
    until(lambda: states(local)["a.0"].phase == "ended", "ended")
    pid = int((tmp_path / "pid").read_text())
    until(lambda: _gone(pid), "its grandchild is gone")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_becomes_another_program_while_it_is_looked_for_is_found(tmp_path: Path) -> None:
    """In the midst of exec a process shows no environment: one that does nothing but exec is found at every look."""
    again = 'exec "$0" -c "$1" "$0" "$1"'
    mark = {**os.environ, process.MARK: str(tmp_path)}
    with subprocess.Popen(["sh", "-c", again, "sh", again], env=mark) as child:
        wanted = f"{process.MARK}={tmp_path}".encode()
        until(lambda: wanted in process._environment(child.pid), "it runs")
        try:
            assert all(wanted in process._environment(child.pid) for _ in range(2000))
            assert process._environment(2) == []  # the kernel's own have none and are not waited for
        finally:
            child.kill()


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    """And nobody waits for it: each look only sees whether the grace is over."""
    local = cluster(tmp_path, kill_seconds=0.2)
    job = sh(tmp_path, "a", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done", gpus=1)
    job_id = local.submit(job)
    until((tmp_path / "ready").exists, "it runs")
    local.cancel([job_id])
    until(lambda: states(local)["a.0"].phase == "ended", "killed")
    assert (states(local)["a.0"].state, states(local)["a.0"].reason) == ("CANCELLED", "signal 9")


def test_a_job_past_its_time_limit_is_told_to_end(tmp_path: Path) -> None:
    local = cluster(tmp_path)
    local.submit(sh(tmp_path, "a", "exec sleep 600", gpus=1, time_limit_seconds=0))
    until(lambda: states(local)["a.0"].phase == "ended", "over")
    assert states(local)["a.0"].state == "TIMEOUT"


def test_a_cancelled_job_that_waited_never_runs(tmp_path: Path) -> None:
    """Not even after a restart."""
    local = cluster(tmp_path, slots=1)
    first = local.submit(sh(tmp_path, "first", "exec sleep 600", gpus=1))
    second = local.submit(sh(tmp_path, "second", f"touch {tmp_path}/ran", gpus=1))
    local.cancel([second])
    assert states(local)["second.0"].state == "CANCELLED"
    local.cancel([first])
    again = cluster(tmp_path, slots=1)
    until(lambda: [local.jobs(), states(again)["first.0"].phase == "ended"][1], "the first is over")
    assert states(again)["second.0"].state == "CANCELLED"
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
    until(lambda: states(local)["two.0"].phase == "running", "two slots free")
    assert states(local)["three.0"].phase == "pending"
    local.cancel([s.job_id for s in local.jobs()])
    until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")


def test_the_end_says_how(tmp_path: Path) -> None:
    local = cluster(tmp_path)
    local.submit(sh(tmp_path, "good", "true"))
    local.submit(sh(tmp_path, "bad", "exit 3"))
    local.submit(sh(tmp_path, "shot", "kill -9 $$"))
    local.submit(sh(tmp_path, "none", "", argv=("/no/such/program",)))
    until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")
    assert {n: (s.state, s.reason) for n, s in states(local).items()} == {
        "good.0": ("COMPLETED", ""),
        "bad.0": ("FAILED", "exit code 3"),
        "shot.0": ("FAILED", "signal 9"),
        "none.0": ("FAILED", "exit code 127"),
    }


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
    until(lambda: all(s.phase == "ended" for s in local.jobs()), "all over")
    logs = {name: (tmp_path / f"{name}.0").read_text() for name in ("a", "b", "side")}
    assert logs == {"a": "[0]\n", "b": "[3]\n", "side": "[]\n"}
    with pytest.raises(RefusedError):
        LocalCluster(tmp_path / "jobs", gpus=["0, NVIDIA X"], slots=2)


def test_only_the_gpus_left_to_us_are_counted() -> None:
    text = "0, GPU-aa, NVIDIA A\n1, GPU-bb, NVIDIA B\n"
    assert parse_gpus(text, None) == ("0, NVIDIA A", "1, NVIDIA B")
    assert parse_gpus(text, "1") == ("1, NVIDIA B",)
    assert parse_gpus(text, "GPU-aa") == ("0, NVIDIA A",)
    assert parse_gpus(text, "") == ()


def test_a_pid_that_is_somebody_elses_is_not_our_job(tmp_path: Path) -> None:
    """A claim whose pid lives, but was born at another time or in another boot, belongs to a job that has ended."""
    killed_coordinator(tmp_path, [sh(tmp_path, "a", "exec sleep 600"), sh(tmp_path, "b", "exec sleep 600")])
    until(lambda: all((tmp_path / "jobs" / f"{n}.0.run").exists() for n in (1, 2)), "both claimed")
    boot, line, note = (tmp_path / "jobs" / "1.0.run").read_text().split("\n")[:3]
    other_pid = f"{os.getpid()} {line.partition(' ')[2]}"
    (tmp_path / "jobs" / "1.0.run").write_text(f"{boot}\n{other_pid}\n{note}\n")
    mine = Path("/proc/self/stat").read_text().strip()
    (tmp_path / "jobs" / "2.0.run").write_text(f"another-boot\n{mine}\n{note}\n")
    seen = states(cluster(tmp_path))
    assert seen["a.0"].state == "EXITED"
    assert (seen["b.0"].state, seen["b.0"].reason) == ("NODE_FAIL", "the machine was restarted")
    until(lambda: _gone(int(line.split()[0])), "what bears the mark of an ended job is ended")


def test_a_state_folder_that_cannot_be_written_is_a_cluster_error(tmp_path: Path) -> None:
    """And the job that could not be put on record did not start."""
    local = cluster(tmp_path)
    (tmp_path / "jobs").rmdir()
    with pytest.raises(ClusterError):
        local.submit(sh(tmp_path, "a", f"touch {tmp_path}/ran"))
    assert local.jobs() == []
    assert not (tmp_path / "ran").exists()


def test_a_path_may_be_called_anything(tmp_path: Path) -> None:
    """The member's index is put into the log's file name alone."""
    folder = tmp_path / "100%in 'quotes' $HOME"
    local = LocalCluster(folder / "jobs", slots=2, gpus=[])
    local.submit(
        Job(name="a", argv=("sh", "-c", "echo $EVALSPAN_INDEX"), log=str(folder / "logs" / "l.%i"), count=2)
    )
    until(lambda: all(s.phase == "ended" for s in local.jobs()), "over")
    assert [(folder / "logs" / f"l.{i}").read_text() for i in (0, 1)] == ["0\n", "1\n"]
