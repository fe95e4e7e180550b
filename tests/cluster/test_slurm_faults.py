"""Laws of Slurm's commands that fail: commands first in PATH that do what was seen to go wrong, run for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, Job, LimitError, RefusedError
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_parse import NODE_FIELDS

# the header alone of what `sinfo` is asked for
NO_NODES = "\\037".join(NODE_FIELDS) + "\\036\\n"
JOB = Job(name="es-fault", argv=("true",), log="/dev/null", memory_mb=50, time_limit_seconds=600)
FAILED = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"
KILL_ERROR = "echo 'scancel: error: Kill job error on job id 1: {}' >&2; exit 1"
LIMIT = f"echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; {FAILED.format('Job violates accounting/QOS policy')}"


def wrapped(folder: Path, seconds: float = 60.0, **commands: str) -> SlurmCli:
    """A SlurmCli whose commands are these scripts; the site has no nodes and no accounting where they say nothing of it."""
    quiet = {
        "sinfo": f"printf '{NO_NODES}'",
        "scontrol": "echo AccountingStorageType = accounting_storage/none",
    }
    for name, script in (quiet | commands).items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    prefix = ("env", f"PATH={path}")
    return SlurmCli(slurm_options(env={"PATH": path}, command_prefix=prefix, timeout_seconds=seconds))


def raised(call: Callable[[], object]) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        call()
    return caught.value


def test_a_command_that_hangs_is_ended_and_is_a_cluster_error(tmp_path: Path) -> None:
    """With the whole of its process group; no caller waits longer than the time limit for it."""
    place = tmp_path / "pid"
    place.touch()
    for seconds in (0.5, 5.0, 50.0):  # longer where this machine was too slow to let it begin
        slurm = wrapped(tmp_path, seconds, sbatch=f"sh -c 'echo $$ > {place}; exec sleep 600'")
        error = raised(lambda slurm=slurm: slurm.submit(JOB))
        assert type(error) is ClusterError
        assert "timed out" in str(error)
        if place.read_text():
            break
    stat = Path(f"/proc/{int(place.read_text())}/stat")
    wait_until(
        lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX", "it is gone", 60
    )


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (FAILED.format("Socket timed out on send/recv operation"), ClusterError),
        (FAILED.format("Unable to contact slurm controller (connect failure)"), ClusterError),
        (FAILED.format("Invalid qos specification"), RefusedError),
        (LIMIT, LimitError),
        ("exit 1", ClusterError),
        ("kill -9 $$", ClusterError),
        ("echo what is this", ClusterError),
        ("true", ClusterError),
    ],
)
def test_only_slurms_own_words_refuse_a_submission_or_name_a_limit(
    tmp_path: Path, script: str, kind: type[ClusterError]
) -> None:
    """Any other failure is a ClusterError: the job is looked up by its name before it is submitted again."""
    assert type(raised(lambda: wrapped(tmp_path, sbatch=script).submit(JOB))) is kind


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "exit 1",
        "true",
        "echo what is this",
        "head -c 4096 /dev/urandom",
        "printf 'ARRAY_JOB_ID\\037ARRAY'",
        "exec sleep 600",
    ],
)
def test_a_listing_that_fails_is_no_news(tmp_path: Path, script: str) -> None:
    """Whether it says so, prints garbage, half of an answer or nothing, or hangs: never "no jobs", never "no nodes"."""
    slurm = wrapped(tmp_path, 1.0, squeue=script, sinfo=script)
    assert type(raised(slurm.jobs)) is ClusterError
    assert type(raised(slurm.nodes)) is ClusterError


def test_a_missing_command_is_told_by_name(tmp_path: Path) -> None:
    slurm = SlurmCli(slurm_options(command_prefix=(str(tmp_path / "missing"),)))
    for call in (slurm.jobs, slurm.nodes, lambda: slurm.cancel(["1"]), lambda: slurm.check(JOB)):
        assert "missing cannot be run" in str(raised(call))


def test_cancelling_that_fails_says_so(tmp_path: Path) -> None:
    """Ids that are gone are no failure; a thousand ids are one command."""
    calls = tmp_path / "calls"
    gone = wrapped(tmp_path, scancel=f"echo x >> {calls}; {KILL_ERROR.format('Invalid job id specified')}")
    gone.cancel([str(i) for i in range(1000)])
    gone.cancel([])
    assert calls.read_text() == "x\n"
    away = wrapped(tmp_path, scancel=KILL_ERROR.format("Unable to contact slurm controller"))
    assert "contact" in str(raised(lambda: away.cancel(["1"])))


def test_limits_are_asked_for_once_in_a_while_and_hold_while_accounting_is_away(tmp_path: Path) -> None:
    """MaxTime cuts a job though sacctmgr fails, and the next job asks neither again. Nothing is submitted before MaxTime
    is known: unknown is no freedom.
    """
    calls = f"echo x >> {tmp_path}/calls"
    slurm = wrapped(tmp_path, scontrol="echo 'slurm_load_partitions error: Socket timed out' >&2; exit 1")
    assert "Socket timed out" in str(raised(lambda: slurm.within_limits(JOB)))
    config, partition = (
        "AccountingStorageType = accounting_storage/slurmdbd",
        "PartitionName=gpu Default=YES MaxTime=05:00",
    )
    shown = f'{calls}; case "$*" in *config) echo {config};; *) echo {partition};; esac'
    wrapped(tmp_path, scontrol=shown, sacctmgr=f"{calls}; echo 'error: Connection refused' >&2; exit 1")
    assert [slurm.within_limits(JOB).time_limit_seconds for _ in range(2)] == [300, 300]
    assert (tmp_path / "calls").read_text() == "x\n" * 4
