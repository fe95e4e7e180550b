"""One evaluation as a state machine: `step(state, site, events) -> Step(events, actions)`. Pure.

An evaluation is one checkpoint and one suite. Everything that happens to it is an event: a person asked for
something, a job started or ended, an outcome file or a response record appeared. `step` takes the events of one look,
records them in the state, and returns the actions to perform now. It reads no clock, file, process or queue; time comes
with the event. The journal is the list of all events, and replaying it gives the same state.

The state has one part per subject, owned by the module of that name:

    builds       the converted checkpoint, the request sets               jobs, job_ends   the life of a job on the cluster
    shards       the plan, responses, the work queue                      nodes            offers, staging, back-off, prefetch
    scoring      metric jobs and their workers                            trials           model loads on lanes of nodes
    ending       reasons to end, results, retries

A module has handlers and rules. A handler takes the state and an event, and changes the state. A rule reads the state,
changes nothing, and returns what is due: actions for the runner, and events that record decisions (a job is intended, a node
is in back-off, an entry has failed). A handler may return the same. `step` applies such events at once, so that each rule
sees the decisions of those before it. The two tables below name the handler of every event and every outcome file. Actions
follow from what is known, not from the order in which it was learned; a rule that is asked again has nothing more to do; and
a restart needs no path of its own. Rules are asked once per look, and count the nodes, idle trials and entries that they
need; those of builds, nodes and trials only after events that can change their result (`_changes_work`). No event scans all
jobs, trials or shards that ever existed.

The phases of an evaluation (`state.Phase`):

                 every entry scored                results written           no job left
      RUNNING ------------------------> WRITING ------------------> LEAVING --------------> ENDED
         |                                 ^                                                  |
         | a reason to end, a cancellation |                                                  |
         +------------> CLOSING -----------+        a retry of what failed: back to RUNNING <-+
                         |    ^ every entry scored or failed
                         +-- a retry: back to RUNNING

Within RUNNING an entry of the suite goes through

      unbuilt -> building -> built -> scoring -> scored          (or, from anywhere but scored, -> failed)

and stays "built" while its shards are planned, queued and run; a node goes through

      offered -> staging -> ready                                ready or staging -> back-off -> offered or ready
                                                                 any -> withdrawn -> offered, by a new offer

A pause withdraws every node, and none is offered until it is resumed.

and a job through

      intended -> submitted -> ended                             intended -> uncertain -> submitted or intended

A worked example. `Accepted` creates the state and requests `FindRequestSets`. `RequestSetsFound` reports that nothing is on
disk: the rule of `builds` intends a build job. Its `Built` outcome makes the entry "built". Meanwhile `NodesOffered` arrived,
and the rule of `nodes` intended a precursor, which stages the weights on the node with one CPU and no GPU. The rule of
`shards` requests `FindResponses` (has an earlier evaluation answered these requests?), and after `ResponsesFound` it requests
`MakePlan`. `Planned` brings the shards, and the queue is filled. Once the `Staged` outcome has made the node "ready", the
rule of `trials` intends one trial per lane. `JobStarted` follows, and the rule of `scoring` intends workers. Trials pull
shards from Redis; the records that they write to response files return as `ShardsDumped`. When an entry is complete,
`scoring` enqueues its score job; the weights are released as soon as no shard is left. `Scored` makes the entry "scored".
When every entry is, `ending` requests `WriteResults`, answered by `ResultsWritten`. The last `JobEnded` ends the evaluation.

Failures arrive as the same events. A submission that timed out is "uncertain" until a listing shows the job, or fails to. The
claims of a trial that dies without an outcome are returned; `job_ends` charges its node or its shard. A failing node is left
alone for a while; a failure that no other node can avoid ends the evaluation with its reason.

A decision is made once. Before it performs an action, the runner journals the events followed by those that were decided. A
replay calls `apply_event` for each line: it asks no rule, so that today's constants do not decide the past again, and ignores what
handlers return. If the process died before the decisions were written, they are still due at the next live event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.decide.evaluation import (
    builds,
    ending,
    job_ends,
    jobs,
    nodes,
    scoring,
    screening,
    shards,
    trials,
)
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.actions import Action, SubmitJob
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import EntryState, IllegalEventError, Phase, State
from evaljobs.contract import outcomes as out
from evaljobs.contract.engine_traits import PLANNED_BATCH, engine_traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of `step`: `events`, including those just decided, go into the journal; then `actions` are performed. `illegal`:
    events that could not follow, and why; they changed nothing.
    """

    events: tuple[ev.AnyEvent, ...] = ()
    actions: tuple[Action, ...] = ()
    illegal: tuple[tuple[ev.AnyEvent, str], ...] = ()


