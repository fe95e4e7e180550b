"""Conversion: a job makes a Hugging Face folder of the announced checkpoint before anything else begins.

Rule: three jobs that end without an outcome end the evaluation; nothing is built or staged before the folder was
inspected. Called from: `step`, `job_ends`, `ending`.
"""

from __future__ import annotations

from coordinator.evaluation import jobs
from coordinator.evaluation.actions import Action, FindRequestSets, InspectConverted
from coordinator.evaluation.events import CheckpointConverted, JobIntended
from coordinator.evaluation.job_specs import Site, convert_job
from coordinator.evaluation.jobs import NO_FAULT_OF_A_JOB, Due
from coordinator.evaluation.state import JobInfo, Phase, State
from evaljobs.contract.outcomes import Converted, Failed

MAX_CONVERSIONS = 3


def begin(state: State) -> list[Action]:
    """Of a newly accepted evaluation: convert first, where that is asked for, or look for request sets at once."""
    if state.record.convert is not None:
        state.conversion.status, state.conversion.announced = "due", state.record.checkpoint
        return []
    return [FindRequestSets(record=state.record)]


def due(state: State, site: Site, now: float, *, submits: bool) -> Due:
    if state.conversion.status != "due" or state.ending.phase != Phase.RUNNING or not submits:
        return []
    event = convert_job(state, site, now)
    intended(state, event)
    return jobs.submission(event)


def intended(state: State, event: JobIntended) -> list[Action]:
    jobs.intended(state, event)
    state.conversion.status = "running"
    return []


def ended(state: State, outcome: Converted, _at: float) -> list[Action]:
    if state.conversion.status != "running":
        return []
    state.conversion.status, state.conversion.path = "made", outcome.path
    return [InspectConverted(path=outcome.path)]


def inspected(state: State, event: CheckpointConverted) -> list[Action]:
    if state.conversion.status == "done" and event.checkpoint is None:
        state.conversion.status = "due"  # its folder was removed since then
    if state.conversion.status != "made":
        return []
    if event.checkpoint is None:
        state.ending.close(f"[checkpoint] convert left no checkpoint: {event.error}")
        return []
    state.conversion.status = "done"
    state.record = state.record.model_copy(update={"checkpoint": event.checkpoint})
    return [] if state.builds.looked_up else [FindRequestSets(record=state.record)]


def failed(state: State, outcome: Failed, _at: float) -> list[Action]:
    if outcome.blame == "operator":
        state.ending.close(outcome.error)
    return []  # otherwise its job's end says that it is due again


def job_over(state: State, info: JobInfo, word: str) -> None:
    conversion = state.conversion
    if conversion.status != "running":
        return
    conversion.status = "due"
    conversion.attempts += word not in NO_FAULT_OF_A_JOB
    if conversion.attempts >= MAX_CONVERSIONS:
        state.ending.close(f"the conversion ended {MAX_CONVERSIONS} times ({word}); see {info.job.log}")


def again(state: State) -> None:
    """A new attempt of an evaluation that had ended: what was converted was removed at its end."""
    state.conversion.attempts = 0
    if state.conversion.status != "none":
        state.conversion.status = "due"


def restarted(state: State) -> list[Action]:
    actions: list[Action] = []
    if state.conversion.status in ("made", "done"):
        actions.append(InspectConverted(path=state.conversion.path))
    if not state.builds.looked_up and state.conversion.status in ("none", "done"):
        actions.append(FindRequestSets(record=state.record))
    return actions
