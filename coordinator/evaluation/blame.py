"""Who is to blame for a trial that failed with a shard in hand: its node, or the shard. Pure.

Rule: what the error's words settle is settled by them. Else both are in doubt, and the shard goes to another node first:
it is quarantined once it has taken down three trials, on two nodes or more; where there is no other node, after three. A
lane of which three trials in a row died so has its node rest; not the last node in use, which is how such doubts are
settled. Shards that die on a second node are taken to be at fault, and what was held against nodes because of them is
taken back.
It does not know: what a shard holds, why a node fails.
"""

from __future__ import annotations

import re
from typing import Literal

from coordinator.evaluation import facts
from coordinator.evaluation.facts import MAX_NODE_FAILURES
from coordinator.evaluation.messages import Action, QueueShards
from coordinator.evaluation.state import NodeUse, ShardState, State
from evaljobs.contract.specs import FrameRef

MAX_KILLS = 3  # trials that one shard may take down, on different nodes where there are such, …
MAX_KILLS_ON_ONE_NODE = 6  # … or wherever they ran
FIRST = -1.0  # the rank of a shard whose fault is to be found out: before all others of its lane

# torch says "CUDA error: " and then cudaGetErrorString of the code (c10/cuda/CUDAException.cpp); the strings are those of
# libcudart 12.9. What each means: CUDA Runtime API, "Data types used by CUDA Runtime", cudaError; the Xids that NVIDIA's
# catalog (docs.nvidia.com/deploy/xid-errors) has for the same fault are in the kernel's log alone.
NODE_WORDS = (
    "uncorrectable ECC error encountered",  # 214, Xid 48, 94, 95: GPU memory
    "uncorrectable NVLink error detected during the execution",  # 220, Xid 74
    "Invalid access of peer GPU memory over nvlink or a hardware error",  # 226, Xid 94: contained
    "CUDA-capable device(s) is/are busy or unavailable",  # 46: somebody else's process, or a GPU that hangs
    "no CUDA-capable device is detected",  # 100, Xid 79: fallen off the bus
    "system not yet initialized",  # 802: the fabric manager of an NVSwitch node is not there
)
# An index out of range, say: a kernel's own check of what it was given.
SHARD_WORDS = ("device-side assert triggered",)  # 710
# Told by neither: "out of memory" (2: a long document, or somebody else's process), "an illegal memory access was
# encountered" (700, Xid 31: a kernel's fault in most cases, a GPU's in some), "unspecified launch failure" (719, Xid 13).


def _said(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"CUDA (driver )?error: ({'|'.join(map(re.escape, words))})", re.IGNORECASE)


_NODE, _SHARD = _said(NODE_WORDS), _said(SHARD_WORDS)


def whose(error: str) -> Literal["node", "shard", "either"]:
    """Whose fault an error is by its words."""
    if _NODE.search(error):
        return "node"
    return "shard" if _SHARD.search(error) else "either"


def died_with(state: State, node_name: str | None, trial: str, name: str, error: str) -> list[Action]:
    """A trial failed with shard `name` in hand."""
    fault, lane = whose(error), state.trial_lane[trial]
    if fault == "node":
        facts.count_trial_death(state, node_name, error)
        return []
    return count_kill(state, node_name, name, error, lane=lane if fault == "either" else None)


def held_against_its_node(trial: str) -> str:
    """Names the counter of whether the trial's end was seen, and counted against its node, before its own word."""
    return f"blamed/{trial}"


def told_late(state: State, trial: str, name: str | None, error: str) -> list[Action]:
    """The word of a trial whose end was taken for a death without one: what it says of a shard stands in its stead."""
    lane = state.trial_lane.get(trial, "")
    node = state.nodes.get(lane.rpartition("/")[0])
    if name is None or node is None or not state.counters.pop(held_against_its_node(trial), 0):
        return []
    if whose(error) == "node":
        return []  # as it was counted
    rests = node.status == "aside" and _over(node)
    node.failures, state.barren = max(0, node.failures - 1), max(0, state.barren - 1)
    if rests and not _over(node):
        facts.rested_for_nothing(state, node)
    return died_with(state, node.name, trial, name, error)


