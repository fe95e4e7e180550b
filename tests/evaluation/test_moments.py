"""What is asked of an evaluation, or happens to it, at a moment of its life; and what it does then."""

import copy
from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.simulated.invariants import validate
from support.simulated.parts import SITE, Faults, ended, record
from support.simulated.shared import Shared
from support.simulated.world import VAGUE, World, replay

from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import footprint, scoring
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.ending import HOLDS_WEIGHTS
from coordinator.decide.evaluation.scoring import WAITING_SECONDS
from coordinator.runtime import detect
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.specs import FrameRef

TICK = 5.0
SEEDS = st.integers(0, 2**32)
BUSY = {
    "kill": 0.005,
    "submit_waits": 0.2,
    "submit_timeout": 0.05,
    "listing": 0.2,
    "restart": 0.03,
    "slow_outcome": 0.3,
}
TWICE = Faults(**BUSY, item_fails=0.1, build_fails=0.3)
CROWDED = Faults(
    **{**BUSY, "restart": 0.02, "slow_outcome": 0.2}, overrun=0.02, stage_fails=0.03, preempt=0.01
)


def inferring(world):
    """A shard is done and others are to do, with a trial running."""
    state = world.state
    done = any(s.frame is not None for s in state.shards.by_name.values())
    return done and state.shards.todo > 2 and bool(state.running_trials)


def nothing_is_doubled(world):
    """No node is staged on twice, no lane has two trials, but for jobs that were told to end; a precursor is its node's."""
    jobs = world.state.jobs.by_name
    held = [
        i
        for n in world.state.jobs.live
        if (i := jobs[n]).job.purpose in ("stage", "host") and i.released_at is None
    ]
    lanes = [t.lane for t in world.state.trials.live.values() if jobs[t.job].released_at is None]
    for several in (Counter(i.job.node for i in held), Counter(lanes)):
        assert max(several.values(), default=0) <= 1, world.summary()
    for info in held:
        node = world.state.nodes.by_name.get(info.job.node or "")
        assert node is None or node.precursor == info.job.name, world.summary()


@some(20)
@given(seed=SEEDS)
def test_an_evaluation_of_broken_weights_keeps_no_score(seed):
    """Whatever was scored before a trial said so; a retry, with other weights in the same place, scores it all again."""
    world = World(seed, Faults(**BUSY), record(entries=5))
    for _ in range(300):
        if world.state.trials.live and any(e.status == "scored" for e in world.state.entries):
            break
        world.tick()
    trial = next(iter(world.state.trials.live), None)
    if trial is None or world.state.winding_down:
        return
    error = "wrong weights: 1 of 64 values of model.norm.weight are NaN or infinite"
    failed = Failed(name=trial, job="trial", blame="operator", error=error, broken_weights=True)
    world.tell(ev.OutcomeSeen, outcome=failed)
    assert {e.status for e in world.state.entries} == {"failed"}
    assert {e.error for e in world.state.entries} == {error}
    world.run()
    assert replay(world.journal) == world.state
    world.tell(ev.RetryAsked)
    world.run()
    assert {e.status for e in world.state.entries} == {"scored"}


# --- retries and cancellations -----------------------------------------------------------------------------------------


@some(13)
@given(
    seed=SEEDS,
    nodes=st.integers(1, 3),
    asked=st.lists(st.integers(0, 120), min_size=1, max_size=6),
    cancelled=st.none() | st.integers(0, 60),
)
def test_a_retry_at_any_moment_doubles_and_orphans_nothing(seed, nodes, asked, cancelled):
    """Whenever it is asked for, of an evaluation that runs, is ending or has ended: what had failed is tried again, no
    job is there twice, and in the end, with the reason gone, all is scored and nothing is left."""
    world = World(seed, copy.copy(TWICE), record(entries=5), nodes=nodes, in_order=True)
    tick = 0
    while world.state.ended_at is None or tick <= max(asked):
        if world.state.shards.leaves and not world.odd.poison and tick < 40:
            world.odd.poison = dict.fromkeys(list(world.state.shards.by_name)[:2], VAGUE)
        if tick in asked:
            world.tell(ev.RetryAsked)
        if tick == cancelled and world.state.ended_at is None:
            world.tell(ev.CancelAsked, reason="asked")
        world.tick()
        nothing_is_doubled(world)
        tick += 1
        assert tick < 2000, world.summary()
    world.assert_nothing_left()
    world.odd.poison, world.faults = {}, Faults(listing=0.1)
    if world.state.failed_entries() or world.state.unscored_items:
        world.tell(ev.RetryAsked)
    world.run_to_scores()


