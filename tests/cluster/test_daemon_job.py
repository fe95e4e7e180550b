"""The line that submits the coordinator's own job: it runs on the site as printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.slurm_options import slurm_options

from coordinator.cluster.daemon_job import daemon_job, sbatch_line

SCRIPT = Path("/share/evalspan-daemon.sbatch")


def test_the_daemons_line_asks_for_partition_account_and_qos_of_all_jobs() -> None:
    """A role's own settings are for other jobs. How its time is cut: `test_slurm_accounts.py`."""
    options = slurm_options(
        partition="gpu",
        cpu_partition="cpu",
        account="proj",
        qos="short",
        slurm={"build": {"partition": "big", "account": "else", "qos": "other"}},
        token="evalspan:work:1a2b",  # noqa: S106
    )
    for seconds, time in ((86_400, "1-00:00:00"), (1080, "0:18:00")):
        job = replace(daemon_job(options), time_limit_seconds=seconds)
        said = sbatch_line(job, options, SCRIPT, " --config x")
        assert said == f"sbatch -p cpu -A proj -q short -t {time} -J evalspan-daemon-1a2b {SCRIPT} --config x"


def test_each_work_folders_daemon_has_a_name_of_its_own_and_a_small_job() -> None:
    """Slurm's singleton is by user and job name: another folder's daemon is no reason to wait."""
    jobs = [daemon_job(slurm_options(token=f"evalspan:evalspan-work:{digest}")) for digest in ("1a", "2b")]
    assert len({job.name for job in jobs}) == len(jobs)
    assert {(job.cpus, job.memory_mb, job.gpus) for job in jobs} == {(1, 1024, 0)}
    text = (Path(__file__).parents[2] / "scripts" / "evalspan-daemon.sbatch").read_text()
    assert "--cpus-per-task=1\n" in text
    assert "--mem=1G\n" in text
