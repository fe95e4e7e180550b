"""One evaluation as a state machine: `step(state, site, event) -> Step(intents, actions)`. Pure.

What it is. An evaluation is one checkpoint and one suite. Everything that happens to it is an event: a person asked for
something, a job started or ended, an outcome file or a response record appeared, Redis lost the queue. `step` takes one
event, records it in the state, and returns what shall be done now. It reads no clock, file, process or queue; time comes
with the event. The journal is the list of all events, and replaying it gives the same state.

How it is cut. The state has one part for each subject, and each subject is a module that owns its part:

    builds       the converted checkpoint, the request sets               jobs, job_ends   the life of a job on the cluster
    shards       the plan, responses, the work queue                      nodes            offers, staging, back-off, prefetch
    scoring      metric jobs and their workers                            trials           model loads on lanes of nodes
    renewals     successors of precursors                                 limits           what gives way to a limit on jobs
    cuts         batches that do not fit a GPU's memory                   ending           reasons to end, results, retries

A module has handlers, which record events, and rules, which look at the state and say what is due. The two tables below
name the handler of every event and every outcome file. After the handler, `_due` applies the rules of all subjects in
order. So an action follows from what is known, not from the order in which it was learnt; a rule that is applied twice
does nothing the second time; and a restart needs no path of its own. `indexes` keeps look-up tables, so that no event
costs more when an evaluation has had more jobs, trials or shards.

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

and a job through

      intended -> submitted -> ended                             intended -> uncertain -> submitted or intended

A worked example. `Accepted` makes the state and asks for `FindRequestSets`. `RequestSetsFound` says that nothing is on
disk: the rule of `builds` intends a build job. Its `Built` outcome makes the entry "built". Meanwhile `NodesOffered` came,
and the rule of `nodes` intended a precursor, which stages the weights on the node with one CPU and no GPU. The rule of
`shards` asks for `FindResponses` (has an earlier evaluation answered these requests?), and after `ResponsesFound` for
`MakePlan`. `Planned` brings the shards: the queue is filled. Once the `Staged` outcome has made the node "ready", the rule
of `trials` intends one trial a lane. `JobStarted` follows, and the rule of `scoring` intends workers. Trials pull shards
from Redis; what they leave in response files comes back as `ShardsDumped`. When an entry lacks nothing, `scoring` enqueues
its score job; the weights are released as soon as no shard is left. `Scored` makes the entry "scored". Now every entry
is, and `ending` asks for `WriteResults`, which is answered by `ResultsWritten`. The last `JobEnded` ends the evaluation.

Failures come as the same events. A submission that timed out is "uncertain" until a listing shows the job or
does not. A trial that dies without an outcome gives its claims back; `job_ends` decides between its node and its
shard. A node that fails is left alone for a while; what no other node can mend ends the evaluation with its reason.

Jobs are decided once. A rule that wants a job makes the event `JobIntended` with all that the job asks for, applies it
like any other event, and returns it as an intent beside the order to submit. The runner writes an event and its intents
into the journal before it performs an action. A replay passes `replaying=True`: the rules then submit nothing, and the
journalled intents make the jobs of then, whatever the rules would decide today. If the process died before the intents
were written, the next live event finds the jobs still due. `ShardsDealt` is another intent: without stealing, it moves
shards of lost lanes to other lanes. `TokenBudgetReduced` is the third: it starts a task of fast mode again in smaller units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.evaluation import (
    builds,
    cuts,
    ending,
    indexes,
    job_ends,
    jobs,
    limits,
    nodes,
    renewals,
    scoring,
    shards,
    trials,
)
from coordinator.evaluation import events as ev
from coordinator.evaluation.actions import Action
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.state import EntryState, IllegalEventError, Phase, State
from evaljobs.contract import outcomes as out
from evaljobs.contract.engine_traits import PLANNED_BATCH, engine_traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows from one event: `intents` go into the journal behind it, then `actions` are performed."""

    intents: tuple[ev.JobIntended | ev.ShardsDealt | ev.TokenBudgetReduced, ...] = ()
    actions: tuple[Action, ...] = ()


_NOTHING = Step()


def start(event: ev.Accepted) -> tuple[State, list[Action]]:
    """The state of a newly accepted evaluation."""
    record = event.record
    entries = [EntryState(index=i, name=t.name) for i, t in enumerate(record.suite.tasks)]
    suite = record.suite
    state = State(
        record=record, entries=entries, batch_size=suite.batch_size, token_budget=suite.token_budget
    )
    state.nodes.content = record.checkpoint.content
    for entry in entries:
        indexes.file_entry(state, entry)
    if state.batch_size == "auto" and engine_traits(record.model.engine).batches_itself:
        state.batch_size = PLANNED_BATCH  # no trial is started to learn it
    if why := record.options.host_why:
        state.warnings.append(f"each node is served by one job that holds its GPUs: {why}")
    return state, builds.begin_conversion(state)