ON_NODES = ("stage", "trial", "host")


@some(20)
@given(seed=SEEDS, nodes=st.integers(1, 3), at=st.integers(0, 60))
def test_a_pause_at_any_moment_gives_the_nodes_back_and_keeps_the_answers(seed, nodes, at):
    """Whatever dies meanwhile, the coordinator too: no job is on a node until the evaluation is resumed, and then all is scored."""
    world = World(seed, Faults(**BUSY), record(entries=5), nodes=nodes)
    for _ in range(at):
        world.tick()
    if not world.state.may_use_nodes:
        return

    def on_nodes(world):
        return [i for i in world.state.jobs.live.values() if i.job.purpose in ON_NODES]

    answered = {name for name, shard in world.state.shards.by_name.items() if shard.frame is not None}
    world.tell(ev.PauseAsked, reason="asked")
    world.until(lambda w: not on_nodes(w))
    for _ in range(20):
        world.tick()
        assert world.state.ended_at is not None or not on_nodes(world), world.summary()
    assert not [name for name in answered if world.state.shards.by_name[name].frame is None]
    assert replay(world.journal) == world.state
    if world.state.ended_at is None:
        world.tell(ev.ResumeAsked)
    world.run_to_scores()


def test_a_cancelled_evaluation_that_was_paused_uses_nodes_again_after_a_retry():
    world = World(1, rec=record(entries=3)).until(inferring)
    world.tell(ev.PauseAsked, reason="asked")
    world.tell(ev.CancelAsked, reason="asked")
    world.run()
    world.tell(ev.RetryAsked)
    world.run_to_scores()


@some(13)
@given(seed=SEEDS, nodes=st.integers(1, 3))
def test_a_retry_of_what_runs_takes_nothing_from_it(seed, nodes):
    """With an entry failed and the rest inferring: no job ends of it, no weights are staged anew, the entry is scored."""
    world = World(seed, rec=record(entries=12), nodes=nodes, in_order=True).until(
        lambda w: w.state.shards.leaves
    )
    world.odd.poison = {world.state.shards.leaves["t1"].planned.shards[0]: VAGUE}
    world.until(lambda w: w.state.failed_entries())
    world.odd.poison = {}
    if world.state.ended_at is not None or not world.state.shards.todo:
        return  # it came last
    live, staged = set(world.state.jobs.live), world.of("stage")
    world.tell(ev.RetryAsked)
    assert live <= world.state.jobs.live.keys()
    assert not [n for n in live if world.state.jobs.by_name[n].released_at is not None]
    world.run_to_scores()
    assert not {j.job.node for j in staged} & {j.job.node for j in world.of("stage") if j not in staged}


def test_a_cancelled_trial_that_the_cluster_starts_after_all_holds_no_shard():
    """Its job's start came before `scancel`."""
    world = World(0).until(lambda w: w.state.trials.idle)
    (name, trial), *_ = world.state.trials.idle.items()
    able = world.state.able_trials
    machine.apply_event(world.state, ev.TrialsCancelled(at=world.now, trials=(name,)))
    machine.apply_event(world.state, ev.JobStarted(at=world.now, job=trial.job, index=trial.member))
    assert (trial.running, world.state.able_trials) == (True, able - 1)
    validate(world.state)


@some(20)
@given(seed=SEEDS, ticks=st.integers(0, 40), after=st.integers(0, 3), taken_back=st.booleans())
def test_a_retry_while_it_is_being_cancelled_waits_for_the_end(seed, ticks, after, *, taken_back):
    """It is not lost: once the last job has ended all is tried again, and scored. A second cancellation takes it back."""
    world = World(seed, rec=record(entries=4), in_order=True).until(lambda w: w.now >= ticks * TICK)
    if world.state.ended_at is not None:
        return
    world.tell(ev.CancelAsked, reason="asked")
    for _ in range(after):
        world.tick()
    world.tell(ev.RetryAsked)
    waits = world.state.ending.retry_waits
    if taken_back:
        world.tell(ev.CancelAsked, reason="asked")
    world.until(nothing_is_doubled)
    assert not world.state.ending.retry_waits
    assert not waits or world.state.ending.retried is not taken_back
    world.assert_nothing_left()
    if not taken_back:
        world.assert_scored()


