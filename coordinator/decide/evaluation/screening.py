"""Screen mode: looks at the documents that are answered, until an entry's question is.

Rule: documents are asked block by block, in an order that the reference's documents and a seed fix. Once the first blocks are
answered whole, and no look is under way, a score job scores them and the answer is journalled. All blocks are queued, in the order
of asking: a trial that runs goes on while a look is scored. No trial starts for a block that no look has asked for yet. A question
that is answered withdraws the task's other shards. Called from: `step`, `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from coordinator.decide.evaluation import shards
from coordinator.decide.evaluation.actions import Action, JudgeScreen
from coordinator.decide.evaluation.events import MetricEnqueued, ScreenJudged
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import EntryState, Look, State


def looks_due(state: State, now: float) -> Due:
    """Yield a score job for each entry with more blocks answered than at its last look."""
    for entry in state.entries:
        if entry.status != "built" or not entry.sets or len(entry.leaves) < len(entry.sets):
            continue
        if (blocks := _answered(state, entry)) > entry.looked:
            name = f"score-{entry.index}-{entry.score_jobs}"
            yield MetricEnqueued(at=now, name=name, entry=entry.index, blocks=blocks)


def _answered(state: State, entry: EntryState) -> int:
    """Return how many blocks, from the first on, have all their shards done."""
    blocks = list(_blocks(state, entry))
    left = (block for shard, block in blocks if state.shards.by_name[shard].frame is None)
    return min(left, default=max((block + 1 for _, block in blocks), default=0))


def _blocks(state: State, entry: EntryState) -> Iterator[tuple[str, int]]:
    """Yield each shard of an entry with the position of its block."""
    for leaf in (state.shards.leaves[name].planned for name in entry.leaves.values()):
        yield from zip(leaf.shards, leaf.shard_blocks, strict=True)


def judge_look(entry: EntryState, look: Look, unscored: Mapping[str, str]) -> list[Action]:
    """Compare the scored documents of a look with the reference's."""
    entry.look, entry.unscored = look, unscored
    return [JudgeScreen(entry=entry.index)]


def take_verdict(state: State, event: ScreenJudged) -> list[Action]:
    entry = state.entries[event.entry]
    look, entry.look = entry.look, None
    if look is None or entry.status != "scoring":
        return []  # a shard of it turned out unreadable meanwhile, or the entry has failed
    entry.looked, entry.screened = look.blocks, event.score
    if not event.settled:
        entry.status = "built"
        for name in entry.leaves.values():
            shards.tell_undecided(state, state.shards.leaves[name])
        return []
    entry.status, entry.result_file = "scored", look.result_file
    return shards.withdraw_shards(state, entry)


def judge_again(state: State) -> list[Action]:
    """Judge looks again whose verdict did not reach the journal; the verdict is the same."""
    return [
        JudgeScreen(entry=entry.index)
        for entry in state.entries
        if entry.look is not None and entry.status == "scoring"
    ]
