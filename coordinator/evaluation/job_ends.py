"""Ends of jobs: one was not submitted, a member of one ended, a trial died; and whether a node or a shard is at fault.

Rule: what is said of a job or a member that has ended already changes nothing. A trial without an outcome was killed
with its job. If an error's text names the culprit, that one is blamed. Otherwise node and shard are both suspects, and the
shard is tried on another node first. A shard is quarantined once three trials died with it, on two nodes or more (where
there is one node: on that node). Three such deaths in a row on one lane put its node in back-off, unless it is the last
node in use. Marks against nodes because of a shard at fault are removed. Called from: `step`, `trials`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from coordinator.cluster import COORDINATOR_ENDED, Purpose
from coordinator.evaluation import builds, indexes, jobs, memory, nodes, scoring, shards
from coordinator.evaluation.actions import Action, CancelJob, ReleaseClaims, SubmitJob
from coordinator.evaluation.events import JobEnded, JobNotSubmitted
from coordinator.evaluation.state import IllegalEventError, JobInfo, NodeUse, ShardState, State, Trial
from evaljobs.contract.names import LaneId

MAX_SUBMISSIONS = 8  # of one job that were in doubt and had not happened
NO_FAULT_OF_A_NODE = frozenset({"TIMEOUT", jobs.PREEMPTED})
"""Slurm's words for a job that its limit or another job's priority ended before its trials could leave outcomes."""

_OVER: dict[Purpose, Callable[[State, JobInfo, str], None]] = {
    "build": builds.job_over,
    "convert": builds.conversion_over,
    "stage": nodes.job_over,
    "host": nodes.job_over,
}
MAX_KILLS = 3  # trials that one shard may take down, on different nodes where there are such, …
MAX_KILLS_ON_ONE_NODE = 6  # … or wherever they ran
MAX_DEATHS = 6  # trial deaths in a row, without one shard done in between, before the evaluation ends ...
# ... once a shard was done, so many for each of its nodes: what worked before is not at fault by itself
FIRST = -1.0  # the rank of a shard whose fault is to be found out: before all others of its lane

# torch says "CUDA error: " and then cudaGetErrorString of the code (c10/cuda/CUDAException.cpp); the strings are those of
# libcudart 12.9. What each means: CUDA Runtime API, "Data types used by CUDA Runtime", cudaError; the Xids that NVIDIA's
# catalog (docs.nvidia.com/deploy/xid-errors) has for the same fault are in the kernel's log alone.
NODE_WORDS = (
    "uncorrectable ECC error encountered",  # 214, Xid 48, 94, 95: GPU memory
    "uncorrectable NVLink error detected during the execution",  # 220, Xid 74
    "Invalid access of peer GPU memory over nvlink or a hardware error",  # 226, Xid 94: contained
    "CUDA-capable device(s) is/are busy or unavailable",  # 46: another process, or a GPU that hangs
    "no CUDA-capable device is detected",  # 100, Xid 79: fallen off the bus
    "system not yet initialized",  # 802: the fabric manager of an NVSwitch node is not there
)
# An index out of range, say: a kernel's own check of what it was given.
SHARD_WORDS = ("device-side assert triggered",)  # 710
# Neither word decides: "out of memory" (2: a long document, or another process), "an illegal memory access was
# encountered" (700, Xid 31: a kernel's fault in most cases, a GPU's in some), "unspecified launch failure" (719, Xid 13).


def not_submitted(state: State, event: JobNotSubmitted) -> list[Action]:
    info = jobs.known(state, event.job)
    if info.phase == "ended" or (info.phase == "submitted" and event.maybe_done):
        return []  # over, or a listing showed it before its submission failed
    info.changed_at = event.at
    state.jobs.held.pop(event.job, None)
    prefetch = info.job.purpose == "stage" and info.job.node in state.nodes.prefetches
    if event.limited and info.released_at is None and not prefetch:
        jobs.hold(state, info, event.error, event.at)
        return []
    if event.maybe_done and not event.refused:
        info.phase = "uncertain"
        info.submissions += 1
        return []  # looked up by name first; `JobNotSubmitted(maybe_done=False)` follows if it is not there
    if prefetch:
        # nothing hangs on it: the node's GPUs come later, and another attempt with them
        info.refused = event.error
    elif event.refused and info.released_at is None:
        info.refused = event.error
        _refused(state, info, event)
    elif info.released_at is None:
        info.phase = "intended"
        if info.submissions < MAX_SUBMISSIONS:
            return [SubmitJob(job=info.job)]
        why = f"{info.job.name} could not be submitted {info.submissions} times: {event.error}"
        state.ending.close(why)
    word = "REFUSED" if info.refused else "NOT_SUBMITTED"
    waits: list[Action] = [CancelJob(job_id=info.job_id)] if info.job_id else []
    return [*waits, *_end_members(state, info, list(info.members), word, event.at)]


def _refused(state: State, info: JobInfo, event: JobNotSubmitted) -> None:
    """What one node alone may be the reason for puts that node in back-off; anything else would be refused everywhere."""
    why = f"the cluster refused {info.job.name}: {event.error}"
    node = state.nodes.by_name.get(info.job.node or "")
    if event.of_node and node is not None:
        nodes.back_off(state, node, why)
    elif event.of_node and info.job.exclude:
        state.jobs.unlaunched.clear()  # no other node can run it
    else:
        state.ending.close(why)


def ended(state: State, event: JobEnded) -> list[Action]:
    info = jobs.known(state, event.job)
    if event.index not in info.members:
        raise IllegalEventError(f"{event.job} has no member {event.index}")
    if info.members[event.index] == "ended":
        return []
    info.changed_at = event.at
    if event.unlaunched:
        info.unlaunched = event.unlaunched
        state.jobs.unlaunched.add(event.unlaunched)
        state.warnings.append(
            f"{event.unlaunched} could not launch {event.job}: Slurm ended it before it began"
        )
    return _end_members(state, info, [event.index], event.state, event.at, shard=event.shard)


def _end_members(
    state: State, info: JobInfo, members: Iterable[int], word: str, now: float, *, shard: str | None = None
) -> list[Action]:
    """Members are over: their trials die with them, and the whole job once all are."""
    actions: list[Action] = []
    for member in members:
        info.members[member] = "ended"
        names = info.trials if info.job.purpose == "host" else info.trials[member : member + 1]
        dead = [trial for name in names if (trial := indexes.end_trial(state, name)) is not None]
        actions += [ReleaseClaims(trial=trial.name) for trial in dead]
        if word == jobs.PREEMPTED:
            actions += nodes.preempted(state, info, now)
        elif dead and _news(state, dead, word):
            actions += _died(state, info, dead, word, shard)
        elif word == memory.OUT_OF_MEMORY and info.job.purpose == "metric" and state.can_work:
            scoring.out_of_memory(state, info)
    if all(phase == "ended" for phase in info.members.values()) and info.live:
        info.phase = "ended"
        indexes.file_job(state, info)
        if info.job.purpose in _OVER:
            _OVER[info.job.purpose](state, info, word)
    return actions


def _news(state: State, dead: list[Trial], word: str) -> bool:
    """Does the death of these trials say anything of a node or a shard? Trials of a host died one death."""
    ours = word == COORDINATOR_ENDED or all(trial.cancelled for trial in dead)
    return not ours and _staging_stands(state, dead[0])


def _died(state: State, info: JobInfo, dead: list[Trial], word: str, shard: str | None) -> list[Action]:
    why = f"{dead[0].name} ended ({word}) without a word"
    if word == memory.OUT_OF_MEMORY:
        return out_of_memory(state, info, dead[0], shard)
    blamed = None if word in NO_FAULT_OF_A_NODE else info.job.node
    if trial_died(state, blamed, why) and len(dead) == 1:
        dead[0].counted = True
    return []


def out_of_memory(state: State, info: JobInfo, trial: Trial, shard: str | None) -> list[Action]:
    """The kernel ended a trial: the next asks for more. Where none can, its shard may be too much for any node."""
    if memory.job_short(state, info):
        return []
    why = memory.why(state, info.job.purpose, trial.name)
    if shard is not None:
        return count_kill(state, info.job.node, shard, why, lane=trial.lane)
    state.ending.close(why, inference_only=True)
    return []


def _staging_stands(state: State, trial: Trial) -> bool:
    """Is what this trial reads still staged? Where its precursor is gone it died of that."""
    info = state.jobs.by_name[trial.job]
    node = state.nodes.by_name.get(info.job.node or "")
    return info.job.purpose != "trial" or node is None or node.precursor == info.precursor


# --- whose fault is the death of a trial? ------------------------------------------------------------------------------


def _said(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"CUDA (driver )?error: ({'|'.join(map(re.escape, words))})", re.IGNORECASE)


_NODE, _SHARD = _said(NODE_WORDS), _said(SHARD_WORDS)


def whose(error: str) -> Literal["node", "shard", "either"]:
    """The part at fault by the words of an error."""
    if _NODE.search(error):
        return "node"
    return "shard" if _SHARD.search(error) else "either"


def died_with(state: State, trial: Trial, node: str | None, name: str, error: str) -> list[Action]:
    """A trial failed while it ran the shard `name`."""
    fault = whose(error)
    if fault == "node":
        trial_died(state, node, error, at_fault=True)
        return []
    return count_kill(state, node, name, error, lane=trial.lane if fault == "either" else None)


def unfit(state: State, node_name: str | None, why: str) -> None:
    """A node lacks what its trial asked for: no other trial is tried there before its back-off is over."""
    node = state.nodes.by_name.get(node_name or "")
    if node is not None:
        nodes.back_off(state, node, why, at_fault=True)


def trial_died(state: State, node_name: str | None, why: str, *, at_fault: bool = False) -> bool:
    """A trial died and no shard was to blame: the node may be. Deaths on a node in back-off are no further news.

    `at_fault`: it certainly is. Does it count against a node?
    """
    node = state.nodes.by_name.get(node_name or "")
    if node is not None and node.status in ("back-off", "withdrawn"):
        return False
    trials = state.trials
    trials.deaths_without_progress += 1
    if node is not None:
        node.failures += 1
        if node.failures >= nodes.MAX_FAILURES:
            nodes.back_off(state, node, why, at_fault=at_fault)
    leaves = state.shards.leaves
    worked = any(leaf.todo < len(leaf.planned.shards) for leaf in leaves.values())
    most = MAX_DEATHS * (len(state.nodes.by_name) if worked else 1)
    if (state.shards.todo or not leaves) and trials.deaths_without_progress >= most:
        state.ending.close(f"trials keep failing; the last: {why}", inference_only=True)
    return node is not None


def failed_late(state: State, trial: Trial, name: str | None, error: str) -> list[Action]:
    """The outcome of a trial whose end was taken for a death without one: what it says of a shard stands in its stead."""
    node = state.nodes.by_name.get(LaneId.parse(trial.lane).node)
    if name is None or node is None or not trial.counted:
        return []
    trial.counted = False
    if whose(error) == "node":
        return []  # as it was counted
    backs_off = node.status == "back-off" and nodes.must_back_off(node)
    node.failures = max(0, node.failures - 1)
    state.trials.deaths_without_progress = max(0, state.trials.deaths_without_progress - 1)
    if backs_off and not nodes.must_back_off(node):
        nodes.exonerate(state, node)
    return died_with(state, trial, node.name, name, error)


def count_kill(
    state: State, node_name: str | None, name: str, error: str, lane: str | None = None
) -> list[Action]:
    """A shard took its trial down. `lane`: the trial's, where its node is in doubt as well."""
    shard = state.shards.by_name.get(name)
    if shard is None or shard.frame is not None or shard.quarantined:
        return []
    node = state.nodes.by_name.get(node_name or "")
    shard.kills += 1
    if node is not None and node.name not in shard.died_on:
        shard.died_on.append(node.name)
    if _condemned(state, shard):
        _acquit_nodes(state, shard)
        state.warnings.append(f"shard {name} quarantined: {error}")
        why = f"shard {name} took down {shard.kills} trials; the last: {error}"
        return shards.fail_leaf(state, shards.leaf_of(state, name), why)
    if len(shard.died_on) > 1:
        _acquit_nodes(state, shard)
    elif node is not None and lane is not None:
        _doubt(state, node, lane, shard, error)
    return _elsewhere(state, name, shard)


