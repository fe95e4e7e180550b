"""Ends of jobs: failed submissions, ended members, dead trials, and what a death is charged to.

Rule: news of a job or member that has already ended changes nothing. A death counts unless its diagnosis (preemption, a time
limit, `scancel`, node failure) or the loss of staged weights explains it; trials that die together on one node count once.
Certain hardware faults put the node in back-off at once without charging the shard. Certain program errors are never charged
to a node; the second one with the same message fails the shard's task. Any other death is tried on another node first, if
there is one. A shard's third death fails its task. The third death on a node without a finished shard in between puts the
node in back-off; deaths of one shard do so only while another node is in use. Consecutive deaths without a shard end the
evaluation. Called from: `step`, `trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from coordinator.decide.evaluation import builds, jobs, nodes, scoring, shards
from coordinator.decide.evaluation.actions import CancelJob, ReleaseClaims, SubmitJob
from coordinator.decide.evaluation.events import Closed, JobEnded, JobNotSubmitted, NodeBackedOff
from coordinator.decide.evaluation.footprint import OUT_OF_MEMORY, job_gets_more, out_of_memory_words
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import IllegalEventError, JobInfo, NodeUse, State, Trial
from coordinator.site.cluster import COORDINATOR_ENDED, Purpose
from coordinator.site.diagnosis.diagnose import Diagnosis, diagnose_state, diagnosis_in_words
from evaljobs.contract.names import LaneId

EXPLAINED_REASONS = frozenset({"TimeLimit", "Cancelled", "NodeFailure", "Preempted"})
"""Diagnoses of an end without an outcome that is neither the node's nor the shard's fault."""
HARDWARE_REASONS = frozenset({"ECCError", "NVLinkError"})  # faults of the node, whatever it runs
PLACE_REASONS = frozenset(
    {"OutOfMemoryError", "DataloaderKilled", "ImportError", "FileNotFoundError", "PermissionError", "OSError"}
)
"""User errors that may be specific to one node: another program fills its GPU, or a file system is not mounted."""

_OVER: dict[Purpose, Callable[[State, JobInfo, str], Due]] = {
    "build": builds.build_job_over,
    "convert": builds.conversion_over,
    "stage": nodes.node_job_over,
    "host": nodes.node_job_over,
    "metric": scoring.worker_job_over,
}
MAX_DEATHS = 3  # deaths with one shard before its task fails, or on one node before its back-off
MAX_DEATHS_IN_A_ROW = (
    6  # deaths without a shard, with none finished in between, before the evaluation ends ...
)
# ... or this many per node once a shard has finished, since the evaluation itself evidently works


def not_submitted(state: State, event: JobNotSubmitted) -> Due:
    info = jobs.known_job(state, event.job)
    doubt = event.reason == "in-doubt"
    if info.phase == "ended" or (info.phase == "submitted" and doubt):
        return []  # already ended, or listed before its submission failed
    info.changed_at = event.at
    state.jobs.held.pop(event.job, None)
    node = state.nodes.by_name.get(info.job.node or "")
    prefetch = node is not None and not node.lanes
    if event.reason == "limit" and info.released_at is None and not prefetch:
        jobs.hold_job(state, info, event.error, event.at)
        return []
    if doubt:
        info.phase, info.submissions = "uncertain", info.submissions.failed()
        return []  # looked up by name first; "absent" follows if it is not found
    found: list[Any] = []
    if prefetch:
        # nothing depends on it: the node's GPUs come later, with another attempt
        info.refused = event.error
    elif event.reason in ("refused", "refused-on-node") and info.released_at is None:
        info.refused = event.error
        found += _refused(state, info, event)
    elif info.released_at is None:
        info.phase = "intended"
        if not info.submissions.given_up:
            return [SubmitJob(job=info.job)]
        why = f"{info.job.name} could not be submitted {info.submissions.failures} times: {event.error}"
        found.append(Closed(at=event.at, reason=why))
    word = "REFUSED" if info.refused else "NOT_SUBMITTED"
    if info.job_id:
        found.append(CancelJob(job_id=info.job_id))
    return [*found, *_end_members(state, info, list(info.members), word, event.at)]


def _refused(state: State, info: JobInfo, event: JobNotSubmitted) -> Due:
    """Handle a refusal: back off from the node if only the node may be the reason; otherwise every node would refuse."""
    why = f"the cluster refused {info.job.name}: {event.error}"
    node = state.nodes.by_name.get(info.job.node or "")
    on_node = event.reason == "refused-on-node"
    if on_node and node is not None:
        return nodes.back_off_node(node, why, event.at)
    if on_node and info.job.exclude:
        state.jobs.unlaunched.clear()  # no other node can run it
    else:
        state.ending.close(why)
    return []


def job_ended(state: State, event: JobEnded) -> Due:
    info = jobs.known_job(state, event.job)
    if event.index not in info.members:
        raise IllegalEventError(f"{event.job} has no member {event.index}")
    if info.members[event.index] == "ended":
        return []
    info.changed_at = event.at
    if event.unlaunched:
        info.unlaunched = event.unlaunched
        state.jobs.unlaunched.add(event.unlaunched)
        state.warnings.append(
            f"{event.unlaunched} could not launch {event.job}, or reached no Redis ({event.state}): later jobs avoid it"
        )
    return _end_members(
        state, info, [event.index], event.state, event.at, shard=event.shard, cause=event.cause
    )


def _end_members(
    state: State,
    info: JobInfo,
    members: Iterable[int],
    word: str,
    now: float,
    *,
    shard: str | None = None,
    cause: Diagnosis | None = None,
) -> Due:
    """End these members and their trials, and the job once all members have ended."""
    found: list[Any] = []
    for member in members:
        info.members[member] = "ended"
        names = jobs.trials_of(info, member)
        dead = [trial for name in names if (trial := jobs.end_trial(state, name)) is not None]
        found += [ReleaseClaims(trial=trial.name) for trial in dead]
        if word == jobs.PREEMPTED:
            found += nodes.member_preempted(state, info, now)
        elif dead and not _ours(state, info, dead, word):
            found += _died_silently(state, dead[0], word, shard, now, cause=cause)
        elif word == OUT_OF_MEMORY and info.job.purpose == "metric" and state.can_work:
            found += scoring.worker_out_of_memory(state, info, now)
    if all(phase == "ended" for phase in info.members.values()) and info.live:
        info.phase = "ended"
        del state.jobs.live[info.job.name]
        if info.job.purpose in _OVER:
            found += _OVER[info.job.purpose](state, info, word)
    return found


def _ours(state: State, info: JobInfo, dead: list[Trial], word: str) -> bool:
    """Return whether the coordinator ended these trials, or the weights that they read are gone."""
    if word == COORDINATOR_ENDED or all(trial.cancelled for trial in dead):
        return True
    node = state.nodes.by_name.get(info.job.node or "")
    return info.job.purpose == "trial" and node is not None and node.precursor != info.precursor


def _died_silently(
    state: State, trial: Trial, word: str, shard: str | None, now: float, *, cause: Diagnosis | None
) -> Due:
    if word == OUT_OF_MEMORY:
        return trial_out_of_memory(state, trial, shard, now)
    cause = cause or diagnose_state(word)
    why = diagnosis_in_words(cause, f"{trial.name} ended ({word}) without a word")
    place = state.jobs.by_name[trial.job].job.node
    node = state.nodes.by_name.get(place or "")
    if cause.reason in EXPLAINED_REASONS:
        return trial_died_idle(state, place, why, now, counts=False)
    if is_hardware_fault(cause) and node is not None:
        return nodes.back_off_node(node, why, now, at_fault=True)
    return trial_died_with(state, place, shard, why, now, cause=cause)


def is_hardware_fault(cause: Diagnosis | None) -> bool:
    """Return whether a node's hardware is at fault, whatever it runs."""
    return cause is not None and cause.reason in HARDWARE_REASONS


