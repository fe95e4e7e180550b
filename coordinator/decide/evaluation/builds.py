"""Builds on CPUs: a Hugging Face copy of the announced checkpoint, then the request sets of the suite's entries.

Rule: nothing is built or staged before the converted folder has been inspected. A build job builds its entries in sequence,
so the first unbuilt one was in progress when the job ended; only that entry is charged an attempt. Batch sizes never mix
within a task. A fixed batch size is never changed: if it does not fit a GPU's memory the task fails, and the message names
the size that fits. In fast mode the unit follows from the token budget, so the entry's budget is reduced (and journalled),
and all of its planned likelihoods are cut, planned and run again; answers from the old cut no longer count. Called from:
`step`, `job_ends`, `ending`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from coordinator.decide.evaluation import shards
from coordinator.decide.evaluation.actions import Action, FindRequestSets, InspectConverted
from coordinator.decide.evaluation.events import (
    CheckpointConverted,
    Closed,
    EntryFailed,
    JobIntended,
    RequestSetsFound,
    TokenBudgetReduced,
)
from coordinator.decide.evaluation.footprint import OUT_OF_MEMORY, job_gets_more, out_of_memory_words
from coordinator.decide.evaluation.job_specs import Site, build_job, convert_job
from coordinator.decide.evaluation.jobs import NO_FAULT_OF_A_JOB, Due
from coordinator.decide.evaluation.records import cut_on_disk
from coordinator.decide.evaluation.state import EntryState, IllegalEventError, JobInfo, Phase, State
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import Built, Converted, Failed, Probed, TooLarge

# tasks with at most this many documents share a build job: each builds in about a second, importing lm-eval takes five
FEW_DOCUMENTS = 100
FEW_A_JOB = 4  # entries of this size in one job
# consecutive build jobs without a result, for each job that runs at once, before all entries fail
MAX_DEATHS = 6
HAVE_SETS = ("built", "scoring")  # statuses of entries whose request sets are in use


MIN_TOKEN_BUDGET = 256  # tokens; a smaller unit would hold about one request, which no budget can shrink


# --- the conversion of a checkpoint ----------------------------------------------------------------------------------------


def begin_conversion(state: State) -> list[Action]:
    """Begin a newly accepted evaluation: convert the checkpoint if asked to, otherwise look for request sets."""
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


def conversion_inspected(state: State, event: CheckpointConverted) -> list[Action]:
    if state.conversion.status == "done" and event.checkpoint is None:
        state.conversion.status = "due"  # the converted folder has been removed since
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
    return []  # otherwise the end of its job makes it due again


def conversion_over(state: State, info: JobInfo, word: str) -> Due:
    conversion = state.conversion
    if conversion.status != "running":
        return []
    conversion.status = "due"
    if word == OUT_OF_MEMORY and job_gets_more(state, info):
        return []
    if word not in NO_FAULT_OF_A_JOB:
        conversion.tries = conversion.tries.failed()
    if not conversion.tries.given_up:
        return []
    why = f"the conversion ended {conversion.tries.failures} times ({word}); see {info.job.log}"
    return [Closed(at=info.changed_at, reason=why)]


def convert_again(state: State) -> None:
    """Convert the checkpoint again for a retry: the copy was removed when the evaluation ended."""
    state.conversion.tries = state.conversion.tries.anew
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


def request_sets_found(state: State, event: RequestSetsFound) -> list[Action]:
    """Record the request sets on disk, and rebuild those that have been removed."""
    if event.folders.keys() != set(range(len(state.entries))):
        raise IllegalEventError("request sets were looked up for other entries")
    for entry in state.entries:
        entry.folder = event.folders[entry.index]
        if entry.status in HAVE_SETS:
            if entry.index not in event.sets:
                state.plan.pending = False
                build_again(entry)
        elif entry.index in event.sets and not entry.terminal:
            entry.sets = event.sets[entry.index]
            entry.status = "built"
    state.builds.looked_up = True
    state.batch_size = event.batch_size
    return []


def builds_due(state: State, site: Site, now: float) -> Due:
    waiting = [entry for entry in state.entries if entry.status == "unbuilt"]
    if not waiting or not state.builds.fruitless.due(now):
        return
    parts = min(state.record.options.build_jobs, _worth_a_job(state, waiting))
    for part in range(parts):
        yield build_job(state, site, waiting[part::parts], now)


def _worth_a_job(state: State, waiting: Sequence[EntryState]) -> int:
    """Return how many jobs build these entries soonest: one per entry, or per four entries with few documents."""
    few = sum(_has_few(state, entry) for entry in waiting)
    return len(waiting) - few + ceil(few / FEW_A_JOB)


def _has_few(state: State, entry: EntryState) -> bool:
    """Return whether every leaf task has few documents. An entry without a limit, or that may be a group, does not count."""
    limit = state.record.suite.tasks[entry.index].limit
    return limit is not None and 1 <= limit <= FEW_DOCUMENTS and entry.name in state.record.inputs.single


def end_soon(state: State) -> bool:
    """Return whether build jobs are running and all of their entries have few documents."""
    building = [entry for entry in state.entries if entry.status == "building"]
    return bool(building) and all(_has_few(state, entry) for entry in building)


def build_intended(state: State, event: JobIntended) -> None:
    for index in event.entries:
        entry = state.entries[index]
        entry.status, entry.build_job = "building", event.job.name


def sets_built(state: State, outcome: Built, _at: float) -> list[Action]:
    entry = state.entries[outcome.entry]
    if entry.terminal or (outcome.batch_size, outcome.cut) != (state.batch_size, state.cut_of(entry)):
        return []
    entry.sets = outcome.sets
    entry.status = "built"
    entry.error = ""
    state.builds.fruitless = state.builds.fruitless.anew
    return []


def batch_size_probed(state: State, outcome: Probed, _at: float) -> list[Action]:
    """Record the probed batch size or token budget: the requests exist, and their batches still have to be added."""
    if state.batch_size != "auto":
        return []
    state.batch_size = outcome.batch_size
    if state.token_budget == "auto":  # noqa: S105 (no password)
        state.token_budget = outcome.token_budget
    for entry in state.entries:
        if entry.status == "built":
            build_again(entry)
    return []


def build_again(entry: EntryState) -> None:
    """Mark an entry as unbuilt: its requests lack the batches of its cut, or were removed."""
    entry.status = "unbuilt"
    entry.building = entry.building.anew


def build_failed(state: State, outcome: Failed, at: float) -> Due:
    if outcome.entry is None:
        return []
    entry = state.entries[outcome.entry]
    if entry.status != "building":
        return []
    entry.building = entry.building.failed()
    state.builds.fruitless = state.builds.fruitless.anew
    if outcome.blame == "operator" or entry.building.given_up:
        return [EntryFailed(at=at, entry=entry.index, error=outcome.error)]
    entry.status = "unbuilt"
    return []


def build_job_over(state: State, info: JobInfo, word: str) -> Due:
    """Handle the end of a build job. Repeated failures with nothing built in between fail all entries, not just this one."""
    mine = (state.entries[i] for i in info.entries)
    left = [e for e in mine if e.build_job == info.job.name and e.status == "building"]
    for entry in left:
        entry.status = "unbuilt"
    if not left or word in NO_FAULT_OF_A_JOB:
        return []
    if word == OUT_OF_MEMORY:
        if job_gets_more(state, info):
            return []
        word = out_of_memory_words(state, "build", "it")
    first, builds = left[0], state.builds
    # only the node is at fault: retry on another node after a pause
    of_node = bool(info.unlaunched or info.refused)
    builds.fruitless = builds.fruitless.failed(info.changed_at if of_node else 0.0)
    if not of_node:
        first.building = first.building.failed()
    hopeless = builds.fruitless.failures >= MAX_DEATHS * state.record.options.build_jobs
    if not first.building.given_up and not hopeless:
        return []
    why = f"its build job ended {first.building.failures} times ({word}); see {info.job.log}"
    if info.unlaunched:
        why = f"no node could launch its build job; the last: {info.unlaunched} ({word})"
    lost = left if hopeless else left[:1]
    return [EntryFailed(at=info.changed_at, entry=entry.index, error=why) for entry in lost]


# --- batches that do not fit a GPU's memory ---------------------------------------------------------------------------


def batch_too_large(state: State, outcome: TooLarge, at: float) -> Due:
    """Handle a unit or batch that does not fit a GPU. Only an entry's first report counts; one from a larger GPU does, too."""
    shard = state.shards.by_name.get(outcome.shard)
    if shard is None or shard.frame is not None or shard.quarantined:
        return []
    failed = []
    for entry in shards.open_entries(state, shards.leaf_of(state, outcome.shard)):
        if outcome.what == "unit" and outcome.fits and _budget(state, entry) > MIN_TOKEN_BUDGET:
            state.shards.too_large.setdefault(entry.index, outcome)
        else:
            failed.append(
                EntryFailed(at=at, entry=entry.index, error=_too_large_words(state, entry, outcome))
            )
    return failed