# --- trials that their siblings leave nothing ----------------------------------------------------------------------------


@some(60)
@given(
    seed=SEEDS,
    late=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.5, 1.0])),
    running=st.integers(2, 6),
    pace=st.sampled_from([0.1, 0.3, 1.0]),
    restart=st.sampled_from([0.0, 0.05]),
)
def test_a_trial_that_works_is_never_cancelled_for_its_siblings(seed, late, running, pace, restart):
    """However late a listing shows starts and ends, and however few jobs a limit lets run: who has answered a shard, or is
    known by a heartbeat, stays; what is left is worth as many trials as there are shards to do; all is scored.
    """
    faults = Faults(listing=late[0], mute=late[1], restart=restart, slow_outcome=0.3, submit_waits=0.2)
    world = World(seed, faults, nodes=3, running=running, reason="QOSMaxJobsPerUserLimit", pace=pace)
    world.run_to_scores()
    accepted = world.journal[0]
    assert isinstance(accepted, ev.Accepted)
    state, _ = machine.start_evaluation(accepted)
    for event in world.journal[1:]:
        if isinstance(event, ev.TrialsCancelled):
            answered = {s.frame.file for s in state.shards.by_name.values() if s.frame is not None}
            assert not {f"{trial}.frames" for trial in event.trials} & answered
            assert not state.running_trials & set(event.trials)
            able = [t for t in state.trials.live.values() if not t.cancelled]
            assert len(able) - len(event.trials) >= state.shards.todo
        machine.apply_event(state, event)


# --- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_after_any_event_a_restart_decides_what_was_not_written_and_repeats_what_ends_jobs(seed):
    """The process dies between an event and its intents: the same jobs are intended. A holder that was to be released is
    told so again, and workers whose work is over; else they would be waited for."""
    world = World(seed, Faults(slow_outcome=0.2))
    world.run()
    said = 0
    for place, event in enumerate(world.journal[1:], start=1):
        state = replay(world.journal[:place])
        stages = {i.job.name: i.released_at for i in state.live_jobs("stage")}
        released = {name for name, at in stages.items() if at is not None}
        over = all(e.terminal for e in state.entries) and state.ended_at is None
        again = machine.step(state, SITE, [ev.Restarted(at=event.at)])
        told = {a.job for a in again.actions if isinstance(a, do.ReleasePrecursor)}
        if isinstance(event, ev.JobIntended) and not isinstance(world.journal[place - 1], ev.JobIntended):
            assert event.job.name in {i.job.name for i in again.events if isinstance(i, ev.JobIntended)}
        assert released <= told, f"before event {place}"
        if over:
            assert any(isinstance(a, do.StopWorkers) for a in again.actions), f"before event {place}"
            assert told == stages.keys()
        said += len(released)
    assert said, "no moment between a release and its end"


@some(10)
@given(seed=SEEDS, ticks=st.integers(1, 60))
def test_a_journal_gives_the_same_jobs_under_other_rules(seed, ticks):
    """With other time limits, memory and attempt rules: the same names, nodes, trials and resources."""
    faults = Faults(kill=0.02, submit_timeout=0.05, stage_fails=0.1, overrun=0.05, slow_outcome=0.2)
    world = World(seed, faults).until(lambda w: w.now >= ticks * TICK)
    with (
        mock.patch.multiple(footprint, MIB=1),
        mock.patch.multiple(footprint, SHORTEST_LIMIT_SECONDS=7, ENDING_SECONDS=1),
    ):
        again = replay(world.journal)
    one, other = ({n: (i.job, i.trials) for n, i in s.jobs.by_name.items()} for s in (again, world.state))
    assert one == other


