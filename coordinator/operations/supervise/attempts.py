"""One attempt at a training: a command on this machine, or a Slurm job if the command is `sbatch`. Called by `supervision`.

Rule: nothing of a command outlives its supervision. A Slurm job does, and the next supervision follows it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from coordinator.base.signals import SIGNAL_EXIT_BASE
from coordinator.errors import OperatorError
from coordinator.runtime.causes import FAILED_STATE, read_logs
from coordinator.site.cluster import ClusterError, LimitError, local_guardian
from coordinator.site.cluster.allocation import nodes_of_allocation
from coordinator.site.cluster.past_jobs import PastJob, look_up
from coordinator.site.cluster.slurm_cli import SlurmCli
from coordinator.site.cluster.slurm_limits import remedy_of
from coordinator.site.diagnosis.diagnose import CERTAIN_STATES, Diagnosis, diagnose
from coordinator.site.diagnosis.reader import CHUNK

END_PATIENCE_SECONDS = (
    3600.0  # seconds for a training to exit after SIGTERM; Slurm kills a job's processes sooner
)
MOST_KEPT = 128 << 20  # bytes of output kept for the diagnosis, twice
ASK_SECONDS = 5.0  # between two queries to Slurm
NOTHING_SAID = Diagnosis(reason=None, owner="none", recoverable=True, line="", line_number=None, advice="")
_EXCLUDE = re.compile(r"(?:--exclude=|-x=?)(.*)|--exclude")
OWN_SBATCH_OPTIONS = re.compile(r"--(?:array|wait|comment|requeue|test-only|parsable)(?:=.*)?|-[aW].*")


class Child:
    """A command below a guardian, which ends all of its processes. Its output is passed on.

    `nodes`: a hostlist that may be checked once it has ended, "" for none.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.nodes = nodes_of_allocation(env) if is_srun(argv) else ""
        self._bytes = 0
        self._kept: list[IO[bytes]] = []
        guardian = (sys.executable, "-I", "-S", local_guardian.__file__, str(END_PATIENCE_SECONDS))
        self._process = subprocess.Popen(
            [*guardian, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._pump.start()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), CHUNK):
            self._bytes += len(chunk)
            with suppress(OSError, ValueError):  # a reader that is gone, or a full disk, ends no training
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            with suppress(OSError):
                if not self._kept or self._kept[-1].tell() > MOST_KEPT:
                    self._kept = [*self._kept[-1:], tempfile.TemporaryFile(buffering=0)]  # noqa: SIM115 (deleted already)
                self._kept[-1].write(chunk)

    def code(self) -> int | None:
        """Return the exit code as in a shell; None while it runs. Raise ClusterError if that is unknown now."""
        return self._process.poll()

    def pulse(self) -> object:
        """Return a value that changes with output, or whenever none is due."""
        return self._bytes

    def end(self) -> None:
        """Kill it at once, since it hangs."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guardian then waits for seconds only

    def tell(self, number: int) -> bool:
        """Pass a signal on. Return False if the supervision ends and the training continues."""
        self._process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
        return True

    def cause(self, *, hung: bool) -> Diagnosis:
        """Return why it ended, or why it hangs before it is killed, which leaves lines of its own."""
        if hung:
            return _diagnosed({"": self._chunks()}, "", "")
        self._pump.join()
        code: int = self._process.wait()
        said = (
            f"0:{code - SIGNAL_EXIT_BASE}"
            if SIGNAL_EXIT_BASE < code <= SIGNAL_EXIT_BASE + signal.NSIG
            else f"{code}:0"
        )
        found = _diagnosed({"": self._chunks()}, FAILED_STATE, said)
        return found.model_copy(update={"line": ""}) if found.line.startswith("sacct:") else found

    def _chunks(self) -> Iterator[bytes]:
        for file in list(self._kept):
            at = 0
            while chunk := os.pread(file.fileno(), CHUNK, at):
                at += len(chunk)
                yield chunk


class BatchJob:
    """A job that `sbatch` submitted, with the methods of `Child`. The token of `slurm` is its comment."""

    def __init__(self, slurm: SlurmCli, job_id: str) -> None:
        self.job_id, self.nodes, self._slurm = job_id, "", slurm
        self._job = PastJob("PENDING", "", "", ())
        self._asked = float("-inf")

    @classmethod
    def submitted(
        cls, slurm: SlurmCli, argv: Sequence[str], env: Mapping[str, str], exclude: Sequence[str]
    ) -> BatchJob:
        """Submit a job. Raise OperatorError if Slurm refuses it, ClusterError if it does not answer, or a limit is reached."""
        try:
            return cls(slurm, slurm.sbatch(sbatch_words(argv, slurm.options.token, exclude), env))
        except ClusterError as error:
            if isinstance(error, LimitError) or remedy_of(str(error)) == "away":
                raise
            raise OperatorError(f"{argv[0]}: {error}") from error

    @classmethod
    def running(cls, slurm: SlurmCli) -> BatchJob | None:
        """Return the running job of an earlier supervision. Raise ClusterError if Slurm does not answer."""
        open_ones = (job.job_id for job in slurm.jobs() if job.phase != "ended")
        return next((cls(slurm, job_id) for job_id in open_ones), None)

    def code(self) -> int | None:
        if time.monotonic() - self._asked < ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        found = look_up(self.job_id, self._slurm.ask, CERTAIN_STATES)
        if found is None:  # Slurm has forgotten it: only its log is left
            found = self._job._replace(state="", exit_code="")
        self._job, self.nodes = found, found.nodes if found.nodes not in ("(null)", "None assigned") else ""
        if found.state and not found.has_ended:
            return None
        said, _, number = found.exit_code.partition(":")
        if found.word == "COMPLETED":
            return 0
        return SIGNAL_EXIT_BASE + int(number) if number.isdigit() and int(number) else int(said or 0) or 1

    def pulse(self) -> object:
        if self._job.word != "RUNNING":
            return time.monotonic()
        found = []
        for log in self._job.logs:
            with suppress(OSError):
                now = Path(log).stat()
                found.append((now.st_size, now.st_mtime_ns))
        return found

    def end(self) -> None:
        self._slurm.cancel([self.job_id])

    def tell(self, number: int) -> bool:
        if number in (signal.SIGINT, signal.SIGTERM):
            return False
        name = signal.Signals(number).name[3:]
        self._slurm.ask(["scancel", "--batch", f"--signal={name}", self.job_id])
        return True

    def cause(self, *, hung: bool) -> Diagnosis:
        state = "" if hung else self._job.state or FAILED_STATE
        try:
            logs = read_logs(p for log in self._job.logs if (p := Path(log)).is_file())
            return _diagnosed(logs, state, self._job.exit_code)
        except OperatorError:  # storage is unavailable: only Slurm's state is left
            return _diagnosed({}, state, self._job.exit_code)


Attempt = Child | BatchJob


def sbatch_words(argv: Sequence[str], token: str, exclude: Sequence[str]) -> list[str]:
    """Return the user's `sbatch` with the options of a supervision, keeping its own --exclude. Its script ends its options.

    Raise OperatorError for an option that supervision sets, or that makes more than one job.
    """
    end = _end_of_options(argv)
    if own := next(filter(OWN_SBATCH_OPTIONS.fullmatch, argv[1:end]), None):
        raise OperatorError(f"{own}: supervise sets it itself, or follows one job only: leave it out")
    words = without_nodes(argv[:end], exclude)
    return [words[0], "--parsable", "--no-requeue", f"--comment={token}", *words[1:], *argv[end:]]


def _end_of_options(argv: Sequence[str]) -> int:
    """Return the index of the script, or of the program that `srun` starts."""

    def ends(word: str) -> bool:
        return (
            word.endswith(".sbatch")
            or Path(word).is_file()
            or (is_srun(argv) and shutil.which(word) is not None)
        )

    return next((i for i, word in enumerate(argv) if i and ends(word)), len(argv))


def is_srun(argv: Sequence[str]) -> bool:
    return Path(argv[0]).name == "srun"


def without_nodes(argv: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the user's `sbatch` or `srun` without these nodes, and without those of its own --exclude; other commands as they are."""
    if not exclude or not (is_srun(argv) or Path(argv[0]).name == "sbatch"):
        return list(argv)
    options = argv[: _end_of_options(argv)]
    own = next(((i, found) for i, word in enumerate(options) if (found := _EXCLUDE.fullmatch(word))), None)
    if own is None:
        return [argv[0], f"--exclude={','.join(exclude)}", *argv[1:]]
    index, found = own
    after = index + (1 if found[1] else 2)
    taken = found[1] or argv[index + 1]
    return [*argv[:index], f"--exclude={','.join([*exclude, taken])}", *argv[after:]]


def _diagnosed(logs: Mapping[str, Iterator[bytes]], state: str, code: str) -> Diagnosis:
    """`state` "": it hangs, and a log that tells of nothing is no sign of health."""
    found = diagnose(logs, state=state, exit_code=code if state else "").diagnosis
    return NOTHING_SAID if not state and found.reason == "Healthy" else found
