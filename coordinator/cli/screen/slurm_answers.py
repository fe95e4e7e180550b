"""What `status` and `watch` ask of Slurm: jobs, nodes, and how the daemon's own job is submitted.

Rule: Slurm only explains what waits, so an answer that does not come within LISTING_SECONDS is none.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from coordinator.cluster import JobState, NodeState
    from coordinator.cluster.slurm_cli import SlurmCli
    from coordinator.config.schema import Config

LISTING_SECONDS = 5.0  # longest wait for an answer
WRAPPER = "evalspan-daemon"  # the script that runs a daemon as a job
T = TypeVar("T")


def listed_jobs(config: Config) -> Sequence[JobState]:
    """This work folder's jobs; the cluster's kind may be an option of `eval` alone."""
    return _asked(config, "squeue", lambda slurm: slurm.jobs())


def listed_nodes(config: Config) -> Sequence[NodeState]:
    return _asked(config, "sinfo", lambda slurm: slurm.nodes()) if config.cluster.kind == "slurm" else ()


def queued_daemons(config: Config) -> Sequence[JobState]:
    if config.cluster.kind != "slurm":
        return ()
    from coordinator.cluster.daemon_job import daemon_job
    from coordinator.runtime.wiring import slurm_options

    name = daemon_job(slurm_options(config)).name
    return [j for j in _asked(config, "squeue", lambda slurm: slurm.jobs_named(name)) if j.phase == "pending"]


def _asked(config: Config, command: str, ask: Callable[[SlurmCli], Sequence[T]]) -> Sequence[T]:
    """() where Slurm is not here, or does not answer."""
    if shutil.which(command) is None:
        return ()
    from coordinator.cluster import ClusterError
    from coordinator.cluster.slurm_cli import SlurmCli
    from coordinator.runtime.wiring import slurm_options

    with suppress(ClusterError):
        return ask(SlurmCli(replace(slurm_options(config), timeout_seconds=LISTING_SECONDS)))
    return ()


def wrapped_daemon(config: Config, rest: str, script: str = WRAPPER) -> str:
    """How SCRIPT.sbatch is submitted; "" without Slurm. `rest`: words behind it, with a space before them.

    Its time is what partition, account and QOS allow; a day where Slurm does not say.
    """
    if config.cluster.kind != "slurm":
        return ""
    from coordinator.cluster import ClusterError
    from coordinator.cluster.daemon_job import daemon_job, own_options, sbatch_line
    from coordinator.cluster.slurm_cli import SlurmCli
    from coordinator.runtime.wiring import slurm_options

    options = slurm_options(config)
    job, own = daemon_job(options), own_options(options)
    with suppress(ClusterError):
        job = SlurmCli(replace(own, timeout_seconds=LISTING_SECONDS)).within_limits(job)
    return sbatch_line(job, options, wrapper(script), rest, named=script == WRAPPER)


def wrapper(script: str = WRAPPER) -> Path:
    """SCRIPT.sbatch of this installation, or of the clone."""
    name = f"{script}.sbatch"
    installed = Path(sys.prefix) / "share" / "evalspan" / name
    return installed if installed.exists() else Path(__file__).resolve().parents[3] / "scripts" / name