def test_an_illegal_event_changes_nothing():
    """Also where only its last part is illegal."""
    world = World(1).until(lambda w: w.claims)
    before = copy.deepcopy(world.state)
    frame = FrameRef(file="t.frames", offset=0, length=1)
    shards = ((next(iter(world.claims)), frame), ("no such|0|1", frame))
    step = machine.step(world.state, SITE, [ev.ShardsDumped(at=world.now, shards=shards)])
    assert len(step.illegal) == 1
    assert not step.events
    assert world.state == before


def test_a_job_that_was_never_asked_for_costs_no_try():
    """A coordinator that dies again and again before a submission's turn submits it all the same; a cluster that fails to
    do it eight times ends the evaluation, with its words."""
    world = World(1)
    world.called.clear()
    builds = sorted(world.state.jobs.live)
    for _ in range(20):
        world.restart()
        world.take([ev.JobNotSubmitted(at=world.now, job=n, error="no listing shows it") for n in builds])
    for _ in range(8):
        assert not world.state.ending.reason
        world.tell(ev.JobNotSubmitted, job=builds[0], error="no route", reason="in-doubt")
        world.tell(ev.JobNotSubmitted, job=builds[0], error="no route")
    assert "could not be submitted 8 times: no route" in world.state.ending.reason


# --- nodes and trials --------------------------------------------------------------------------------------------------


@pytest.mark.long
@some(33)
@given(seed=SEEDS, quiet=st.booleans())
def test_evaluations_that_share_a_cluster_all_end(seed, *, quiet):
    """They arrive while others infer, with GPUs and memory for few of them, nodes given back, down, taken by other
    users' jobs: none waits for another for ever, each is scored, and nothing is left."""
    shared = Shared(seed, Faults() if quiet else CROWDED)
    shared.run()
    for tenant in shared.tenants:
        lost = [e for e in tenant.state.entries if e.status != "scored"]
        told = tenant.state.ending.reason or all("times" in e.error for e in lost)
        assert not lost or (told and not quiet), tenant.summary()
        tenant.assert_nothing_left()


def test_a_stragglers_lane_is_left_alone_while_another_trial_runs():
    """It ends with shards to do: no trial follows it on its lane while another one runs."""
    checked = 0
    for seed in range(20):
        world = World(seed, Faults(straggle=0.2, overrun=0.1), record(entries=8))
        trials = world.state.trials
        while world.state.ended_at is None:
            before, shunned = set(trials.live), {trials.by_name[t].lane for t in trials.stragglers}
            ran = world.state.running_trials
            world.tick()
            if ran & world.state.running_trials:
                new = trials.live.keys() - before
                assert not {trials.by_name[t].lane for t in new} & shunned, world.summary()
                checked += len(new)
        world.assert_scored()
    assert checked, "no trial followed another: other dice are needed"


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_takes_eight_trials_with_it_ends_no_evaluation(seed):
    """Eight deaths in one listing are one node's fault: it rests, and the work goes on, also where it was the only one."""
    world = World(seed, rec=record(entries=12), nodes=1 + seed % 2, gpus=8).until(inferring)
    world.kill("trial", ["n0"])
    world.tick()
    assert not world.state.ending.reason
    world.run_to_scores()


@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_all_rest_are_waited_for(seed):
    """Trials die until every node is in back-off; the evaluation waits for the first to return, says so, and ends well. Each
    return is reported once, and none after a cancellation, however long the last jobs take to end."""
    world = World(seed, rec=record(entries=12)).until(inferring)
    world.odd.unready = frozenset(world.node_names)
    uses = world.state.nodes.by_name.values()
    world.until(lambda _: all(n.status == "back-off" for n in uses))
    first = min(n.back_off_until or 0 for n in uses)
    assert not world.state.ending.reason
    assert world.state.waits_until == first > world.now
    assert [e.kind for e in detect.waits_over(world.state, first)] == ["back-off-over"]
    cancelled = replay(world.journal)
    machine.step(cancelled, SITE, [ev.CancelAsked(at=world.now, reason="asked")])
    assert not detect.waits_over(cancelled, first + 100 * TICK)
    world.odd.unready = frozenset()
    world.run_to_scores()


