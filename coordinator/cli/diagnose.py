"""`evalspan diagnose`: why a job failed, by its logs, its id, or all failed jobs of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.app import Printed, argument, command, option, say, show_json
from coordinator.errors import OperatorError

if TYPE_CHECKING:
    from coordinator.diagnosis.verdict import Finding


@command()
class Diagnose(Printed):
    """Name the failure that began a job's end: its reason, who must act, and the line that says so.

    LOG may also be the kernel's log (dmesg), torch's error file, or the dumps of the NCCL flight recorder, of several ranks.

    Examples:

    evalspan diagnose slurm-4711.out

    evalspan diagnose 4711

    evalspan diagnose EVALUATION
    """

    what: list[str] = argument("LOG ..., a job's id in Slurm, or an evaluation.")
    state: str = option("With LOG: the state that sacct gives, such as OUT_OF_MEMORY.", default="")
    exit_code: str = option("With LOG: the exit code that sacct gives, such as 0:9.", default="")

    def run(self) -> None:
        from coordinator.cluster.past_jobs import JOB_ID
        from coordinator.diagnosis.verdict import diagnose

        paths = [Path(name) for name in self.what]
        if all(path.is_file() for path in paths):
            found = diagnose(_chunks(paths), state=self.state, exit_code=self.exit_code)
        elif len(self.what) == 1 and JOB_ID.fullmatch(self.what[0]):
            found = _of_job(self.what[0])
        elif len(self.what) == 1 and not paths[0].parent.name and not paths[0].suffix:
            return self._evaluation(self.what[0])
        else:
            missing = next(path for path in paths if not path.is_file())
            raise OperatorError(f"{missing}: there is no such file, job or evaluation")
        if self.as_json:
            return show_json(found.diagnosis.model_dump())
        _show(found)
        return None

    def _evaluation(self, name: str) -> None:
        """Each failed job of it: by its outcome and its log."""
        from coordinator.runtime.causes import failures, of_outcome, of_trial
        from coordinator.runtime.summaries import find_folder
        from coordinator.runtime.summary import died

        paths = find_folder(self.there(), name)
        found = {job: of_trial(paths, job, state) for job, state in died(paths).items()}
        found |= {job: of_outcome(outcome) for job, outcome in failures(paths).items()}
        if self.as_json:
            return show_json({job: one.model_dump() for job, one in found.items()})
        for job, one in found.items():
            say(f"{job}: {one.reason or 'not known'} (owner: {one.owner}): {one.line}")
            say(f"    {one.advice}", "dim")
        if not found:
            say(f"{name}: no job of it failed")
        return None


def _chunks(paths: Iterable[Path]) -> dict[str, Iterator[bytes]]:
    return {str(path): _read(path) for path in paths}


def _read(path: Path) -> Iterator[bytes]:
    from coordinator.diagnosis.lines import CHUNK

    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from error


def _of_job(job_id: str) -> Finding:
    from coordinator.cluster.past_jobs import look_up
    from coordinator.diagnosis.verdict import diagnose

    job = look_up(job_id, _output)
    if job is None:
        raise OperatorError(f"neither `scontrol` nor `sacct` knows a job {job_id} of yours")
    if job.state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"):
        raise OperatorError(f"job {job_id} has not ended: it is {job.state}")
    logs = [path for log in job.logs if (path := Path(log)).is_file()]
    if not logs:
        say(f"no log of job {job_id} is there ({', '.join(job.logs)})", "dim", err=True)
    return diagnose(_chunks(logs), state=job.state, exit_code=job.exit_code)


def _output(argv: Sequence[str]) -> str:
    from coordinator.base.run_command import CommandError, run_command

    try:
        return run_command(argv, seconds=60.0)
    except CommandError:
        return ""


def _show(found: Finding) -> None:
    one = found.diagnosis
    again = (
        ""
        if one.reason in (None, "Healthy")
        else ", a restart can help"
        if one.recoverable
        else ", a restart will not help"
    )
    say(f"{one.reason or 'not known'} (owner: {one.owner}{again})", "bold")
    for line in found.traceback[-12:-1]:
        say(f"    {line}", "dim")
    for log, number, line in found.telling or ((found.log, one.line_number, one.line),):
        place = f"{log}:{number}: " if number else ""
        say(f"{place}{line}" if line else "")
    say(one.advice)
