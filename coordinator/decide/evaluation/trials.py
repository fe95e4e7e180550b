"""Trials: one model load each, on a lane of a node; submitted while there are shards that no living trial can hold.

Rule: a trial exits by itself when the queue has nothing for it. The claims of a dead trial are returned, and its node or its
shard is charged (`job_ends`). Called from: `step`.
"""

from __future__ import annotations

from typing import Any

from coordinator.decide.evaluation import builds, job_ends, jobs, nodes, shards
from coordinator.decide.evaluation.actions import Action, CancelJob, ReleaseClaims
from coordinator.decide.evaluation.events import StragglersFound, TrialHung, TrialsCancelled
from coordinator.decide.evaluation.job_specs import Site, trial_job
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import NodeUse, State, Trial
from coordinator.site.diagnosis.diagnose import Diagnosis
from evaljobs.contract.outcomes import Failed, TrialEnded


def trial_ended(state: State, outcome: TrialEnded, at: float) -> Due:
    trial = jobs.end_trial(state, outcome.name)
    if trial is None:
        return []
    job = state.jobs.by_name[trial.job].job
    node = state.nodes.by_name.get(job.node or "")
    if node is not None and outcome.gpus:
        nodes.name_gpus(node, outcome.devices)
    if outcome.fast and not any(outcome.fast in warning for warning in state.warnings):
        state.warnings.append(f"mode fast: likelihoods were computed lm-eval's way, since {outcome.fast}")
    if outcome.weights:
        state.warnings.append(f"weights: {outcome.weights}")
    if job.purpose == "host" and outcome.shards:
        nodes.hosts_trials(state, job.node)
    found: list[Any] = [] if outcome.reason == "drained" else [ReleaseClaims(trial=outcome.name)]
    if outcome.reason == "queue-lost" and not state.shards.leaves:
        state.warnings.append(f"{outcome.name} ended before the request sets were built")
    elif outcome.reason == "queue-lost":
        state.warnings.append(f"{outcome.name} lost the work queue")
        if outcome.shards == 0:
            found += job_ends.trial_died_idle(
                state, job.node, f"{outcome.name} could not reach the work queue", at
            )
    return found


def trial_failed(state: State, outcome: Failed, at: float, cause: Diagnosis | None) -> Due:
    lived = jobs.end_trial(state, outcome.name) is not None
    actions: list[Action] = [ReleaseClaims(trial=outcome.name)] if lived else []
    trial = state.trials.by_name.get(outcome.name)
    if trial is None:
        return []
    info = state.jobs.by_name[trial.job]
    node = state.nodes.by_name.get(outcome.node or "")
    if outcome.unstaged and node is not None:  # news even if the job's end was seen first
        if node.hosted or node.precursor != info.precursor:
            return actions  # a sibling has reported it, or the precursor has ended
        if node.status == "ready" and node.precursor in state.jobs.live:
            return actions + nodes.staging_unseen(state, node, at)
    if not lived or trial.cancelled:
        return actions  # its death has counted already, or the coordinator ended it
    return [*actions, *_charged(state, trial, outcome, cause, at)]


def _charged(state: State, trial: Trial, outcome: Failed, cause: Diagnosis | None, at: float) -> Due:
    """Charge the failure to the memory requested, the node's hardware, or as a death on its node."""
    if outcome.memory_mb is not None:
        return job_ends.trial_out_of_memory(state, trial, outcome.shard, at)
    if outcome.broken_weights:
        state.ending.close(outcome.error, no_scores=True)
        return []
    place = state.jobs.by_name[trial.job].job.node
    node = state.nodes.by_name.get(place or "")
    if node is not None and (outcome.unfit or job_ends.is_hardware_fault(cause)):
        return nodes.back_off_node(node, outcome.error, at, at_fault=True)
    if outcome.blame == "operator" and outcome.shard is None:
        state.ending.close(outcome.error)
    elif outcome.blame == "operator" and outcome.shard and shards.is_to_do(state, outcome.shard):
        return shards.fail_leaf(state, shards.leaf_of(state, outcome.shard), outcome.error, at)
    return job_ends.trial_died_with(state, place, outcome.shard, outcome.error, at, cause=cause)