@pytest.mark.parametrize("seed", range(3))
def test_weights_go_once_no_shard_is_left(seed):
    """While metrics still run no node holds weights; a record that proves unreadable has them staged once more."""
    world = World(seed, Faults(metric_slow=1.0), record(entries=4))
    world.until(lambda w: w.state.shards.leaves and not w.state.shards.todo and not w.memory)
    assert world.state.scoring.outstanding
    assert world.state.ended_at is None
    shard = sorted(world.state.shards.by_name)[seed % len(world.state.shards.by_name)]
    world.tell(ev.ShardCorrupted, shard=shard, error="torn")
    world.faults.metric_slow = 0.0
    world.run_to_scores()
    assert world.frames[shard] == 2


@pytest.mark.parametrize("seed", range(3))
def test_no_trial_is_cancelled_that_has_said_that_it_ended(seed):
    """It exits by itself; cancelled, it would stand as CANCELLED in the site's accounting. One that still holds its GPU
    after `Grace.overdue` is cancelled.
    """
    world = World(seed, rec=record(entries=6))
    world.until(
        lambda w: any(i.phase == "submitted" and i.job.count == 2 for i in w.state.live_jobs("trial"))
    )
    info = next(i for i in world.state.live_jobs("trial") if i.job.count == 2)
    asked = []
    world.cancel = asked.append
    world.tell(ev.OutcomeSeen, outcome=ended(info.job.node or "", info.trials[0], "drained"))
    world.tell(ev.CancelAsked, reason="asked")
    assert [c.index for c in asked if c.job_id == info.job_id] == [1]
    grace, seen = detect.Grace(), detect.Sightings()
    for late in (0, 1):
        overdue = detect.overdue_jobs(world.state, seen, grace, world.now + grace.overdue + late)
        assert (info.job_id in overdue) is bool(late)


def test_a_hung_trial_counts_once_though_its_end_brings_an_error():
    """What was cancelled may fail on the way out: its shard and its node have answered for it."""
    world = World(1, nodes=1).until(lambda w: w.claims)
    shard, trial = next(iter(world.claims.items()))
    world.tell(ev.TrialHung, trial=trial, shard=shard, seconds=900.0)
    error = {"blame": "retry", "error": "NCCL timeout", "node": "n0", "shard": shard}
    world.tell(ev.OutcomeSeen, outcome=Failed(name=trial, job="trial", **error))
    assert world.state.shards.by_name[shard].died_on == ["n0"]
    world.run_to_scores()


def test_a_node_that_is_offered_after_its_weights_were_evicted_is_known_by_its_gpus():
    """Staged ahead it had no GPUs to tell of; what runs there is learnt under their name."""
    world = World(1)
    world.tell(ev.MemoryOffered, nodes=("n9",))
    world.tell(ev.NodeWithdrawn, node="n9", reason="its memory is needed")
    world.tell(ev.NodesOffered, offers=(ev.Offer(node="n9", gpus=2, gpu_type="h100"),))
    node = world.state.nodes.by_name["n9"]
    assert (node.gpu_type, node.lanes) == ("h100", 2)


def test_weights_staged_ahead_go_with_their_evaluation():
    """A cancelled evaluation releases the precursors of nodes whose GPUs it never had."""
    world = World(1, nodes=0).until(lambda w: w.state.builds.looked_up)
    world.tell(ev.MemoryOffered, nodes=("n0",))
    world.until(lambda w: w.memory)
    world.tell(ev.CancelAsked, reason="done with")
    assert [job.released for job in world.of("stage")] == [True]
    world.run()
    world.assert_nothing_left()


@pytest.mark.parametrize("again", [False, True])
def test_a_node_whose_memory_a_killed_precursor_did_not_free_is_named_at_the_end(again):
    """Unless a later one there has: it takes the copy over, and frees it. A retry may send one."""
    world = World(1, nodes=1).until(lambda w: w.memory)
    (job,) = world.of("stage")
    world.end_member(job, job.members[0], "NODE_FAIL")
    if not again:
        world.tell(ev.CancelAsked, reason="done with")
    world.run()
    named = [w for w in world.state.warnings if w.startswith(f"n0 {HOLDS_WEIGHTS}")]
    assert len(named) == (not again)
    if not again:
        world.tell(ev.RetryAsked)
        world.run_to_scores()
        assert not any(HOLDS_WEIGHTS in w for w in world.state.warnings)


