"""Builds by CPU jobs: a Hugging Face folder of the announced checkpoint, then the request sets of the suite's entries.

Rule: nothing is built or staged before the converted folder was inspected. A build job makes its entries one after the
other, so the first that is not built was at work when the job ended; it has an attempt less, the others have not.
Called from: `step`, `job_ends`, `ending`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from coordinator.evaluation import indexes, jobs, memory
from coordinator.evaluation.actions import Action, FindRequestSets, InspectConverted
from coordinator.evaluation.events import (
    CheckpointConverted,
    Closed,
    EntryFailed,
    JobIntended,
    RequestSetsFound,
)
from coordinator.evaluation.job_specs import Site, build_job, convert_job
from coordinator.evaluation.jobs import NO_FAULT_OF_A_JOB, Due
from coordinator.evaluation.state import EntryState, IllegalEventError, JobInfo, Phase, State
from evaljobs.contract.outcomes import Built, Converted, Failed, Probed

MAX_CONVERSIONS = 3  # jobs that ended without an outcome
MAX_BUILDS = 3  # attempts of one entry
# tasks of at most so many documents share a build job: each takes about a second, importing lm-eval takes five
FEW_DOCUMENTS = 100
FEW_A_JOB = 4  # such entries
# build jobs in a row, for each that runs at a time, that had nothing built: then all entries fail
MAX_DEATHS = 6
HAVE_SETS = ("built", "scoring")  # statuses of entries that read their request sets
MAX_PAUSE_SECONDS = 600.0  # longest pause after a build job that its node could not launch


# --- the conversion of a checkpoint ----------------------------------------------------------------------------------------


def begin_conversion(state: State) -> list[Action]:
    """Of a newly accepted evaluation: convert first, where that is asked for, or look for request sets at once."""
    if state.record.convert is not None:
        state.conversion.status, state.conversion.announced = "due", state.record.checkpoint
        return []
    return [FindRequestSets(record=state.record)]


def conversion_due(state: State, site: Site, now: float) -> Due:
    if state.conversion.status == "due" and state.ending.phase == Phase.RUNNING:
        yield convert_job(state, site, now)


def conversion_intended(state: State, _event: JobIntended) -> None:
    state.conversion.status = "running"


def conversion_ended(state: State, outcome: Converted, _at: float) -> list[Action]:
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


def conversion_failed(state: State, outcome: Failed, _at: float) -> list[Action]:
    if outcome.blame == "operator":
        state.ending.close(outcome.error)
    return []  # otherwise its job's end says that it is due again


def conversion_over(state: State, info: JobInfo, word: str) -> Due:
    conversion = state.conversion
    if conversion.status != "running":
        return []
    conversion.status = "due"
    if word == memory.OUT_OF_MEMORY and memory.job_short(state, info):
        return []
    conversion.attempts += word not in NO_FAULT_OF_A_JOB
    if conversion.attempts < MAX_CONVERSIONS:
        return []
    why = f"the conversion ended {MAX_CONVERSIONS} times ({word}); see {info.job.log}"
    return [Closed(at=info.changed_at, reason=why)]


def convert_again(state: State) -> None:
    """A new attempt of an evaluation that had ended: what was converted was removed at its end."""
    state.conversion.attempts = 0
    if state.conversion.status != "none":
        state.conversion.status = "due"


def conversion_restarted(state: State) -> list[Action]:
    actions: list[Action] = []
    if state.conversion.status in ("made", "done"):
        actions.append(InspectConverted(path=state.conversion.path))
    if not state.builds.looked_up and state.conversion.status in ("none", "done"):
        actions.append(FindRequestSets(record=state.record))
    return actions


# --- request sets ------------------------------------------------------------------------------------------------------------


def found(state: State, event: RequestSetsFound) -> list[Action]:
    """The request sets on disk: an entry whose sets were removed meanwhile has them built again."""
    if event.folders.keys() != set(range(len(state.entries))):
        raise IllegalEventError("request sets were looked up for other entries")
    for entry in state.entries:
        entry.folder = event.folders[entry.index]
        if entry.status in HAVE_SETS:
            if entry.index not in event.sets:
                state.plan.pending = False
                again(state, entry)
        elif entry.index in event.sets and not entry.terminal:
            entry.sets = event.sets[entry.index]
            entry.status = "built"
            indexes.file_entry(state, entry)
    state.builds.looked_up = True
    state.batch_size = event.batch_size
    return []


def builds_due(state: State, site: Site, now: float) -> Due:
    unbuilt = state.index.entries.get("unbuilt")
    if not unbuilt or now < state.builds.due_at:
        return
    waiting = [unbuilt[i] for i in sorted(unbuilt)]
    parts = min(state.record.options.build_jobs, _worth_a_job(state, waiting))
    for part in range(parts):
        yield build_job(state, site, waiting[part::parts], now)


def _worth_a_job(state: State, waiting: Sequence[EntryState]) -> int:
    """Jobs that build these entries soonest: one for each, or for each four with few documents."""
    few = sum(_has_few(state, entry) for entry in waiting)
    return len(waiting) - few + ceil(few / FEW_A_JOB)


def _has_few(state: State, entry: EntryState) -> bool:
    """A limit holds for each leaf task: of a group, or of what may be one, it says little."""
    limit = state.record.suite.tasks[entry.index].limit
    return limit is not None and 1 <= limit <= FEW_DOCUMENTS and entry.name in state.record.inputs.single


def end_soon(state: State) -> bool:
    """Whether build jobs are at work, on entries with few documents alone."""
    building = state.index.entries.get("building", {})
    return bool(building) and all(_has_few(state, entry) for entry in building.values())


def intended(state: State, event: JobIntended) -> None:
    for index in event.entries:
        entry = state.entries[index]
        entry.status, entry.build_job = "building", event.job.name
        indexes.file_entry(state, entry)


def built(state: State, outcome: Built, _at: float) -> list[Action]:
    entry = state.entries[outcome.entry]
    if entry.terminal or (outcome.batch_size, outcome.cut) != (state.batch_size, state.cut_of(entry)):
        return []
    entry.sets = outcome.sets
    entry.status = "built"
    entry.error = ""
    indexes.file_entry(state, entry)
    state.builds.deaths_without_progress = 0
    return []


def probed(state: State, outcome: Probed, _at: float) -> list[Action]:
    """The batch size is known, and the token budget with it: requests are there, and their batches are added."""
    if state.batch_size != "auto":
        return []
    state.batch_size = outcome.batch_size
    if state.token_budget == "auto":  # noqa: S105 (no password)
        state.token_budget = outcome.token_budget
    for entry in state.entries:
        if entry.status == "built":
            again(state, entry)
    return []


def again(state: State, entry: EntryState) -> None:
    """The entry's requests lack the batches of its cut, or were removed."""
    entry.status = "unbuilt"
    entry.build_attempts = 0
    indexes.file_entry(state, entry)


