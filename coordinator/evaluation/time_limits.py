"""Time limits that jobs ask for: what is predicted of their work, so that they fit into gaps of the cluster's queue. Pure.

Rule: never above `most`, which the settings give; that stands where nothing was predicted. Called from: `job_specs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from coordinator.evaluation.state import NodeUse, State

SHORTEST_LIMIT_SECONDS = 900
"""No trial asks for less: schedulers gain nothing below, and a cold prior may be off by several times."""
ENDING_SECONDS = 120
"""A trial gets SIGTERM a minute before its limit, and Slurm may be a minute early."""
UNPLANNED_SECONDS = 3600
"""What a precursor asks for before the plan, beside the staging: request sets are built in minutes, and then it is renewed."""
STAGING_SLACK_SECONDS = 300  # of a precursor or host, beside the copy
METRIC_SPREAD = 2.0  # times that metrics may take of what is predicted
SLOW_STORAGE = 100e6  # bytes/s at which a checkpoint surely comes from shared storage


def _staging_seconds(state: State) -> int:
    return ceil(state.record.checkpoint.bytes / SLOW_STORAGE) + STAGING_SLACK_SECONDS


def precursor_limit_seconds(state: State, node: NodeUse, most: int) -> int:
    """The time limit that a node's precursor asks for: the staging, and as long as the trials that it serves.

    Trials still to serve near its end get a successor (`renewals`). A precursor that ended without having staged is
    followed by one that asks for twice as long.
    """
    lanes = [] if node.name in state.index.in_use else node.lane_names
    serves = _work_limit_seconds(state, len(lanes)) or UNPLANNED_SECONDS
    failed = 0 if node.status == "ready" else node.attempts
    return min(most, (serves + _staging_seconds(state)) << min(failed, 20))


def trial_limit_seconds(state: State, lanes: Sequence[str], more: int = 0) -> int:
    """The time limit that trials ask for: what load and an even share of the work take at the 95th percentile.

    A short limit finds gaps that a long one does not fit into. One that proves too short costs a load: the trial hands
    its shard back at SIGTERM, and the next trial on its lane asks for twice as long. Never above the
    settings' limit, which stands where nothing was predicted (a trial that probes for the batch size). `more`: as of
    `_work_limit_seconds`.
    """
    most = state.record.options.trial.time_limit_seconds
    attempt = max(state.index.lane_trials.get(lane, 0) for lane in lanes)
    return min(most, (_work_limit_seconds(state, more) or most) << min(attempt, 20))


def host_limit_seconds(state: State, lanes: Sequence[str]) -> int:
    """The same for a job that stages and then hosts the trials of these lanes, none of which is in use yet."""
    most = state.record.options.trial.time_limit_seconds
    return min(most, trial_limit_seconds(state, lanes, len(lanes)) + _staging_seconds(state))


def _work_limit_seconds(state: State, more: int = 0) -> int:
    """Seconds in which a lane has surely loaded and done its even share; 0 before the plan.

    `more`: lanes that come to those in use.
    """
    plan = state.plan
    if not plan.work_seconds_95:
        return 0
    share = plan.work_seconds_95 / max(1, state.index.lanes_in_use + more)
    return ceil(max(SHORTEST_LIMIT_SECONDS, plan.load_seconds_95 + share + ENDING_SECONDS))


def worker_limit_seconds(state: State, count: int, most: int) -> int:
    """As long as the trials and then the metrics are predicted to take; workers that end at their limit are replaced.

    Those that follow workers with no metric job done ask for twice as long.
    """
    work = _work_limit_seconds(state)
    if not work:
        return most
    metrics = [leaf.planned.metric_seconds for leaf in state.shards.leaves.values()]
    tail = METRIC_SPREAD * (sum(metrics) / count + max(metrics, default=0.0))
    return min(most, ceil(work + tail) << min(state.scoring.worker_attempts, 20))
