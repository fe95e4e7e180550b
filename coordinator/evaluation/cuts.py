"""Batches that do not fit a GPU's memory: their task fails, with the size that fits, or starts again in smaller units.

Rule: batches are never mixed within a task. A batch of a fixed size is the operator's word, so its task fails. A unit of
fast mode follows from the token budget: the entry's budget is reduced, journalled, and all of its planned likelihoods are
cut, planned and run anew. Answers in the old cut count no more. Called from: `step`.
"""

from __future__ import annotations

from coordinator.evaluation import builds, shards
from coordinator.evaluation.actions import Action
from coordinator.evaluation.events import EntryFailed, TokenBudgetReduced
from coordinator.evaluation.jobs import Due
from coordinator.evaluation.records import cut_on_disk
from coordinator.evaluation.state import EntryState, State
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import TooLarge

MIN_TOKEN_BUDGET = 256  # tokens; a unit of fewer is about one request, which no smaller budget makes smaller


def too_large(state: State, outcome: TooLarge, at: float) -> Due:
    """Of several trials that say it of one entry, the first counts; so does an answer that came from a larger GPU."""
    shard = state.shards.by_name.get(outcome.shard)
    if shard is None or shard.frame is not None or shard.quarantined:
        return []
    failed = []
    for entry in shards.open_entries(state, shards.leaf_of(state, outcome.shard)):
        if outcome.what == "unit" and outcome.fits and _budget(state, entry) > MIN_TOKEN_BUDGET:
            state.shards.too_large.setdefault(entry.index, outcome)
        else:
            failed.append(EntryFailed(at=at, entry=entry.index, error=_why(state, entry, outcome)))
    return failed


def _budget(state: State, entry: EntryState) -> int:
    return Cut.parse(state.cut_of(entry)).token_budget or 0


def _why(state: State, entry: EntryState, outcome: TooLarge) -> str:
    """What happened, and what to type."""
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
    """Reduce the budgets of entries of which a unit did not fit: to the part that fits, and at least by half."""
    for index, outcome in sorted(state.shards.too_large.items()):
        entry = state.entries[index]
        if entry.terminal:
            continue
        budget = _budget(state, entry)
        fits = max(MIN_TOKEN_BUDGET, min(budget // 2, budget * outcome.fits // outcome.of))
        yield TokenBudgetReduced(at=now, entry=index, token_budget=fits)


def reduced(state: State, event: TokenBudgetReduced) -> list[Action]:
    entry = state.entries[event.entry]
    outcome = state.shards.too_large.pop(event.entry, None)
    if entry.terminal:
        return []
    where = "" if outcome is None else f" of {outcome.node} ({outcome.devices})"
    state.warnings.append(
        f"{entry.name} starts again with a token budget of {event.token_budget}: a unit of {_budget(state, entry)} tokens "
        f"does not fit the GPU memory{where}"
    )
    withdrawn = shards.retire(state, entry, executes=False)
    entry.token_budget = event.token_budget
    builds.again(state, entry)
    return withdrawn
