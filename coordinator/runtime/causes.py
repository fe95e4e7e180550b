"""Why jobs of an evaluation failed, by the outcomes and logs that they left, and Slurm's word. Called from: `runner`, `summary`,
`evalspan diagnose`.

Rule: of a log the last MOST_BYTES are read, and nothing where storage is away.
"""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from coordinator.diagnosis.verdict import Diagnosis, diagnose
from evaljobs.contract import folded
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths

MOST_BYTES = 1 << 20
FAILED = "FAILED"  # Slurm's word where nothing more is known


def failures(paths: EvaluationPaths) -> dict[str, Failed]:
    """Job or trial -> the outcome of its failure; retried ones included."""
    found = {}
    for file in folded.files_in(paths.outcomes, "*.failed.json"):
        with suppress(OSError, ValidationError):
            outcome = OUTCOME.validate_json(folded.read_bytes(file))
            if isinstance(outcome, Failed):
                found[outcome.name] = outcome
    return found


def of_outcome(outcome: Failed) -> Diagnosis:
    """By its traceback; by its error where that says nothing."""
    found = diagnose({"": [(outcome.detail or outcome.error).encode()]}, state=FAILED).diagnosis
    if found.reason is None:
        found = diagnose({"": [outcome.error.encode()]}, state=FAILED).diagnosis
        found = (
            found if found.reason else found.model_copy(update={"line": outcome.error, "line_number": None})
        )
    return found


def of_log(paths: EvaluationPaths, job: str, state: str) -> Diagnosis:
    """Of a job or trial that left no outcome. `state`: the cluster's word for its end."""
    logs = {}
    for name in (job, job.removesuffix(".0")):
        with suppress(OSError):
            logs = {name: [folded.read_bytes(paths.log(name))[-MOST_BYTES:]]}
            break
    return diagnose(logs, state=state or FAILED).diagnosis


def in_words(cause: Diagnosis, said: str = "") -> str:
    """Reason, owner and line. `said`: what stands there already, such as a job's error."""
    line = said or cause.line
    if cause.reason is None or cause.reason in line:
        return line
    more = (
        f": {cause.line}"
        if said and cause.line and not cause.line.startswith("sacct:") and cause.line not in said
        else ""
    )
    return f"{cause.reason} (owner: {cause.owner}): {line}{more}"