def start_evaluation(event: ev.Accepted) -> tuple[State, list[Action]]:
    """Return the state of a newly accepted evaluation."""
    record = event.record
    entries = [
        EntryState(index=i, name=t.name, status="not asked" if t.name in record.not_asked else "unbuilt")
        for i, t in enumerate(record.suite.tasks)
    ]
    suite = record.suite
    state = State(
        record=record, entries=entries, batch_size=suite.batch_size, token_budget=suite.token_budget
    )
    state.nodes.content = record.checkpoint.content
    if state.batch_size == "auto" and engine_traits(record.model.engine).batches_itself:
        state.batch_size = PLANNED_BATCH  # no trial is started to probe it
    if why := record.options.host_why:
        state.warnings.append(f"each node is served by one job that holds its GPUs: {why}")
    return state, builds.begin_conversion(state)


def step(state: State, site: Site, events: Iterable[ev.AnyEvent]) -> Step:
    """Process the events of one look, changing `state` in place."""
    taken: list[ev.AnyEvent] = []
    actions: list[Action] = []
    illegal: list[tuple[ev.AnyEvent, str]] = []

    def follow(found: Due) -> None:
        for one in found:
            if isinstance(one, ev.Event):
                taken.append(one)
                follow(apply_event(state, one))
            else:
                actions.append(one)

    for event in events:
        try:
            found = apply_event(state, event)
        except IllegalEventError as error:
            illegal.append((event, str(error)))
        else:
            taken.append(event)
            follow(found)
    if taken:
        follow(
            due_decisions(state, site, taken[-1].at, work=any(_changes_work(state, event) for event in taken))
        )
    return Step(events=tuple(taken), actions=tuple(actions), illegal=tuple(illegal))


def apply_event(state: State, event: ev.AnyEvent) -> Due:
    """Record one event, as a replay does for each line of a journal. Only a live coordinator uses the return value."""
    handler = _EVENTS.get(type(event))
    if handler is None:
        raise IllegalEventError(f"{event.kind} cannot come to a running evaluation")
    return handler(state, event)


def _changes_work(state: State, event: ev.AnyEvent) -> bool:
    """Return whether a build, a plan, a node or a trial may be due after this event. Most events, answers and metric jobs,
    change none of them while more shards are to do than trials live.
    """
    if isinstance(event, ev.OutcomeSeen):
        return not isinstance(event.outcome, out.Executed | out.Scored)
    if (
        isinstance(event, ev.ShardsDumped | ev.JobSubmitted | ev.JobStarted)
        and not state.nodes.limited.failures
    ):
        return state.shards.todo <= len(state.trials.live)
    return True


def due_decisions(state: State, site: Site, now: float, *, work: bool = True) -> Due:
    """Return everything that is due and was not requested yet. Each event is applied before the next is computed. Without
    `work`, only metric jobs, their workers and the end.
    """
    yield from ending.close_due(state, now)
    yield from ending.ending_due(state, now)
    if state.ending.phase == Phase.ENDED:
        return
    yield from builds.conversion_due(state, site, now)
    if not state.can_work:  # nor once every entry is terminal: its work is done then
        return
    if work:
        yield from builds.cuts_due(state, now)
        yield from builds.builds_due(state, site, now)
        yield from nodes.nodes_due(state, site, now)
        yield from shards.shards_due(state, now)
        yield from shards.deal_due(state, now)
        yield from trials.trials_due(state, site, now)
    yield from scoring.scoring_due(state, site, now)
    if work:
        yield from nodes.release_due(state, now)


def _intended(state: State, event: ev.JobIntended) -> Due:
    jobs.job_intended(state, event)
    _INTENDED[event.job.purpose](state, event)
    return [SubmitJob(job=event.job)]


def _outcome(state: State, event: ev.OutcomeSeen) -> Due:
    """Handle an outcome once: a coordinator that took over finds the files of its predecessor."""
    outcome = event.outcome
    key = (outcome.kind, outcome.name)
    if key in state.seen:
        return []
    state.seen.add(key)
    if isinstance(outcome, out.Failed):
        if outcome.job == "trial":
            return trials.trial_failed(state, outcome, event.at, event.cause)
        return _FAILED[outcome.job](state, outcome, event.at)
    handler = _OUTCOMES.get(type(outcome))
    return handler(state, outcome, event.at) if handler is not None else []


