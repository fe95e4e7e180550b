"""Slurm through its own commands: sbatch, squeue, scontrol, scancel. Text formats that have held since 20.02.

Rule: a command that fails, times out or prints what cannot be read is no news (ClusterError), never an empty answer.
States that are not in our list are "unknown", which the machine takes for "still there".
It does not know: what the jobs are for.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from coordinator.cluster import ClusterError, Job, JobPhase, JobState, NodeState, RefusedError
from coordinator.cluster.script import SlurmOptions, batch_script, sbatch_arguments

SEPARATOR = "\x1f"
QUEUE_FIELDS = (
    "%F",
    "%K",
    "%i",
    "%T",
    "%N",
    "%V",
    "%S",
    "%k",
    "%j",
    "%r",
)  # array id, index, id, state, node, ...

PHASES: dict[str, JobPhase] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RESV_DEL_HOLD": "pending",
    "POWER_UP_NODE": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "COMPLETED": "ended",
    "CANCELLED": "ended",
    "FAILED": "ended",
    "TIMEOUT": "ended",
    "NODE_FAIL": "ended",
    "PREEMPTED": "ended",
    "BOOT_FAIL": "ended",
    "DEADLINE": "ended",
    "OUT_OF_MEMORY": "ended",
    "REVOKED": "ended",
    "LAUNCH_FAILED": "ended",
    "RECONFIG_FAIL": "ended",
}
# the beginnings of what Slurm says when asking again is useless
REFUSALS = (
    "invalid partition",
    "invalid account",
    "invalid qos",
    "invalid reservation",
    "requested node configuration is not available",
    "node count specification invalid",
    "user's group not permitted",
    "access/permission denied",
    "more processors requested than permitted",
    "memory specification can not be satisfied",
    "invalid generic resource",
    "invalid node name",
    "job violates accounting/qos policy",
    "requested time limit is invalid",
    "requested partition configuration not available",
    "invalid feature",
    "invalid job array",
    "unrecognized option",
    "invalid number of tasks",
    "does not exist",
    "lua",
    "job submit",
)
BAD_NODE = (
    "DOWN",
    "DRAIN",
    "FAIL",
    "MAINT",
    "RESERVED",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "NOT_RESPONDING",
    "UNKNOWN",
    "PLANNED_",
)


class SlurmCli:
    """The Cluster protocol on Slurm's command line, as the user who runs us."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options

    def submit(self, job: Job) -> str:
        """`sbatch`; a failure that may have happened all the same says so."""
        try:
            out = self._run(["sbatch", *sbatch_arguments(job, self.options)], stdin=batch_script(job))
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"sbatch did not answer in {error.timeout:.0f} s", maybe_done=True) from error
        except _CommandFailedError as error:
            if _refused(error.words):
                raise RefusedError(error.words) from error
            raise ClusterError(error.words, maybe_done=True) from error
        job_id = out.strip().split(";", 1)[0]
        if not job_id.isdigit():
            raise ClusterError(f"sbatch printed no job id but {out.strip()[:80]!r}", maybe_done=True)
        return job_id

    def jobs(self) -> list[JobState]:
        """One `squeue` for all jobs of this user that bear our token."""
        argv = [
            "squeue",
            "--me",
            "--noheader",
            "--array",
            "--states=all",
            f"--format={SEPARATOR.join(QUEUE_FIELDS)}",
        ]
        return parse_queue(self._ask(argv), self.options.token)

    def nodes(self) -> list[NodeState]:
        """One `scontrol --details show node` for the whole cluster; nodes of our partition only."""
        nodes = parse_nodes(self._ask(["scontrol", "--details", "--oneliner", "show", "node"]))
        partition = self.options.partition
        return [n for n in nodes if partition is None or partition in n.partitions]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """One `scancel`; ids that are gone are fine."""
        if not job_ids:
            return
        try:
            self._run(["scancel", *job_ids])
        except subprocess.TimeoutExpired as error:
            raise ClusterError("scancel did not answer") from error
        except _CommandFailedError as error:
            if "invalid job id" not in error.words.lower():
                raise ClusterError(error.words) from error

    def check(self, job: Job) -> None:
        """`sbatch --test-only`: validated, not submitted."""
        arguments = ["sbatch", "--test-only", *sbatch_arguments(job, self.options)]
        try:
            self._run(arguments, stdin=batch_script(job))
        except subprocess.TimeoutExpired as error:
            raise ClusterError("sbatch --test-only did not answer") from error
        except _CommandFailedError as error:
            raise RefusedError(error.words) from error

    def controller_host(self) -> str:
        """Where slurmctld runs: the side of this host that faces the cluster is the one that faces it."""
        text = self._ask(["scontrol", "show", "config"])
        match = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", text, re.MULTILINE)
        if match is None:
            raise ClusterError("scontrol show config names no SlurmctldHost")
        return match.group(2) or match.group(1)

    def _ask(self, argv: Sequence[str]) -> str:
        try:
            return self._run(argv)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{argv[0]} did not answer in {error.timeout:.0f} s") from error
        except _CommandFailedError as error:
            raise ClusterError(error.words) from error

    def _run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        command = [*self.options.command_prefix, *argv]
        env = {**os.environ, **self.options.env, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command,
                input=stdin,
                stdin=None if stdin is not None else subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.options.timeout_seconds,
                env=env,
                check=False,
            )
        except OSError as error:
            raise _CommandFailedError(f"{command[0]} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            raise _CommandFailedError(_words(done.stderr) or f"{argv[0]} exited with {done.returncode}")
        return done.stdout


class _CommandFailedError(Exception):
    """A command exited non-zero; `words` is what it said."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


def _words(stderr: str) -> str:
    lines = [
        re.sub(r"^(sbatch|squeue|scontrol|scancel): (error: )?", "", x).strip() for x in stderr.splitlines()
    ]
    return "; ".join(dict.fromkeys(x for x in lines if x))


def _refused(words: str) -> bool:
    lower = words.lower()
    return any(r in lower for r in REFUSALS)


def parse_queue(text: str, token: str) -> list[JobState]:
    """Lines of `squeue` in QUEUE_FIELDS; ClusterError where a line is not of that form."""
    states = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.split(SEPARATOR)
        if len(fields) != len(QUEUE_FIELDS):
            raise ClusterError(f"squeue printed a line that cannot be read: {line[:120]!r}")
        array, index, own, state, node, submitted, started, comment, name, reason = fields
        if comment != token:
            continue
        member = index.isdigit() and array.isdigit()
        states.append(
            JobState(
                job_id=array if member else own,
                name=name,
                index=int(index) if member else 0,
                phase=PHASES.get(state, "unknown"),
                state=state,
                node=node or None,
                reason=reason,
                submitted_at=_seconds(submitted),
                started_at=_seconds(started) if PHASES.get(state) != "pending" else None,
            )
        )
    return states


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def parse_nodes(text: str) -> list[NodeState]:
    """Lines of `scontrol --details --oneliner show node`."""
    nodes = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "NodeName" not in fields:
            if line.strip():
                raise ClusterError(f"scontrol printed a line that cannot be read: {line[:120]!r}")
            continue
        nodes.append(_node(fields))
    return nodes


def _node(fields: dict[str, str]) -> NodeState:
    state = fields.get("State", "UNKNOWN")
    gpus, gpu_type = _gres(fields.get("CfgTRES", ""), fields.get("Gres", ""))
    # AllocTRES knows GPUs only where the site accounts for them; GresUsed always does
    used, _ = _gres(fields.get("AllocTRES", ""), fields.get("GresUsed", ""))
    cpus, memory = _number(fields, "CPUTot"), _number(fields, "RealMemory")
    usable = not any(bad in state.upper() for bad in BAD_NODE) and "*" not in state
    return NodeState(
        name=fields["NodeName"],
        usable=usable,
        state=state,
        gpus=gpus,
        gpus_free=max(0, gpus - used),
        cpus=cpus,
        cpus_free=max(0, cpus - _number(fields, "CPUAlloc")),
        memory_mb=memory,
        memory_free_mb=max(0, memory - _number(fields, "AllocMem")),
        gpu_type=gpu_type,
        partitions=tuple(p for p in fields.get("Partitions", "").split(",") if p),
    )


def _number(fields: dict[str, str], name: str) -> int:
    value = fields.get(name, "0")
    return int(value) if value.isdigit() else 0


def _gres(tres: str, gres: str) -> tuple[int, str]:
    """GPUs and their type from a TRES string ("gres/gpu=8,gres/gpu:a100=8") and a Gres string ("gpu:a100:8(S:0)")."""
    total = re.search(r"(?:^|,)gres/gpu=(\d+)", tres)
    typed = re.findall(r"(?:^|,)gres/gpu:([^=,]+)=(\d+)", tres)
    count = int(total.group(1)) if total else sum(int(n) for _, n in typed)
    kind = typed[0][0] if typed else ""
    listed = re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,(]*))?:(\d+)", gres)
    if not count:
        count = sum(int(n) for _, n in listed)
    return count, kind or (listed[0][0] if listed else "")