def _budget(state: State, entry: EntryState) -> int:
    return Cut.parse(state.cut_of(entry)).token_budget or 0


def _too_large_words(state: State, entry: EntryState, outcome: TooLarge) -> str:
    """Return what does not fit and what to change."""
    name = ShardId.parse(outcome.shard)
    cut = Cut.parse(cut_on_disk(name.cut, state.batch_size))
    where = f"the GPU memory of {outcome.node} ({outcome.devices}): {outcome.error}"
    suite = f"[[task]] {entry.name} of suite {state.record.suite.name}"
    more = "give trials more GPUs ([trial] gpus_per_trial), or GPUs with more memory"
    if outcome.what == "unit":
        said = f"a unit of task {name.task} with token budget {cut.token_budget} does not fit {where}; {more}"
        return f'{said}, or evaluate in mode = "exact"'
    kind = "prompts" if outcome.what == "generation" else "rows"
    said = f"task {name.task}: a batch of {outcome.of} {kind} (batch_size = {cut.batch_size}) does not fit {where}"
    if not outcome.fits:
        return f"{said}; not even one fits: {more}"
    fit = "1 fits" if outcome.fits == 1 else f"{outcome.fits} fit"
    return f"{said}; {fit}: set batch_size = {outcome.fits} in {suite}"


def cuts_due(state: State, now: float) -> Due:
    """Reduce the token budget of entries with a unit that did not fit: to the part that fits, and at least by half."""
    for index, outcome in sorted(state.shards.too_large.items()):
        entry = state.entries[index]
        if entry.terminal:
            continue
        budget = _budget(state, entry)
        fits = max(MIN_TOKEN_BUDGET, min(budget // 2, budget * outcome.fits // outcome.of))
        yield TokenBudgetReduced(at=now, entry=index, token_budget=fits)


def token_budget_reduced(state: State, event: TokenBudgetReduced) -> list[Action]:
    entry = state.entries[event.entry]
    outcome = state.shards.too_large.pop(event.entry, None)
    if entry.terminal:
        return []
    where = "" if outcome is None else f" of {outcome.node} ({outcome.devices})"
    state.warnings.append(
        f"{entry.name} starts again with a token budget of {event.token_budget}: a unit of {_budget(state, entry)} tokens "
        f"does not fit the GPU memory{where}"
    )
    withdrawn = shards.retire_plan(state, entry, executes=False)
    entry.token_budget = event.token_budget
    build_again(entry)
    return withdrawn