def trial_hung(state: State, event: TrialHung) -> Due:
    trial = state.trials.live.get(event.trial)
    if trial is None:
        return []
    info = state.jobs.by_name[trial.job]
    why = f"{event.trial} made no progress for {event.seconds:.0f} s"
    found: list[Any] = []
    if not trial.cancelled:
        jobs.cancel_trial(state, trial.name)  # counted now, not again at its end
        found += job_ends.trial_died_with(state, info.job.node, event.shard, why, event.at)
    state.warnings.append(f"{why} and was ended")
    return [*found, _cancel(state, trial)] if info.job_id else found


def trial_straggles(state: State, event: StragglersFound) -> list[Action]:
    """Record a straggler, for the report and so that no trial follows it on its lane while others run."""
    for name, times in sorted(event.trials.items()):
        if name in state.trials.live and name not in state.trials.stragglers:
            state.trials.stragglers[name] = times
            state.warnings.append(f"{name} is a straggler: it takes {times:.1f} times as long as the others")
    return []


def trials_due(state: State, site: Site, now: float) -> Due:
    """Submit as many trials as there are shards that no living trial can hold, on free lanes. A cancelled trial occupies its
    lane until its end is seen, but holds no shard.

    Without stealing, each free lane whose own shards are to do gets a trial. If slots are not GPUs, trials load while few
    documents are built.
    """
    probing = state.batch_size == "auto"
    wanted = 1 if probing else state.shards.todo
    if not state.shards.leaves and not probing:
        if not (state.record.options.early_trials and builds.end_soon(state)):
            return
        wanted = state.lanes_in_use  # load meanwhile, and wait for the queue
    need, steals = wanted - state.able_trials, probing or state.record.options.plan.steals
    # after its look a screened task may need a trial again
    open_looks = sum(not entry.terminal for entry in state.entries) if state.shards.undecided else 0
    if steals and need + open_looks < 0 and (pending := _cancellable(state)):
        # trials that wait for no shard hold nothing yet: the newest of them go first
        yield TrialsCancelled(at=now, trials=tuple(reversed(pending[need + open_looks :])))
    if steals and need <= 0:
        return
    known = state.nodes.by_name.values()
    free = [n for n in known if n.status == "ready" and n.lanes > len(n.trials) and n.rung != "host"]
    own = None
    if free and not steals:
        own = state.lanes_to_do() if len(state.trials.live) < state.lanes_in_use else set()
        need = len(own)
    shunned = _shunned(state)
    # nodes where trials have died lately come last
    for node in sorted(free, key=lambda n: n.deaths):
        lanes = _free_lanes(node, shunned, own)[:need]
        need -= len(lanes)
        # one job of a trial per lane, or several if the site only accepts small arrays
        size = state.record.options.array_size or len(lanes)
        for first in range(0, len(lanes), size or 1):
            yield trial_job(state, site, node, lanes[first : first + size], now)
        if need <= 0:
            break


def _cancellable(state: State) -> list[str]:
    """Return living, submitted, unstarted trials that nothing has cancelled, oldest first."""
    its = ((t.name, state.jobs.by_name[t.job]) for t in state.trials.idle.values() if not t.cancelled)
    return [name for name, info in its if info.phase == "submitted" and info.job.purpose == "trial"]


def _free_lanes(node: NodeUse, shunned: set[str], own: set[str] | None) -> list[str]:
    busy = node.busy_lanes
    free = [name for name in node.lane_names if name not in busy and name not in shunned]
    if own is not None:
        free = [name for name in free if name in own]
    # a preempted lane is gone, whatever its number
    return free[: max(0, node.lanes - len(busy))]


def _shunned(state: State) -> set[str]:
    """Return the lanes of stragglers while another trial runs: the next trial there might get the same slow GPU."""
    if not state.trials.stragglers or len(state.trials.live) == len(state.trials.idle):
        return set()
    return {state.trials.by_name[name].lane for name in state.trials.stragglers}


def trials_cancelled(state: State, event: TrialsCancelled) -> list[Action]:
    for name in event.trials:
        jobs.cancel_trial(state, name)
    return [_cancel(state, state.trials.by_name[name]) for name in event.trials]


def _cancel(state: State, trial: Trial) -> CancelJob:
    info = state.jobs.by_name[trial.job]
    return CancelJob(job_id=info.job_id, index=trial.member if info.job.count > 1 else None)
