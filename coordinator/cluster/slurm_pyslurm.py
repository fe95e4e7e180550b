"""Slurm through pyslurm: submits, lists and cancels jobs without a process each. Its only importer.

Rule: Slurm's commands (SlurmCli) do what pyslurm cannot: GPUs in use, which pyslurm lacks where
AccountingStorageTRES does not name gres/gpu; a check without submission; single members of an array
that still waits as a whole. Written for pyslurm 25.11.2, which needs Slurm 25.11. Time limits are
those of Slurm's library (MessageTimeout). pyslurm is GPL-2.0: the optional extra `slurm`, never
bundled.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.sbatch_text import (
    TERM_BEFORE_END_SECONDS,
    SlurmOptions,
    batch_script,
    client_environment,
    comment_of,
    is_ours,
    log_pattern,
    minutes_of,
    submission_environment,
)
from coordinator.cluster.slurm_cli import SlurmCli

IMPORT_SECONDS = 60.0
INSTALL_HINT = (
    "install it with `pip install 'evalspan[slurm]'` on a machine with the headers and libslurmfull.so of Slurm 25.11 "
    '(SLURM_INCLUDE_DIR, SLURM_LIB_DIR), or use cluster.api = "cli"'
)


def unavailable(options: SlurmOptions | None = None) -> str | None:
    """Why pyslurm cannot be used here, in one line, or None.

    Tried in a process apart: without slurm.conf, Slurm's library ends the process that initialises
    it.
    """
    if importlib.util.find_spec("pyslurm") is None:
        return f"pyslurm is not installed: {INSTALL_HINT}"
    env = client_environment(os.environ, options or SlurmOptions())
    env.pop("PYSLURM_DISABLE_AUTO_INIT", None)
    try:
        run_command([sys.executable, "-c", "import pyslurm"], seconds=IMPORT_SECONDS, env=env)
    except CommandError as error:
        if error.timed_out:
            return f"pyslurm was not ready after {IMPORT_SECONDS:g} s: is slurm.conf where it should be?"
        return f"pyslurm cannot be used here ({error}): {INSTALL_HINT}"
    return None


def _load(options: SlurmOptions) -> ModuleType:
    """Import and initialise pyslurm; RefusedError where that is not possible."""
    reason = unavailable(options)
    if reason is not None:
        raise RefusedError(reason)
    conf = options.env.get("SLURM_CONF")
    if conf is not None:
        os.environ["SLURM_CONF"] = conf  # the library reads it from this process's environment
    flags = sys.getdlopenflags()
    os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
    try:
        pyslurm = importlib.import_module("pyslurm")
    finally:
        sys.setdlopenflags(flags)  # pyslurm's import makes every later library global
        del os.environ["PYSLURM_DISABLE_AUTO_INIT"]
    pyslurm.slurm_init(conf)
    return pyslurm


class SlurmApi:
    """The Cluster protocol by pyslurm, as this process's user. RefusedError without pyslurm."""

    def __init__(self, options: SlurmOptions) -> None:
        if options.command_prefix:
            raise RefusedError('a command prefix needs cluster.api = "cli": pyslurm runs no commands')
        self.options = options
        self._commands = SlurmCli(options)
        self._pyslurm = _load(options)

    def submit(self, job: Job) -> str:
        """Submit by one RPC. After a ClusterError, look for the job's name before a retry."""
        fields = description(self._commands.within_limits(job), self.options)
        request = self._pyslurm.JobSubmitDescription(**fields)
        try:
            if self.options.extra_args:
                request.load_sbatch_options(overwrite=True)
            return str(request.submit())
        except self._pyslurm.PyslurmError as error:
            raise text.failure(str(error)) from error
        except ValueError as error:  # an extra argument that pyslurm lacks
            raise RefusedError(f"pyslurm: {error}") from error

    def jobs(self) -> list[JobState]:
        """List by one RPC; this user's jobs whose comment has the token."""
        try:
            found: Iterable[Any] = self._pyslurm.Jobs.load().values()
        except self._pyslurm.PyslurmError as error:
            raise ClusterError(str(error)) from error
        user = os.getuid()
        return [
            state
            for job in found
            if job.user_id == user and is_ours(job.comment or "", self.options.token)
            for state in states_of(job)
        ]

    def nodes(self) -> list[NodeState]:
        """List by `sinfo`: pyslurm lacks the GPUs in use on some sites."""
        return self._commands.nodes()

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel by an RPC per job, members of arrays by one `scancel`; ignores ids that are gone."""
        failed = []
        for job_id in (i for i in job_ids if i.isdigit()):
            try:
                self._pyslurm.Job(int(job_id)).cancel()
            except self._pyslurm.PyslurmError as error:
                if not text.says(str(error), text.GONE):
                    failed.append(str(error))
        self._commands.cancel([i for i in job_ids if not i.isdigit()])
        if failed:
            raise ClusterError("; ".join(dict.fromkeys(failed)))

    def check(self, job: Job) -> None:
        """Check by `sbatch --test-only`: pyslurm has no such call."""
        self._commands.check(job)


def description(job: Job, options: SlurmOptions) -> dict[str, Any]:
    """Attributes of pyslurm's JobSubmitDescription, equal in effect to `sbatch_arguments`.

    Pure but for this process's environment.
    """
    script = batch_script(job)
    if options.extra_args:  # pyslurm reads sbatch's own options from a script
        head, _, rest = script.partition("\n")
        script = "\n".join([head, *(f"#SBATCH {argument}" for argument in options.extra_args), rest])
    fields: dict[str, Any] = {
        "name": job.name,
        "comment": comment_of(job, options.token),
        "script": script,
        "standard_output": log_pattern(job),
        "log_files_open_mode": "append",
        "is_requeueable": False,
        "nodes": 1,
        "ntasks": 1,
        "cpus_per_task": job.cpus,
        "memory_per_node": f"{job.memory_mb}M",
        "time_limit": minutes_of(job),  # a number: it fails on text of digits
        "environment": submission_environment(os.environ, options, job),
        "partitions": options.partition_of(job),
        "account": options.account,
        "qos": options.qos_of(job),
        "nice": options.nice,
        "reservations": options.reservation,
        "working_directory": options.chdir,
        "required_nodes": job.node,
        "excluded_nodes": ",".join(job.avoid) or None,
    }
    if job.time_limit_seconds > 2 * TERM_BEFORE_END_SECONDS:
        fields["signal"] = f"B:SIGTERM@{TERM_BEFORE_END_SECONDS}"
    if job.count > 1:
        fields["array"] = f"0-{job.count - 1}"
    if job.gpus > 0:
        fields["gres_per_node"] = f"gpu:{job.gpus}"
    return {name: value for name, value in fields.items() if value is not None}


def states_of(job: Any) -> list[JobState]:
    """One pyslurm Job as members; a waiting array is one Job with members "0-2,5"."""
    array = job.array_id
    if not array:
        return [_state(job, str(job.id), 0)]
    if job.array_task_id is not None:
        return [_state(job, str(array), job.array_task_id)]
    return [_state(job, str(array), index) for index in indexes(job.array_tasks_waiting or "")]


def indexes(ranges: str) -> list[int]:
    """Members of Slurm's "0-2,5,7-9:2"; without those behind "...", which a later listing shows."""
    found: list[int] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if match:
            first, last, step = match.groups()
            found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def _state(job: Any, job_id: str, index: int) -> JobState:
    state = job.state or "UNKNOWN"
    node = job.allocated_nodes or None
    reason = job.state_reason or ""
    phase = text.PHASES.get(state, "unknown")
    return JobState(
        job_id=job_id,
        name=job.name or "",
        index=index,
        phase=phase,
        state=state,
        node=node,
        reason="" if reason == "None" else reason,
        submitted_at=job.submit_time,
        started_at=job.start_time if node else None,
        ends_at=job.end_time if phase == "running" else None,
    )
