"""Slurm through its commands: sbatch, squeue, sinfo, scancel.

Rule: a command that fails, times out or prints unreadable text raises ClusterError and never gives
an empty answer. One command per call, without retries: `evaluation` decides on those.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.cluster import slurm_accounts as accounts
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.job_environment import client_environment, submission_environment
from coordinator.cluster.node_choice import place
from coordinator.cluster.sbatch_text import (
    SlurmOptions,
    batch_script,
    sbatch_arguments,
    within_limits,
)
from coordinator.cluster.slurm_limits import ends, failure
from coordinator.cluster.slurm_rules import parse_partitions, partition_qos

IDS_A_CALL = 1000  # most job ids of one `scancel`, far below the kernel's limit


class SlurmCli:
    """The Cluster protocol on Slurm's command line, as this process's user."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        # MaxTime by partition, and nodes, from the last listing of nodes
        self._limits: dict[str | None, int] | None = None
        self._nodes: list[NodeState] = []
        self._walls: dict[tuple[str, str], int] | None = None  # MaxWall of accounts and QOS, asked once
        self._partition_qos: dict[str | None, str] = {}  # asked with it

    def submit(self, job: Job) -> str:
        """Run `sbatch`. After a ClusterError, look for the job's name before a retry."""
        arguments = ["sbatch", *sbatch_arguments(self.within_limits(job), self.options)]
        try:
            env = self.environment_of(job)
            out = self._run(arguments, stdin=batch_script(job, self.options.log_mode), env=env)
        except _FailedError as error:
            raise failure(error.words) from error
        job_id = out.strip().split(";", 1)[0]  # "id;cluster" on sites with several
        if not job_id.isdigit():
            raise ClusterError(f"sbatch printed no job id but {out.strip()[:80]!r}")
        return job_id

    def environment_of(self, job: Job) -> dict[str, str]:
        """The environment of a submission, and so of its job."""
        options = self.options
        return submission_environment(
            os.environ,
            options.env,
            export=options.settings.cluster.export,
            secrets=options.secrets,
            given=job.secrets,
        )

    def jobs(self) -> list[JobState]:
        """Run one `squeue` for this user; the jobs whose comment has the token."""
        argv = ["squeue", "--me", "--all", "--array", "--states=all", f"--format={text.QUEUE_FORMAT}"]
        return text.parse_queue(self._ask(argv), self.options.token)

    def jobs_named(self, name: str) -> list[JobState]:
        """Run one `squeue` for this user's jobs of that name, whatever their comment."""
        argv = ["squeue", "--me", "--all", "--array", f"--name={name}", f"--format={text.QUEUE_FORMAT}"]
        return text.parse_queue(self._ask(argv), None)

    def nodes(self) -> list[NodeState]:
        """Run one `sinfo`: the nodes of the set partitions, or of the site's default one.

        Where no node with GPUs can be used and some are reserved, `scontrol` says until when.
        """
        rows = self._node_rows()
        self._limits = text.max_times(rows)
        self._nodes = text.nodes_of(rows, self.options)
        if any(n.usable and n.gpus for n in self._nodes):
            return list(self._nodes)
        return self._with_reservations(self._nodes)

    def _with_reservations(self, nodes: list[NodeState]) -> list[NodeState]:
        if not any(text.is_reserved(n) for n in nodes):
            return list(nodes)
        try:
            found = text.parse_reservations(self._run(["scontrol", "--oneliner", "show", "reservation"]))
        except _FailedError:
            return list(nodes)
        said = "; ".join(str(reservation) for reservation in found if reservation.active)
        return [replace(n, reason=said) if said and text.is_reserved(n) else n for n in nodes]

    def within_limits(self, job: Job) -> Job:
        """Cut the job's time limit to what its partition, account and QOS allow, and keep it off excluded nodes.

        The first call asks for them.
        """
        if self._limits is None:
            self.nodes()
        if self._walls is None:
            self._walls = self._ask_walls()
        placed = place(job, self._nodes)
        return within_limits(placed, self.options, self._limits or {}, self._walls, self._partition_qos)

    def _ask_walls(self) -> dict[tuple[str, str], int] | None:
        """From slurmctld, since slurmdbd may be away. Empty where the site hides them, None where it did not answer."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
            argv = ["scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos", f"users={user}"]
            said = self._run(argv)
            walls = accounts.parse_walls(said)
            if any(kind == "qos" for kind, _ in walls):
                shown = self._run(["scontrol", "--all", "--oneliner", "show", "partition"])
                self._partition_qos = partition_qos(parse_partitions(shown))
                walls |= self._default_walls(user, accounts.cluster_of(said), walls)
        except KeyError:
            return {}
        except _FailedError as error:
            return None if error.stderr is None or ends(error.words) == "away" else {}
        return walls

    def _default_walls(
        self, user: str, cluster: str, walls: dict[tuple[str, str], int]
    ) -> dict[tuple[str, str], int]:
        """From slurmdbd, which alone shows which QOS is the default one. Empty where it does not answer."""
        argv = ["sacctmgr", "-nP", "show", "user", user, "withassoc", f"cluster={cluster}"]
        try:
            return accounts.default_walls(self._run([*argv, f"format={accounts.DEFAULT_QOS_FORMAT}"]), walls)
        except _FailedError:
            return {}

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Run one `scancel` per thousand jobs; ignores ids that are gone."""
        for start in range(0, len(job_ids), IDS_A_CALL):
            try:
                self._run(["scancel", *job_ids[start : start + IDS_A_CALL]])
            except _FailedError as error:
                if error.stderr is None or text.not_cancelled(error.stderr):
                    raise ClusterError(error.words) from error

    def check(self, job: Job) -> None:
        """Run `sbatch --test-only`: validates, submits nothing."""
        arguments = [
            "sbatch",
            "--test-only",
            *sbatch_arguments(self.within_limits(job), self.options),
        ]
        try:
            self._run(arguments, stdin=batch_script(job, self.options.log_mode))
        except _FailedError as error:
            if error.stderr is None or ends(error.words) == "away":
                raise ClusterError(error.words) from error
            if ends(error.words) != "time":  # else it would wait
                raise RefusedError(error.words) from error

    def _node_rows(self) -> list[text.NodeRow]:
        """All nodes, in each of their partitions."""
        return text.parse_sinfo(self._ask(["sinfo", "--Node", "--all", f"--Format={text.NODE_FORMAT}"]))

    def _ask(self, argv: Sequence[str]) -> str:
        try:
            return self._run(argv)
        except _FailedError as error:
            raise ClusterError(error.words) from error

    def _run(self, argv: Sequence[str], stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        """Run one command within the time limit and return its standard output."""
        command = [*self.options.command_prefix, *argv]
        try:
            return run_command(
                command,
                seconds=self.options.timeout_seconds,
                env=env or client_environment(os.environ, self.options.env),
                stdin=stdin,
            )
        except CommandError as error:
            if error.code is None:
                program = argv[0] if error.timed_out else command[0]
                raise _FailedError(f"{program} {error}", None) from error
            words = text.own_words(error.stderr)
            if not words:
                raise _FailedError(f"{argv[0]} exited with {error.code} and said nothing", None) from error
            raise _FailedError(words, error.stderr) from error


class _FailedError(Exception):
    """A command that failed: its words in one line, and its stderr (None where it printed none)."""

    def __init__(self, words: str, stderr: str | None) -> None:
        super().__init__(words)
        self.words = words
        self.stderr = stderr
