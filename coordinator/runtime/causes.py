"""Diagnoses of an evaluation's failed jobs, from their outcomes, their logs and Slurm's end state. Called from: `runner`,
`summary`, `supervise`, `evalspan diagnose`.

Rule: only the last MOST_BYTES of a log are read, and nothing while storage is unavailable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from coordinator.errors import OperatorError
from coordinator.site.diagnosis import rules
from coordinator.site.diagnosis.diagnose import Diagnosis, diagnose, diagnose_state
from coordinator.site.diagnosis.reader import CHUNK
from evaljobs.contract import archived_files
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

MOST_BYTES = 1 << 17  # the coordinator reads this much between two turns, for each trial that died
FAILED_STATE = "FAILED"  # Slurm's state where nothing more is known


def accept_rules(work: WorkPaths) -> None:
    """Load the rules that a person put into the work folder. Raise OperatorError if they are invalid."""
    try:
        rules.accept_table(work.rules.read_text("utf-8") if work.rules.exists() else "")
    except (OSError, ValueError) as error:
        raise OperatorError(f"{work.rules}: {error}") from error


def read_logs(paths: Iterable[Path]) -> dict[str, Iterator[bytes]]:
    """Return logs by name, in chunks. Iterating raises OperatorError if one cannot be read."""
    return {str(path): _read(path) for path in paths}


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from error


def job_failures(paths: EvaluationPaths) -> dict[str, Failed]:
    """Return job or trial -> the outcome of its failure, retried ones included."""
    found = {}
    for file in archived_files.files_in(paths.outcomes, "*.failed.json"):
        with suppress(OSError, ValidationError):
            outcome = OUTCOME.validate_json(archived_files.read_bytes(file))
            if isinstance(outcome, Failed):
                found[outcome.name] = outcome
    return found


def cause_of_outcome(outcome: Failed) -> Diagnosis:
    """Diagnose by the traceback, or by the error if the traceback is unknown."""
    found = diagnose({"": [(outcome.detail or outcome.error).encode()]}, state=FAILED_STATE).diagnosis
    if found.reason is None:
        found = diagnose({"": [outcome.error.encode()]}, state=FAILED_STATE).diagnosis
        found = (
            found if found.reason else found.model_copy(update={"line": outcome.error, "line_number": None})
        )
    return found


def cause_of_log(log: Path, word: str) -> Diagnosis:
    """Diagnose a job or trial without an outcome. `word`: the cluster's end state, which takes precedence over the log."""
    said = diagnose_state(word or FAILED_STATE)
    if said.reason is not None:
        return said
    logs = {}
    with suppress(OSError), archived_files.open_file(log) as file:
        file.seek(max(0, archived_files.file_size(log) - MOST_BYTES))
        logs = {log.name: [file.read(MOST_BYTES)]}
    return diagnose(logs, state=word or FAILED_STATE).diagnosis


def cause_of_trial(paths: EvaluationPaths, trial: str, word: str) -> Diagnosis:
    """Diagnose a trial by name, like `cause_of_log`."""
    logs = [paths.log(trial), paths.log(trial.removesuffix(".0"))]
    return cause_of_log(next(filter(archived_files.file_exists, logs), logs[0]), word)