def failed(state: State, outcome: Failed, at: float) -> Due:
    if outcome.entry is None:
        return []
    entry = state.entries[outcome.entry]
    if entry.status != "building":
        return []
    entry.build_attempts += 1
    state.builds.deaths_without_progress = 0
    if outcome.blame == "operator" or entry.build_attempts >= MAX_BUILDS:
        return [EntryFailed(at=at, entry=entry.index, error=outcome.error)]
    entry.status = "unbuilt"
    indexes.file_entry(state, entry)
    return []


def job_over(state: State, info: JobInfo, word: str) -> Due:
    """Where jobs end again and again and nothing is built in between, the entries are not the reason: all of them fail."""
    mine = (state.entries[i] for i in info.entries)
    left = [e for e in mine if e.build_job == info.job.name and e.status == "building"]
    for entry in left:
        entry.status = "unbuilt"
        indexes.file_entry(state, entry)
    if not left or word in NO_FAULT_OF_A_JOB:
        return []
    if word == memory.OUT_OF_MEMORY:
        if memory.job_short(state, info):
            return []
        word = memory.why(state, "build", "it")
    first, builds = left[0], state.builds
    builds.deaths_without_progress += 1
    if info.unlaunched or info.refused:  # a node's fault alone: again, on another node
        rounds = (builds.deaths_without_progress - 1) // state.record.options.build_jobs
        builds.due_at = info.changed_at + min(jobs.HELD_SECONDS * 2**rounds, MAX_PAUSE_SECONDS)
    else:
        first.build_attempts += 1
    hopeless = builds.deaths_without_progress >= MAX_DEATHS * state.record.options.build_jobs
    if first.build_attempts < MAX_BUILDS and not hopeless:
        return []
    why = f"its build job ended {first.build_attempts} times ({word}); see {info.job.log}"
    if info.unlaunched:
        why = f"no node could launch its build job; the last: {info.unlaunched} ({word})"
    lost = left if hopeless else left[:1]
    return [EntryFailed(at=info.changed_at, entry=entry.index, error=why) for entry in lost]