def _of_program(cause: Diagnosis | None) -> bool:
    """Return whether every node would show this error."""
    return cause is not None and cause.owner in ("user", "evalspan") and cause.reason not in PLACE_REASONS


def trial_out_of_memory(state: State, trial: Trial, shard: str | None, now: float) -> Due:
    """Handle a trial killed for lack of memory: request more; if that is impossible its shard may be too large for any node."""
    info = state.jobs.by_name[trial.job]
    if job_gets_more(state, info):
        return []
    why = out_of_memory_words(state, info.job.purpose, trial.name)
    if shard is not None:
        return trial_died_with(state, info.job.node, shard, why, now)
    return [Closed(at=now, reason=why, inference_only=True)]


# --- what a death counts against ---------------------------------------------------------------------------------------


def trial_died_with(
    state: State,
    node_name: str | None,
    name: str | None,
    why: str,
    now: float,
    *,
    cause: Diagnosis | None = None,
) -> Due:
    """Charge a trial's death on this node, with the shard that it held, if any."""
    shard, counts = state.shards.by_name.get(name or ""), not _of_program(cause)
    if name is None or shard is None:
        return trial_died_idle(state, node_name, why, now, counts=counts)
    if not shards.is_to_do(state, name):
        return []
    node = state.nodes.by_name[node_name or ""]
    others = [n for n in state.nodes.by_name.values() if n is not node and n.in_use]
    once_more = node.name in shard.died_on and any(n.name not in shard.died_on for n in others)
    if not once_more:
        shard.died_on.append(node.name)
    again, shard.error = shard.error == why and not counts, why  # a program's error recurs on every node
    if again or len(shard.died_on) >= MAX_DEATHS:
        state.warnings.append(f"shard {name} quarantined: {why}")
        said = f"trials died {2 if again else MAX_DEATHS} times with shard {name}; the last: {why}"
        return shards.fail_leaf(state, shards.leaf_of(state, name), said, now)
    found: list[Any] = []
    if counts and others and (once_more or len(shard.died_on) == 1):
        found += _charge(node, why, now)
    there = [n for n in others if n.status != "offered" and n.name not in shard.died_on]
    if not there:
        return found
    other = min(there, key=lambda n: (n.deaths, n.name))
    shard.lane = min(other.busy_lanes, default=str(LaneId(other.name, 0)))
    return [*found, *shards.requeue_shards(state, [name])]


def trial_died_idle(state: State, node_name: str | None, why: str, now: float, *, counts: bool = True) -> Due:
    """Charge the death of a trial that held no shard. `counts`: nothing explains it, so its node may be at fault."""
    node = state.nodes.by_name.get(node_name or "")
    if node is None or node.status in ("back-off", "withdrawn") or node.died_at == now:
        return []
    state.trials.deaths += 1
    found: list[Any] = _charge(node, why, now) if counts else []
    node.died_at = now
    leaves = state.shards.leaves.values()
    worked = any(leaf.todo < len(leaf.planned.shards) for leaf in leaves)
    most = MAX_DEATHS_IN_A_ROW * (len(state.nodes.by_name) if worked else 1)
    if (state.shards.todo or not leaves) and state.trials.deaths >= most:
        found.append(Closed(at=now, reason=f"trials keep failing; the last: {why}", inference_only=True))
    return found


def _charge(node: NodeUse, why: str, now: float) -> list[NodeBackedOff]:
    """Charge a death to a node; trials that die there together count once."""
    if node.died_at == now:
        return []
    node.died_at = now
    node.deaths += 1
    return nodes.back_off_node(node, why, now) if node.deaths >= MAX_DEATHS else []
