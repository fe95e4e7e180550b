"""Slurm through its own commands: sbatch, squeue, sinfo, scancel.

Rule: a command that fails, times out or prints what cannot be read is no news (ClusterError), never an empty answer.
One command a call, no retries here: whether to ask again is the machine's to decide.
It does not know: what the jobs are for, what the text means (slurm_text).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.sbatch_text import (
    SlurmOptions,
    batch_script,
    client_environment,
    sbatch_arguments,
    within_limits,
)

IDS_A_CALL = 1000  # keeps a command line far below the kernel's limit


class SlurmCli:
    """The Cluster protocol on Slurm's command line, as the user who runs us."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        self._limits: dict[str | None, int] | None = None  # MaxTime of partitions, by the last look at nodes

    def submit(self, job: Job) -> str:
        """`sbatch`. A failure that may have happened all the same says so: look for the name before asking again."""
        arguments = ["sbatch", *sbatch_arguments(self.within_limits(job), self.options)]
        try:
            out = self._run(arguments, stdin=batch_script(job))
        except _FailedError as error:
            raise text.failure(error.words) from error
        job_id = out.strip().split(";", 1)[0]  # "id;cluster" on sites with several
        if not job_id.isdigit():
            raise ClusterError(f"sbatch printed no job id but {out.strip()[:80]!r}", maybe_done=True)
        return job_id

    def jobs(self) -> list[JobState]:
        """One `squeue` for all jobs of this user; those that bear our token."""
        argv = ["squeue", "--me", "--all", "--array", "--states=all", f"--format={text.QUEUE_FORMAT}"]
        return text.parse_queue(self._ask(argv), self.options.token)

    def nodes(self) -> list[NodeState]:
        """One `sinfo`: the nodes of our partitions (of the site's default one where none is named)."""
        argv = ["sinfo", "--Node", "--all", f"--Format={text.NODE_FORMAT}"]
        said = self._ask(argv)
        self._limits = text.parse_limits(said)
        return text.parse_nodes(said, self.options)

    def within_limits(self, job: Job) -> Job:
        """The job with a time limit within its partition's MaxTime, which the first call asks for by `nodes`."""
        if self._limits is None:
            self.nodes()
        return within_limits(job, self.options, self._limits or {})

    def cancel(self, job_ids: Sequence[str]) -> None:
        """One `scancel` for up to a thousand jobs; ids that are gone are fine."""
        for start in range(0, len(job_ids), IDS_A_CALL):
            try:
                self._run(["scancel", *job_ids[start : start + IDS_A_CALL]])
            except _FailedError as error:
                if error.stderr is None or text.not_cancelled(error.stderr):
                    raise ClusterError(error.words, maybe_done=True) from error

    def check(self, job: Job) -> None:
        """`sbatch --test-only`: validated, not submitted."""
        arguments = [
            "sbatch",
            "--test-only",
            *sbatch_arguments(self.within_limits(job), self.options),
        ]
        try:
            self._run(arguments, stdin=batch_script(job))
        except _FailedError as error:
            if error.stderr is None or text.says(error.words, text.AWAY):
                raise ClusterError(error.words) from error
            if not text.says(error.words, text.WOULD_WAIT):
                raise RefusedError(error.words) from error

    def _ask(self, argv: Sequence[str]) -> str:
        try:
            return self._run(argv)
        except _FailedError as error:
            raise ClusterError(error.words) from error

    def _run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run one command within the time limit; its standard output."""
        command = [*self.options.command_prefix, *argv]
        try:
            return run_command(
                command,
                seconds=self.options.timeout_seconds,
                env=client_environment(os.environ, self.options),
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
    """A command that did not end well: its words in one line, and its stderr (None where it said nothing itself)."""

    def __init__(self, words: str, stderr: str | None) -> None:
        super().__init__(words)
        self.words = words
        self.stderr = stderr
