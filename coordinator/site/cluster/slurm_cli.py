"""Slurm through its commands: sbatch, squeue, sinfo, scancel; or with jobs and nodes listed by pyslurm.

Rule: a command that fails, times out or prints unreadable text raises ClusterError and never returns an empty answer. One
command per call, without retries: `evaluation` decides on those. With `[cluster] api = "pyslurm"` queries run in a separate
process (`pyslurm_queries`), which is killed if it does not answer in time; commands submit, cancel and query the site's
rules. pyslurm is GPL-2.0: the optional extra `slurm`, never bundled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.site.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.site.cluster import slurm_parse as text
from coordinator.site.cluster.job_environment import client_environment, submission_environment
from coordinator.site.cluster.node_choice import place_job
from coordinator.site.cluster.pyslurm_queries import GPU
from coordinator.site.cluster.sbatch_text import SlurmOptions, batch_script, sbatch_arguments
from coordinator.site.cluster.slurm_accounts import Accounting
from coordinator.site.cluster.slurm_limits import remedy_of, submission_error
from coordinator.site.cluster.slurm_parse import NodeRow
from coordinator.site.cluster.slurm_rules import SiteRules, ask_accounting, ask_rules, within_limits

LIMITS_SECONDS = 600.0  # after which MaxTime and MaxWall are queried again
IDS_A_CALL = 1000  # job ids per `scancel`, far below the kernel's limit


class SlurmCli:
    """The Cluster protocol on Slurm's command line, as this process's user."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        self._nodes: list[NodeState] | None = None  # from the last listing
        self._rules, self._accounting = SiteRules(config={}), Accounting()
        self._asked_at = float("-inf")  # when the rules were last queried, in monotonic seconds

    def submit(self, job: Job) -> str:
        """Run `sbatch`. After a ClusterError, look for the job's name before a retry."""
        options = self.options
        words = ["sbatch", *sbatch_arguments(self.within_limits(job), options)]
        env = submission_environment(
            os.environ,
            options.env,
            export=options.settings.cluster.export,
            secrets=options.secrets,
            given=job.secrets,
        )
        return self.sbatch(words, env, batch_script(job, options.log_mode))

    def sbatch(self, words: Sequence[str], env: Mapping[str, str], script: str = "") -> str:
        """Run this `sbatch --parsable …` and return the job's id. `env`: its complete environment. Raises like `submit`."""
        try:
            out = self.ask(words, stdin=script, env=env)
        except ClusterError as error:
            raise submission_error(str(error)) from error
        last = out.strip().rpartition("\n")[2]  # a wrapper of the site may print lines first
        job_id = last.split(";", 1)[0]  # "id;cluster" on sites with several clusters
        if not job_id.isdigit():
            raise ClusterError(f"sbatch printed no job id but {out.strip()[:80]!r}")
        return job_id

    def jobs(self) -> list[JobState]:
        """Run one `squeue` for this user and return the jobs whose comment has the token."""
        return self._queue("--states=all", self.options.token)

    def jobs_named(self, name: str) -> list[JobState]:
        """Run one `squeue` for this user's jobs of that name, whatever their comment."""
        return self._queue(f"--name={name}", None)

    def _queue(self, wanted: str, token: str | None) -> list[JobState]:
        # --local: otherwise each query goes to the federation, too
        argv = ["squeue", "--me", "--local", "--all", "--array", wanted, f"--format={text.QUEUE_FORMAT}"]
        return text.parse_queue(self.ask(argv), token)

    def nodes(self) -> list[NodeState]:
        """Run one `sinfo` and return the nodes of the set partitions, or of the site's default one.

        If no node with GPUs can be used and some are reserved, `scontrol` tells until when.
        """
        self._nodes = text.nodes_of(self._node_rows(), self.options)
        if any(n.usable and n.gpus for n in self._nodes):
            return list(self._nodes)
        return self._with_reservations(self._nodes)

    def _with_reservations(self, nodes: list[NodeState]) -> list[NodeState]:
        if not any(text.is_reserved(n) for n in nodes):
            return list(nodes)
        try:
            found = text.parse_reservations(self.ask(["scontrol", "--oneliner", "show", "reservation"]))
        except ClusterError:
            return list(nodes)
        said = "; ".join(str(reservation) for reservation in found if reservation.active)
        return [replace(n, reason=said) if said and text.is_reserved(n) else n for n in nodes]

    def within_limits(self, job: Job) -> Job:
        """Reduce the job's time limit to what its partition, account and QOS allow, and keep it off excluded nodes.

        Raise ClusterError without the site's rules, since Slurm permanently refuses, or never starts, a job that exceeds
        MaxTime.
        """
        if self._nodes is None:
            self.nodes()
        return within_limits(place_job(job, self._nodes or ()), self.options, self.rules(), self._accounting)

    def rules(self) -> SiteRules:
        """Return the rules, queried with accounting every LIMITS_SECONDS; if Slurm does not answer, the last ones.

        Raise ClusterError if there are none.
        """
        if time.monotonic() > self._asked_at + LIMITS_SECONDS:
            try:
                self._rules = ask_rules(self.ask)
                self._asked_at = time.monotonic()  # accounting may be unavailable for longer
                self._accounting = ask_accounting(self._rules, self.ask) or Accounting()
            except ClusterError:
                if not self._rules.config:
                    raise
        return self._rules

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Run one `scancel` per thousand jobs; ignores ids that are gone."""
        for start in range(0, len(job_ids), IDS_A_CALL):
            try:
                self.ask(["scancel", *job_ids[start : start + IDS_A_CALL]])
            except ClusterError as error:
                if error.stderr is None or text.not_cancelled(error.stderr):
                    raise

    def check(self, job: Job) -> None:
        """Run `sbatch --test-only`, which validates and submits nothing."""
        words = ["sbatch", "--test-only", *sbatch_arguments(self.within_limits(job), self.options)]
        try:
            self.ask(words, stdin=batch_script(job, self.options.log_mode))
        except ClusterError as error:
            if error.stderr is None or remedy_of(str(error)) == "away":
                raise
            if remedy_of(str(error)) != "time":  # otherwise it would wait
                raise RefusedError(str(error)) from error

    def _node_rows(self) -> list[text.NodeRow]:
        return text.parse_sinfo(self.ask(["sinfo", "--Node", "--all", f"--Format={text.NODE_FORMAT}"]))

    def ask(self, argv: Sequence[str], stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        command = [*self.options.command_prefix, *argv]
        try:
            return run_command(
                command,
                seconds=self.options.timeout_seconds,
                env=env or client_environment(os.environ, self.options.env),
                stdin=stdin,
            )
        except CommandError as error:
            said = text.own_words(error.stderr)
            words = said or f"{argv[0]} exited with {error.code} without a message"
            if error.code is None:
                words = f"{argv[0] if error.timed_out else command[0]} {error}"
            failed = ClusterError(words)
            failed.stderr = error.stderr if said else None
            raise failed from error


USE_COMMANDS = 'use [cluster] api = "cli"'
INSTALL_HINT = (
    "install it with `pip install 'evalspan[slurm]'` on a machine with the headers and libslurmfull.so of Slurm 25.11 "
    f"(SLURM_INCLUDE_DIR, SLURM_LIB_DIR), or {USE_COMMANDS}"
)
# Slurm's messages if library and controller are incompatible, and if slurmctld is exiting.
OTHER_VERSION = ("incompatible versions", "protocol version", "zero bytes")
BY_COMMANDS = "submissions (sbatch), cancellations (scancel), the site's rules (scontrol)"
NODES_BY_COMMAND = ", nodes (sinfo: AccountingStorageTRES lacks gres/gpu, so pyslurm shows no GPUs in use)"


class SlurmApi(SlurmCli):
    """The Cluster protocol with pyslurm's listings, as this process's user. Raise RefusedError without a matching pyslurm."""

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options)
        try:
            self.version = self._query("version")["version"]
            slurm = self.ask(["sinfo", "--version"]).split()
        except ClusterError as error:
            raise RefusedError(str(error)) from error
        if len(slurm) > 1 and slurm[1].split(".")[:2] != self.version.split(".")[:2]:
            raise RefusedError(
                f"pyslurm {self.version} is built for a version other than this Slurm ({slurm[1]}): {INSTALL_HINT}"
            )

    @property
    def by_commands(self) -> str:
        """Describe what is still done by Slurm's commands."""
        return BY_COMMANDS + NODES_BY_COMMAND * self._nodes_by_command()

    def _nodes_by_command(self) -> bool:
        return GPU not in self.rules().config.get("AccountingStorageTRES", "").split(",")

    def jobs(self) -> list[JobState]:
        """Run one query and return the jobs whose comment has the token."""
        return [JobState(**row) for row in self._query("jobs", self.options.token)["found"]]

    def _node_rows(self) -> list[NodeRow]:
        if self._nodes_by_command():  # otherwise GPUs in use would appear free
            return super()._node_rows()
        found = self._query("nodes")["found"]
        of = {"features", "partitions"}
        return [
            (NodeState(**node | {key: tuple(node[key]) for key in of}), default) for node, default in found
        ]

    def _query(self, *words: str) -> Any:
        """Return the answer of one pyslurm process. Raise ClusterError."""
        argv = [
            *self.options.command_prefix,
            sys.executable,
            "-m",
            "coordinator.site.cluster.pyslurm_queries",
        ]
        # Slurm's library abbreviates the list of an array's pending members unless SLURM_BITSTR_LEN=0.
        env = {**client_environment(os.environ, self.options.env), "SLURM_BITSTR_LEN": "0"}
        try:
            return json.loads(run_command([*argv, *words], seconds=self.options.timeout_seconds, env=env))
        except CommandError as error:
            said = f"pyslurm: {error}"
            if error.timed_out:
                said += "; is slurmctld up?"
            elif "No module named 'pyslurm'" in str(error):
                said = f"pyslurm is not installed: {INSTALL_HINT}"
            elif any(words in str(error).lower() for words in OTHER_VERSION):
                said += f": if squeue answers, pyslurm does not match this Slurm version; {USE_COMMANDS}"
            raise ClusterError(said) from error