def _condemned(state: State, shard: ShardState) -> bool:
    if shard.kills < MAX_KILLS:
        return False
    others = any(
        n.status != "withdrawn" and n.name not in shard.died_on for n in state.nodes.by_name.values()
    )
    return len(shard.died_on) > 1 or not others or shard.kills >= MAX_KILLS_ON_ONE_NODE


def _doubt(state: State, node: NodeUse, lane: str, shard: ShardState, error: str) -> None:
    if node.status in ("back-off", "withdrawn"):
        return
    node.doubts[lane] = node.doubts.get(lane, 0) + 1
    shard.doubts[lane] = shard.doubts.get(lane, 0) + 1
    others = any(n is not node and n.status in nodes.IN_USE for n in state.nodes.by_name.values())
    if others and node.failures + node.doubts[lane] >= nodes.MAX_FAILURES:
        nodes.back_off(state, node, error)


def _acquit_nodes(state: State, shard: ShardState) -> None:
    """The shard is at fault: its deaths count against no node, and nodes in back-off for them return."""
    for lane, deaths in shard.doubts.items():
        node = state.nodes.by_name[LaneId.parse(lane).node]
        backs_off = node.status == "back-off" and nodes.must_back_off(node)
        node.doubts[lane] = max(0, node.doubts.get(lane, 0) - deaths)
        if backs_off and not nodes.must_back_off(node):
            nodes.exonerate(state, node)
    shard.doubts.clear()


def _elsewhere(state: State, name: str, shard: ShardState) -> list[Action]:
    """Next the shard runs where it has taken down no trial yet, on the node that is least in doubt."""
    there = [
        n
        for n in state.nodes.by_name.values()
        if n.status in ("staging", "ready") and n.name not in shard.died_on
    ]
    if not there:
        return []
    node = min(there, key=lambda n: (nodes.in_doubt(n), n.name))
    shard.lane = min(state.live_lanes(node.name), default=str(LaneId(node.name, 0)))
    shard.rank = FIRST
    return shards.requeue(state, [name])
