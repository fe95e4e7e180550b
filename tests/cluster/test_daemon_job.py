"""The line that submits the coordinator's own job: it runs on the site as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.slurm_options import slurm_options

from coordinator.cluster.daemon_job import daemon_job, own_options, sbatch_line
from coordinator.cluster.sbatch_text import SlurmOptions, within_limits
from coordinator.config.schema import RoleConfig

SCRIPT = Path("/share/evalspan-daemon.sbatch")


def line(options: SlurmOptions, limits: dict[str | None, int], walls: dict[tuple[str, str], int]) -> str:
    job = within_limits(daemon_job(options), own_options(options), limits, walls)
    return sbatch_line(job, options, SCRIPT, " --config x")


@pytest.mark.parametrize(
    ("limits", "walls", "time"),
    [
        ({}, {}, "1-00:00:00"),
        ({"cpu": 3600, "gpu": 1200}, {}, "1:00:00"),
        ({"cpu": 3600}, {("qos", "short"): 1080}, "0:18:00"),
        ({"cpu": 3600}, {("account", "proj"): 1800, ("qos", "other"): 60}, "0:30:00"),
    ],
)
def test_the_daemons_line_asks_for_what_partition_account_and_qos_allow(
    limits: dict[str | None, int], walls: dict[tuple[str, str], int], time: str
) -> None:
    """MaxTime of the CPU partition, MaxWall of account and QOS; a role's own settings are for other jobs."""
    options = slurm_options(
        partition="gpu",
        cpu_partition="cpu",
        account="proj",
        qos="short",
        slurm={"build": RoleConfig(partition="big", account="else", qos="other")},
        token="evalspan:work:1a2b",  # noqa: S106
    )
    said = line(options, limits, walls)
    assert said == f"sbatch -p cpu -A proj -q short -t {time} -J evalspan-daemon-1a2b {SCRIPT} --config x"


def test_each_work_folders_daemon_has_a_name_of_its_own_and_a_small_job() -> None:
    """Slurm's singleton is by user and job name: another folder's daemon is no reason to wait."""
    jobs = [daemon_job(slurm_options(token=f"evalspan:evalspan-work:{digest}")) for digest in ("1a", "2b")]
    assert len({job.name for job in jobs}) == len(jobs)
    assert {(job.cpus, job.memory_mb, job.gpus) for job in jobs} == {(1, 1024, 0)}
    text = (Path(__file__).parents[2] / "scripts" / "evalspan-daemon.sbatch").read_text()
    assert "--cpus-per-task=1\n" in text
    assert "--mem=1G\n" in text