def count_kill(
    state: State, node_name: str | None, name: str, error: str, lane: str | None = None
) -> list[Action]:
    """A shard took its trial down. `lane`: the trial's, where its node is in doubt as well."""
    shard = state.shards.get(name)
    if shard is None or shard.frame is not None or shard.quarantined:
        return []
    node = state.nodes.get(node_name or "")
    shard.kills += 1
    if node is not None and node.name not in shard.died_on:
        shard.died_on.append(node.name)
    if _condemned(state, shard):
        _acquit_nodes(state, shard)
        entry = state.entries[state.leaves[name.rsplit("|", 2)[0]].planned.entry]
        state.warnings.append(f"shard {name} quarantined: {error}")
        return facts.fail_entry(
            state, entry, f"shard {name} took down {shard.kills} trials; the last: {error}"
        )
    if len(shard.died_on) > 1:
        _acquit_nodes(state, shard)
    elif node is not None and lane is not None:
        _doubt(state, node, lane, shard, error)
    return _elsewhere(state, name, shard)


def _condemned(state: State, shard: ShardState) -> bool:
    if shard.kills < MAX_KILLS:
        return False
    others = any(
        n.lanes and n.status != "withdrawn" and n.name not in shard.died_on for n in state.nodes.values()
    )
    return len(shard.died_on) > 1 or not others or shard.kills >= MAX_KILLS_ON_ONE_NODE


def _doubt(state: State, node: NodeUse, lane: str, shard: ShardState, error: str) -> None:
    if node.status in ("aside", "withdrawn"):
        return
    node.doubts[lane] = node.doubts.get(lane, 0) + 1
    shard.doubts[lane] = shard.doubts.get(lane, 0) + 1
    others = any(
        n.lanes and n is not node and n.status in ("offered", "staging", "ready")
        for n in state.nodes.values()
    )
    if others and node.failures + node.doubts[lane] >= MAX_NODE_FAILURES:
        facts.set_aside(state, node, error)


def _acquit_nodes(state: State, shard: ShardState) -> None:
    """It is the shard: what its deaths had counted against nodes does not count, and who rests for that is back."""
    for lane, deaths in shard.doubts.items():
        node = state.nodes[lane.rpartition("/")[0]]
        rests = node.status == "aside" and _over(node)
        node.doubts[lane] = max(0, node.doubts.get(lane, 0) - deaths)
        if rests and not _over(node):
            facts.rested_for_nothing(state, node)
    shard.doubts.clear()


def _over(node: NodeUse) -> bool:
    return node.failures + max(node.doubts.values(), default=0) >= MAX_NODE_FAILURES


def _elsewhere(state: State, name: str, shard: ShardState) -> list[Action]:
    """Next it is tried where it has taken down no trial yet, by whoever is the least in doubt."""
    there = [
        n
        for n in state.nodes.values()
        if n.lanes and n.status in ("staging", "ready") and n.name not in shard.died_on
    ]
    if not there:
        return []
    node = min(there, key=lambda n: (n.failures + sum(n.doubts.values()), n.name))
    shard.lane = min(state.live_lanes(node.name), default=f"{node.name}/0")
    shard.rank = FIRST
    return [QueueShards(lane=shard.lane, shards=((name, shard.rank, shard.seconds),))]


def done_by(state: State, frame: FrameRef) -> None:
    """A shard was done: the lane of the trial that did it works, whatever its earlier trials died of."""
    lane = state.trial_lane.get(frame.file.removesuffix(".frames"))
    node = state.nodes.get(lane.rpartition("/")[0]) if lane is not None else None
    if node is not None and lane is not None:
        node.doubts.pop(lane, None)