def step(state: State, site: Site, event: ev.AnyEvent, *, replaying: bool = False) -> Step:
    """Take in one event, changing `state` in place. Raises IllegalEventError, and changes nothing then."""
    handler = _EVENTS.get(type(event))
    if handler is None:
        raise IllegalEventError(f"{event.kind} cannot come to a running evaluation")
    found: jobs.Due = [*handler(state, event)]
    found += _due(state, site, event.at, submits=not replaying)
    if state.ending.phase == Phase.ENDED and state.ending.retry_waits:
        found += ending.begin_again(state)
        found += _due(state, site, event.at, submits=not replaying)
    if not found:
        return _NOTHING
    intents = tuple(x for x in found if isinstance(x, ev.Event))
    return Step(intents=intents, actions=tuple(x for x in found if not isinstance(x, ev.Event)))


def _due(state: State, site: Site, now: float, *, submits: bool) -> jobs.Due:
    """All that the state calls for and that was not asked for yet, in the order of the subjects."""
    if state.ending.phase == Phase.ENDED:
        return []
    found: jobs.Due = [*ending.close_due(state)]
    found += builds.conversion_due(state, site, now, submits=submits)
    if state.can_work and not state.all_terminal:
        found += cuts.cuts_due(state, now, submits=submits)
        found += builds.builds_due(state, site, now, submits=submits)
        found += nodes.nodes_due(state, site, now, submits=submits)
        found += shards.shards_due(state)
        found += shards.deal_due(state, now, submits=submits)
        found += trials.trials_due(state, site, now, submits=submits)
        found += scoring.scoring_due(state, site, now, submits=submits)
        found += nodes.release_due(state, now)
    found += ending.ending_due(state, now)
    found += jobs.jobs_due(state, now)
    return found


def _intended(state: State, event: ev.JobIntended) -> list[Action]:
    return _INTENDED[event.job.purpose](state, event)


def _outcome(state: State, event: ev.OutcomeSeen) -> list[Action]:
    """An outcome counts once: a coordinator that took over finds the files of its predecessor."""
    outcome = event.outcome
    key = (outcome.kind, outcome.name)
    if key in state.seen:
        return []
    state.seen.add(key)
    if isinstance(outcome, out.Failed):
        return _FAILED[outcome.job](state, outcome, event.at)
    handler = _OUTCOMES.get(type(outcome))
    return handler(state, outcome, event.at) if handler is not None else []


def _prioritized(state: State, event: ev.PriorityAsked) -> list[Action]:
    state.record = state.record.model_copy(update={"priority": event.priority})
    return []


def _restarted(state: State, event: ev.Restarted) -> list[Action]:
    """Repeat what may be repeated, subject by subject."""
    jobs.restarted(state, event.at)
    found = builds.conversion_restarted(state)
    ends = ending.restarted(state, event.at)
    return [*found, *shards.restarted(state), *scoring.restarted(state, event.at), *ends]


_EVENTS: Mapping[type, Callable[[State, Any], list[Action]]] = {
    ev.CheckpointConverted: builds.inspected,
    ev.RequestSetsFound: builds.found,
    ev.NodesOffered: nodes.offered,
    ev.MemoryOffered: nodes.memory_offered,
    ev.BackOffOver: nodes.back_off_over,
    ev.NodeWithdrawn: nodes.withdrawn,
    ev.JobIntended: _intended,
    ev.JobSubmitted: jobs.submitted,
    ev.LimitReached: limits.reached,
    ev.JobStarted: renewals.job_started,
    ev.JobNotSubmitted: job_ends.not_submitted,
    ev.JobEnded: job_ends.ended,
    ev.OutcomeSeen: _outcome,
    ev.Planned: shards.planned,
    ev.ResponsesFound: shards.responses_found,
    ev.PlanFailed: shards.plan_failed,
    ev.ShardsDealt: shards.dealt,
    ev.TokenBudgetReduced: cuts.reduced,
    ev.ShardsDumped: shards.dumped,
    ev.ShardCorrupted: shards.corrupted,
    ev.ShardsStray: shards.stray,
    ev.QueueLost: shards.queue_lost,
    ev.MetricJobsLost: scoring.lost,
    ev.MetricJobsDied: scoring.died,
    ev.TrialHung: trials.hung,
    ev.StragglersFound: trials.straggle,
    ev.CancelAsked: ending.cancel,
    ev.RetryAsked: ending.retry,
    ev.ResultsWritten: ending.results_written,
    ev.PriorityAsked: _prioritized,
    ev.Restarted: _restarted,
}
_OUTCOMES: Mapping[
    type, Callable[[State, Any, float], list[Action]]
] = {  # a precursor's `Cleared` changes nothing
    out.Built: builds.built,
    out.Converted: builds.conversion_ended,
    out.Staged: nodes.staged,
    out.TrialEnded: trials.ended,
    out.Probed: builds.probed,
    out.TooLarge: cuts.too_large,
    out.Executed: scoring.executed,
    out.Scored: scoring.scored,
}
_FAILED: Mapping[str, Callable[[State, out.Failed, float], list[Action]]] = {
    "build": builds.failed,
    "convert": builds.conversion_failed,
    "stage": nodes.stage_failed,
    "host": nodes.stage_failed,
    "trial": trials.failed,
    "execute": scoring.failed,
    "score": scoring.failed,
}
_INTENDED: Mapping[str, Callable[[State, ev.JobIntended], list[Action]]] = {
    "build": builds.intended,
    "convert": builds.conversion_intended,
    "stage": nodes.intended,
    "host": nodes.intended,
    "trial": trials.intended,
    "metric": scoring.intended,
}