def _prioritized(state: State, event: ev.PriorityAsked) -> Due:
    state.record = state.record.model_copy(update={"priority": event.priority})
    return []


def _restarted(state: State, event: ev.Restarted) -> Due:
    """Repeat everything repeatable, subject by subject."""
    jobs.jobs_restarted(state, event.at)
    found = builds.conversion_restarted(state)
    ends = ending.ending_restarted(state, event.at)
    return [
        *found,
        *shards.shards_restarted(state),
        *scoring.scoring_restarted(state, event.at),
        *screening.judge_again(state),
        *ends,
    ]


_EVENTS: Mapping[type, Callable[[State, Any], Due]] = {
    ev.CheckpointConverted: builds.conversion_inspected,
    ev.RequestSetsFound: builds.request_sets_found,
    ev.NodesOffered: nodes.nodes_offered,
    ev.MemoryOffered: nodes.memory_offered,
    ev.BackOffOver: nodes.back_off_over,
    ev.NodeWithdrawn: nodes.node_withdrawn,
    ev.JobIntended: _intended,
    ev.JobSubmitted: jobs.job_submitted,
    ev.LimitReached: nodes.limit_reached,
    ev.JobStarted: jobs.job_started,
    ev.JobNotSubmitted: job_ends.not_submitted,
    ev.JobEnded: job_ends.job_ended,
    ev.OutcomeSeen: _outcome,
    ev.Planned: shards.plan_made,
    ev.ResponsesFound: shards.responses_found,
    ev.ShardsDealt: shards.shards_dealt,
    ev.TokenBudgetReduced: builds.token_budget_reduced,
    ev.EntryFailed: shards.entry_failed,
    ev.Closed: ending.evaluation_closed,
    ev.NodeBackedOff: nodes.node_backed_off,
    ev.StorageChosen: nodes.reads_storage,
    ev.PlanAsked: shards.plan_asked,
    ev.TrialsCancelled: trials.trials_cancelled,
    ev.MetricEnqueued: scoring.metric_enqueued,
    ev.ScreenJudged: screening.take_verdict,
    ev.WeightsReleased: nodes.weights_released,
    ev.WorkDone: ending.work_done,
    ev.Ended: ending.evaluation_ended,
    ev.ShardsDumped: shards.shards_dumped,
    ev.ShardCorrupted: shards.shard_corrupted,
    ev.ShardsStray: shards.shards_stray,
    ev.TrialHung: trials.trial_hung,
    ev.StragglersFound: trials.trial_straggles,
    ev.CancelAsked: ending.cancel_evaluation,
    ev.PauseAsked: nodes.evaluation_paused,
    ev.ResumeAsked: nodes.evaluation_resumed,
    ev.RetryAsked: ending.retry_evaluation,
    ev.ResultsWritten: ending.results_written,
    ev.PriorityAsked: _prioritized,
    ev.Restarted: _restarted,
}
_OUTCOMES: Mapping[type, Callable[[State, Any, float], Due]] = {  # a precursor's `Cleared` changes nothing
    out.Built: builds.sets_built,
    out.Converted: builds.conversion_ended,
    out.Staged: nodes.weights_staged,
    out.TrialEnded: trials.trial_ended,
    out.Probed: builds.batch_size_probed,
    out.TooLarge: builds.batch_too_large,
    out.Executed: scoring.programs_executed,
    out.Scored: scoring.entry_scored,
}
_FAILED: Mapping[str, Callable[[State, out.Failed, float], Due]] = {
    "build": builds.build_failed,
    "convert": builds.conversion_failed,
    "stage": nodes.staging_failed,
    "host": nodes.staging_failed,
    "execute": scoring.metric_job_failed,
    "score": scoring.metric_job_failed,
}
_INTENDED: Mapping[str, Callable[[State, ev.JobIntended], None]] = {
    "build": builds.build_intended,
    "convert": builds.conversion_intended,
    "stage": nodes.node_job_intended,
    "host": nodes.node_job_intended,
    "trial": lambda _state, _event: None,
    "metric": scoring.worker_job_intended,
}
