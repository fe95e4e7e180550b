"""Ending: why and how an evaluation ends, and how a retry reopens it.

Rule: the phases are those of `state.Phase`. A reason to end closes open entries (all, or only those that still need a GPU).
Results are written once every entry is scored or has failed; the evaluation has ended when it has no job left. Called from:
`step`.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.base.words import first_of
from coordinator.decide.evaluation import builds, jobs, nodes, scoring, shards
from coordinator.decide.evaluation.actions import Action, RemoveQueue, StopWorkers, WriteResults
from coordinator.decide.evaluation.events import (
    CancelAsked,
    Closed,
    Ended,
    EntryFailed,
    ResultsWritten,
    RetryAsked,
    WorkDone,
)
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import Phase, State

HOLDS_WEIGHTS = "may still hold staged weights"
RELEASED_PURPOSES = ("stage", "metric")  # purposes of jobs that exit by themselves once released


def cancel_evaluation(state: State, event: CancelAsked) -> list[Action]:
    ending = state.ending
    ending.retry_waits = False
    if ending.phase < Phase.LEAVING:  # otherwise its scores stand
        ending.cancelled = ending.cancelled or event.reason
        ending.phase = max(ending.phase, Phase.CLOSING)
    return []


def results_written(state: State, _event: ResultsWritten) -> list[Action]:
    if state.ending.phase == Phase.WRITING:
        state.ending.phase = Phase.LEAVING
    return []


def retry_evaluation(state: State, event: RetryAsked) -> list[Action]:
    """Retry what has failed, alongside whatever is running. An evaluation that is ending finishes that first: its jobs end,
    and other jobs may take its nodes.
    """
    if not state.failed_entries() and not state.unscored_items:
        return []
    if state.winding_down and state.ending.phase != Phase.ENDED:
        state.ending.retry_waits = True
        return []
    if state.ending.phase == Phase.ENDED:
        return begin_again(state, event.gone)
    return _reopen(state, event.gone)


def begin_again(state: State, gone: Collection[int] = ()) -> list[Action]:
    """Reopen an evaluation that has ended: it has no job, no staged weights and no queue."""
    state.ending.cancelled, state.ending.ended_at = "", None
    state.ending.retried, state.ending.retry_waits = True, False
    builds.convert_again(state)
    nodes.withdraw_all_nodes(state)
    return _reopen(state, gone)


def _reopen(state: State, gone: Collection[int]) -> list[Action]:
    ending = state.ending
    ending.phase, ending.reason, ending.inference_only, ending.no_scores = Phase.RUNNING, "", False, False
    state.trials.deaths = 0
    state.nodes.all_backed_off = state.nodes.all_backed_off.anew
    state.jobs.doublings = {}
    state.scoring.fruitless = state.scoring.fruitless.anew
    state.builds.fruitless = state.builds.fruitless.anew
    for entry in state.entries:
        if entry.status == "scored" and entry.unscored:
            entry.status, entry.unscored = "built", {}  # its responses exist: score it again
            entry.looked = 0
            entry.scoring = entry.scoring.anew
    actions: list[Action] = []
    for entry in (e for e in state.entries if not e.terminal or e.status == "failed"):
        if entry.index in gone:
            actions += shards.retire_plan(state, entry, executes=True)
            entry.sets, entry.status = {}, "failed"
        if entry.status == "failed":
            actions += shards.reopen_entry(state, entry)
    return actions


def evaluation_closed(state: State, event: Closed) -> list[Action]:
    state.plan.pending = False
    state.ending.close(event.reason, inference_only=event.inference_only, instead=event.instead)
    return []


def close_due(state: State, now: float) -> Due:
    """Fail the entries that the reason to end applies to."""
    ending = state.ending
    if ending.phase != Phase.CLOSING:
        return
    spared = not ending.cancelled and ending.inference_only
    why = ending.reason or f"cancelled: {ending.cancelled}"
    for entry in state.entries:
        open_one = not entry.terminal and not (spared and scoring.needs_no_gpu(state, entry))
        if open_one or (ending.no_scores and entry.status == "scored"):
            yield EntryFailed(at=now, entry=entry.index, error=why)


def ending_due(state: State, now: float) -> Due:
    """Write the results once no entry is open; end once no job is left."""
    if state.all_terminal and state.ending.phase < Phase.WRITING:
        yield WorkDone(at=now)
    if state.ending.phase == Phase.LEAVING and not state.jobs.live:
        yield Ended(at=now)


def work_done(state: State, event: WorkDone) -> list[Action]:
    state.ending.phase = Phase.WRITING
    live = [info for _, info in sorted(state.jobs.live.items())]
    actions: list[Action] = [StopWorkers()]
    actions += jobs.end_jobs(state, [i for i in live if i.job.purpose not in RELEASED_PURPOSES], event.at)
    actions += [WriteResults(failed=state.failed_entries()), RemoveQueue()]
    for info in [*state.live_jobs("stage"), *state.scoring.workers.values()]:
        if info.released_at is None:
            actions += jobs.release_job(state, info, event.at)
    return actions


def evaluation_ended(state: State, event: Ended) -> list[Action]:
    state.ending.phase, state.ending.ended_at = Phase.ENDED, event.at
    state.warnings = [
        text for text in state.warnings if HOLDS_WEIGHTS not in text
    ]  # of an end before a retry
    if left := nodes.uncleared_nodes(state):
        state.warnings.append(
            f"{first_of(left, 3)} {HOLDS_WEIGHTS}, since the precursor was killed: the next evaluation there frees them, or "
            "`evalspan clean` on the node"
        )
    return begin_again(state) if state.ending.retry_waits else []


def ending_restarted(state: State, now: float) -> list[Action]:
    """Make unwritten results due again, and repeat the release and cancellation of jobs."""
    ending = state.ending
    if ending.phase == Phase.WRITING:
        ending.phase = Phase.CLOSING if ending.reason or ending.cancelled else Phase.RUNNING
    released = [info for _, info in sorted(state.jobs.live.items()) if info.released_at is not None]
    actions: list[Action] = [StopWorkers()] if state.winding_down else []
    for info in released:
        actions += jobs.release_job(state, info, now) if info.job.purpose in RELEASED_PURPOSES else []
    return actions + jobs.end_jobs(
        state, [i for i in released if i.job.purpose not in RELEASED_PURPOSES], now
    )