def test_weights_that_no_shard_needs_are_released_while_metrics_still_run():
    """Those that trials read, and those staged ahead on a node whose GPUs never came."""
    world = World(1, Faults(metric_slow=1.0), nodes=1)
    world.tell(ev.MemoryOffered, nodes=("n9",))
    world.until(lambda w: len(w.memory) == 2)
    world.until(lambda w: not w.memory, most=300)
    assert {job.job.node for job in world.of("stage")} == {"n0", "n9"}
    assert not world.state.ending.reason
    assert world.state.scoring.outstanding


# --- metrics -----------------------------------------------------------------------------------------------------------


@some(7)
@given(seed=SEEDS, nodes=st.integers(1, 3), again=st.booleans())
def test_what_has_all_its_responses_is_scored_though_no_trial_lives_any_more(seed, nodes, *, again):
    """Once nodes are given up, entries that lack responses fail with the reason; the others are scored, however slow
    their metrics are. A retry then does the rest."""
    world = World(seed, Faults(metric_slow=1.0), record(entries=10), nodes=nodes)
    leaves = world.until(lambda w: w.state.shards.leaves).state.shards.leaves
    world.until(lambda _: sum(leaf.todo == 0 for leaf in leaves.values()) >= 3)
    world.odd.unready = frozenset(world.node_names)
    world.until(lambda w: w.state.ending.reason or not w.state.shards.todo)
    if not world.state.ending.reason:
        return  # the claimed shards were the last
    answered = {t for t, leaf in leaves.items() if leaf.todo == 0}
    if again:
        world.odd.unready = frozenset()
        world.tell(ev.RetryAsked)
    world.faults.metric_slow = 0.0
    world.run()
    assert {e.name for e in world.state.entries if e.status == "scored"} >= answered, world.summary()
    lost = [e for e in world.state.entries if e.status != "scored"]
    assert all(e.error == world.state.ending.reason and not again for e in lost), world.summary()
    world.assert_nothing_left()


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_get_something_done_are_sent_for_again_however_often_they_are_taken(seed):
    """Their jobs end (preemption, their time limit) whenever a metric job is done; all is scored in the end."""
    world = World(seed, Faults(metric_slow=0.95), record(entries=30))
    taken = 0
    while world.state.ended_at is None:
        world.tick()
        if not world.state.scoring.fruitless.failures:
            taken += world.kill("metric")
    world.run_to_scores()
    assert taken > world.state.scoring.fruitless.limit


@some(13)
@given(seed=SEEDS, most=st.integers(1, 6), slow=st.sampled_from([0.0, 0.8, 0.97]))
def test_workers_are_as_many_as_are_worth_it_and_no_more(seed, most, slow):
    """They start once a trial runs, as many as the plan says; more come only where jobs have waited, never beyond the
    settings; when all is scored none is left."""
    world = World(seed, Faults(metric_slow=slow), record(entries=8, workers=most))
    most_seen = 0
    while world.state.ended_at is None:
        before = len(world.of("metric"))
        waited = [world.now - m.enqueued_at for m in world.state.scoring.metrics.values() if not m.done]
        world.tick()
        jobs = world.of("metric")
        if jobs and not before:
            assert jobs[0].job.count == 1
            assert any(m.phase != "pending" for j in world.of("trial") for m in j.members.values())
        elif len(jobs) > before:
            assert max(waited) >= WAITING_SECONDS - TICK
        most_seen = max(most_seen, sum(m.phase != "ended" for j in jobs for m in j.members.values()))
    assert most_seen <= (1 if slow == 0.0 else most)
    world.run_to_scores()


def test_jobs_of_a_metric_longer_than_an_even_share_go_first():
    """A judge's jobs follow one another: behind shorter ones they would end last. Others come in their order."""
    world = World(1).until(lambda world: world.state.scoring.outstanding)
    leaves = world.state.shards.leaves
    for name, leaf in leaves.items():
        leaf.planned = leaf.planned.model_copy(update={"metric_seconds": 100.0 if name == "t1" else 1.0})
    world.state.plan.workers = 2
    asked = [a for a in scoring.scoring_restarted(world.state, world.now) if isinstance(a, do.EnqueueMetric)]
    assert asked
    for action in asked:
        of = world.state.scoring.metrics[action.name]
        assert action.first == (of.task == "t1")
