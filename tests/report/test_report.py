"""What a report makes of a journal: a makespan leaves out exactly the time in which neither a coordinator nor a job worked."""

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.simulated.parts import Faults, ended, record
from support.simulated.world import World

from coordinator.base import words
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.state import JobInfo, State, Trial
from coordinator.results.report.event_times import (
    LEAST_WAIT_SECONDS,
    Absences,
    covered_seconds,
    seconds_within,
    subtract_spans,
)
from coordinator.results.report.measurements import (
    ShardSpan,
    make_report,
    without_measurements,
)
from coordinator.results.report.render import absence_lines, gpu_table
from coordinator.results.report.usage import GpuUse, dead_trials_gpu_use, slot_word, token_use
from coordinator.runtime.make_summary import summary_of
from coordinator.site.cluster import Job
from evaljobs.contract.outcomes import Built, Scored, TrialEnded
from evaljobs.contract.specs import BatchIndex


@pytest.mark.parametrize("cpus", [1, 4])
def test_programs_count_every_core_of_their_worker(cpus):
    """CPU seconds of `execute` jobs are their seconds on all cores of the worker, against as many slots."""
    world = World(3, Faults(), record(metric={"cpus": cpus}, workers=5))
    world.run()
    executes = sum(metric.kind == "execute" for metric in world.state.scoring.metrics.values())
    report = make_report(world.state, world.journal, [], world.now)
    assert executes
    assert report.metric_seconds == {"t0": 1.0, "t1": 1.0 + cpus * executes, "t2": 1.0}
    assert world.state.cpu_slots == cpus  # the plan was worth one worker


def test_a_prediction_is_of_the_same_span_as_the_makespan():
    """It begins at acceptance: what went before the plan counts as it was."""
    world = World(3, Faults(), record())
    world.run()
    plan = world.state.plan
    report = make_report(world.state, world.journal, [], world.now)
    assert plan.made_at > report.accepted_at
    assert (
        report.predicted_makespan_seconds
        == plan.made_at - report.accepted_at + plan.predicted_makespan_seconds
    )


def test_a_report_says_what_its_trials_waited_for():
    """The cluster's reason for the longest wait."""

    class Busy(World):
        def starts(self, job, member):
            return self.dice.random() < 0.2 and super().starts(job, member)

        def listing(self):
            rows = super().listing()
            return [replace(r, reason="Priority") if r.phase == "pending" else r for r in rows]

    world = Busy(3, Faults(), record())
    world.run()
    report = make_report(world.state, world.journal, [], world.now)
    assert report.stages.waited_for == "Priority"
    assert report.stages.queue_wait


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_every_trial_that_ran_has_one_row(seed):
    """Also one that died with its node, with the cluster's word for its end; the parts add up to what was held."""
    world = World(seed, Faults(kill=0.1, vanish=0.05, node_down=0.05), record())
    world.run()
    report = make_report(world.state, world.journal, [], world.now)
    started = {(e.job, e.index) for e in world.journal if isinstance(e, ev.JobStarted)}
    ran = [t.name for t in world.state.trials.by_name.values() if (t.job, t.member) in started]
    assert sorted(g.trial for g in report.gpus) == sorted(ran)
    words = {e.state for e in world.journal if isinstance(e, ev.JobEnded)}
    said = {e.outcome.name for e in world.journal if isinstance(e, ev.OutcomeSeen)}
    for gpu in report.gpus:
        assert gpu.trial in said or gpu.ended in words
        parts = (gpu.infer, gpu.imports, gpu.load, gpu.warm, gpu.dump, gpu.wait, gpu.other)
        assert gpu.trial in said or sum(parts) == pytest.approx(gpu.held)


def test_a_trial_that_died_keeps_the_seconds_of_its_shards():
    """A node's failure takes the trial's own word with it; the table says how it ended."""
    use = GpuUse(
        trial="es-1-trial-n1-a0.0", node="n1", gpus=1, device="", started_at=100.0, held=60.0, infer=20.0,
        other=40.0, shards=2, ended="NODE_FAIL",
    )  # fmt: skip
    state = State(record=record(1), entries=[], batch_size=8)
    name = "es-1-trial-n1-a0"
    state.jobs.by_name[name] = JobInfo(job=Job(name=name, argv=(), log="", count=1, purpose="trial"))
    state.trials.by_name[use.trial] = Trial(name=use.trial, job=name, member=0, lane="n1/0")
    ended = {(name, 0): (160.0, "NODE_FAIL")}
    found = list(dead_trials_gpu_use(state, {(name, 0): 100.0}, ended, (), {use.trial: [5.0, 15.0]}))
    assert found == [use]
    assert not list(dead_trials_gpu_use(state, {}, ended, (), {})), "one that never started held no GPU"
    on_cpu = state.record.model_copy(
        update={"model": state.record.model.model_copy(update={"device": "cpu"})}
    )
    of_cpu = dead_trials_gpu_use(replace(state, record=on_cpu), {(name, 0): 100.0}, ended, (), {})
    assert slot_word(one.device for one in of_cpu) == "slot"
    report = without_measurements(state, "no").model_copy(update={"gpus": tuple(found)})
    out = io.StringIO()
    Console(file=out, width=120).print(gpu_table(report))
    assert "NODE_FAIL" in out.getvalue()


def spans_of(world):
    return [
        ShardSpan(shard=name, trial="t", started_at=10.0, seconds=5.0) for name in world.state.shards.by_name
    ]


def with_a_load():
    """An evaluation that has ended, and its journal with a trial that loaded for 20 s."""
    world = World(2, Faults(), record())
    world.run()
    trial = ended("n1", "es-1-trial-n1-a0.0", "drained").model_copy(update={"load_seconds": 20.0})
    return world, [*world.journal, ev.OutcomeSeen(at=world.now, outcome=trial)]


def test_a_run_with_a_failed_task_has_no_lower_bound():
    """Its makespan ends with the last score: the failed task's load and inference may have come after it."""
    world, journal = with_a_load()
    whole = make_report(world.state, journal, spans_of(world), world.now)
    assert whole.ratio
    world.state.entries[0].status = "failed"
    part = make_report(world.state, journal, spans_of(world), world.now)
    assert (part.lower_bound_seconds, part.ratio) == (None, None)


def test_the_time_that_a_limit_on_jobs_takes_is_said():
    """From the first refusal to the submission; overlapping ones count once."""
    world = World(2, Faults(), record())
    world.run()
    first, second = [e for e in world.journal if isinstance(e, ev.JobSubmitted)][:2]
    refusals = [
        ev.JobNotSubmitted(at=first.at - before, job=job, error="QOSMaxSubmitJobPerUserLimit", reason="limit")
        for before, job in ((90.0, first.job), (60.0, first.job), (30.0, second.job))
    ]
    report = make_report(world.state, [*refusals, *world.journal], [], world.now)
    assert report.limited_seconds == pytest.approx(90.0 + max(0.0, second.at - first.at))
    assert f"kept jobs out for {words.format_seconds(report.limited_seconds)}" in "; ".join(
        absence_lines(report)
    )
    assert make_report(world.state, world.journal, [], world.now).limited_seconds == 0.0


@pytest.mark.parametrize("late", [300.0, 1.0])
def test_a_wait_for_gpus_stands_apart_from_what_the_schedule_took(late):
    """Another evaluation had them: no policy is compared with that time, and the ratio leaves it out."""
    world, journal = with_a_load()
    first = next(place for place, e in enumerate(journal) if isinstance(e, ev.NodesOffered))
    earlier = [
        e.model_copy(
            update={"at": e.at - late} | ({"left_at": None} if isinstance(e, ev.OutcomeSeen) else {})
        )
        for e in journal[:first]
    ]
    report = make_report(world.state, [*earlier, *journal[first:]], spans_of(world), world.now)
    assert report.waited_seconds == pytest.approx(
        late if late > 10 else 0.0, abs=LEAST_WAIT_SECONDS * (late > 10)
    )
    assert ("waiting for a free GPU" in "; ".join(absence_lines(report))) == (late > 10)
    assert report.lower_bound_seconds
    worked = report.makespan_seconds - report.waited_seconds
    assert worked == pytest.approx(report.ratio * report.lower_bound_seconds)


@pytest.fixture(scope="module")
def done():
    """An evaluation that has ended, of tasks without programs, on 2 x 2 lanes."""
    world = World(2, Faults(), record(entries=1))
    world.run()
    return world


@given(data=st.data())
def test_a_makespan_is_never_below_its_bound(done, data):
    """Whenever requests are built, GPUs offered and shards inferred: beside each other, or one after the other."""
    draw = lambda most: data.draw(st.integers(0, most)) / 2  # noqa: E731
    (built,) = [
        e.outcome for e in done.journal if isinstance(e, ev.OutcomeSeen) and isinstance(e.outcome, Built)
    ]
    (scored,) = [
        e.outcome for e in done.journal if isinstance(e, ev.OutcomeSeen) and isinstance(e.outcome, Scored)
    ]
    events, ready, load = [done.journal[0]], 0.0, draw(30)
    for _ in range(data.draw(st.integers(1, 3))):  # a retry builds again, also while others infer
        ends = ready + draw(50)
        seconds = min(draw(50), ends)
        events.append(seen(built.model_copy(update={"seconds": seconds}), ends))
        ready = data.draw(st.sampled_from([ready or ends, ends]))
    offered = draw(100)
    offers = next(e for e in done.journal if isinstance(e, ev.NodesOffered))
    events.append(offers.model_copy(update={"at": offered}))
    trial = ended("n1", "unknown.0", "drained").model_copy(update={"load_seconds": load, "ended_at": offered})
    events.append(seen(trial, offered))
    lanes = sum(node.lanes for node in done.state.nodes.by_name.values())
    free = [max(ready, offered + load) + draw(20) for _ in range(lanes)]
    spans = []
    for name in done.state.shards.by_name:
        lane = data.draw(st.integers(0, lanes - 1))
        spans.append(ShardSpan(shard=name, trial="t", started_at=free[lane], seconds=draw(40)))
        free[lane] += spans[-1].seconds
    over = max(s.started_at + s.seconds for s in spans) + scored.seconds
    events.append(seen(scored, over))
    report = make_report(done.state, events, spans, over)
    assert report.ratio is None or report.ratio >= 1 - 1e-9


def seen(outcome, at):
    return ev.OutcomeSeen(at=at, left_at=at, outcome=outcome)


def test_every_second_that_a_trial_pended_counts():
    """Also of one that started and ended between two listings, or that was cancelled before it started."""
    world = World(3, Faults(), record())
    world.run()
    (first, *_), journal = world.state.trials.by_name.values(), world.journal
    submitted = next(e.at for e in journal if isinstance(e, ev.JobSubmitted) and e.job == first.job)
    unseen = [e for e in journal if not (isinstance(e, ev.JobStarted) and e.job == first.job)]
    own = ended("n0", first.name, "drained").model_copy(
        update={"started_at": submitted + 40.0, "ended_at": submitted + 50.0}
    )
    without_own = [e for e in unseen if not (isinstance(e, ev.OutcomeSeen) and e.outcome.name == first.name)]
    late = [e for e in without_own if not (isinstance(e, ev.JobEnded) and e.job == first.job)]
    for more, wait in (
        ([seen(own, submitted + 50.0)], 40.0),
        ([ev.JobEnded(at=submitted + 70.0, job=first.job, index=first.member, state="CANCELLED")], 70.0),
    ):
        report = make_report(world.state, [*late, *more], [], world.now + 100.0)
        assert report.stages.queue_wait == pytest.approx(wait)


def test_each_trial_of_a_host_counts():
    """A host is one member of a job and runs a trial on each of its lanes."""
    world = World(3, Faults(), record(stage={"host_trials": True}))
    while len(world.state.running_trials) < 2:
        world.tick()
    assert summary_of(world.state, world.now).gpus == len(world.state.running_trials)
    world.run()
    started = {e.job: e.at for e in world.journal if isinstance(e, ev.JobStarted)}
    report = make_report(world.state, world.journal, [], world.now)
    hosted = [
        g for g in report.gpus if world.state.jobs.by_name[g.trial.rpartition(".")[0]].job.purpose == "host"
    ]
    assert len(hosted) > 1
    assert {g.started_at <= started[g.trial.rpartition(".")[0]] for g in hosted} == {True}


@pytest.mark.parametrize("ahead", [2e9, 3600.0, -3600.0])
def test_times_of_clocks_that_disagree_are_unknown(ahead):
    """The coordinator's clock was set back, or a node's is wrong: no figure is made of such times, and scores stay."""
    world, journal = with_a_load()
    moved = journal[-1].outcome.model_copy(update={"started_at": ahead, "ended_at": ahead + 1})
    report = make_report(world.state, [*journal[:-1], seen(moved, world.now)], spans_of(world), world.now)
    assert (report.makespan_seconds, report.ratio, report.gpu_seconds, report.status) == (
        None,
        None,
        0.0,
        "done",
    )
    assert "clocks of its hosts disagree" in report.warnings[-1]


def index(asked):
    tokens = {"prefill_tokens": (60, 50, 40), "generated_tokens": (0, 0, 0), "asked_tokens": asked}
    places = {"offsets": (0, 1, 2, 3), "requests": (2, 2, 2), "documents": ((0,), (1,), (2,))}
    return BatchIndex(task="t", key="k", batch_size=2, **places, **tokens)


def test_the_tokens_of_the_shards_that_count_are_summed_by_their_own_cut():
    """Each cut has its own batches; a shard that does not count adds nothing. None are told where an index is missing, or of a
    version without asked tokens.
    """
    trial = ended("n1", "trial.0", "drained").model_copy(update={"generated_tokens": 7})
    indexes = {("t", ""): index((100, 90, 80)), ("t", "fast-64-2"): index((1, 1, 1))}
    use = token_use(["t|0|2"], indexes, [trial, ended("n1", "trial.1", "drained")])
    assert (use.asked, use.computed, use.generated) == (190, 110, 7)
    assert use.shared == 1 - 110 / 190
    assert use.per_second == (110 + 7) / use.infer_seconds
    assert token_use(["t|0|2"], {}, []) is None
    assert token_use(["t|0|2"], {("t", ""): index(())}, []) is None


SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=8
)
TIMES = ("started_at", "submitted_at", "ended_at")


@given(edges=st.lists(st.integers(0, 40), unique=True, max_size=8).map(sorted), work=SPANS)
def test_what_work_covers_is_no_pause(edges, work):
    """Second by second: in a span and in no work; what is left is in order and does not overlap. What overlaps counts once."""
    spans = list(pairwise(edges))[::2]
    left = subtract_spans(spans, work)
    cells = {t for a, b in spans for t in range(a, b)} - {t for a, b in work for t in range(a, b)}
    assert {t for a, b in left for t in range(int(a), int(b))} == cells
    assert all(a < b for a, b in left)
    assert all(before[1] <= after[0] for before, after in pairwise(left))
    assert covered_seconds(left) == (len(cells) if left else None)
    assert covered_seconds(work) == (len({t for a, b in work for t in range(a, b)}) if work else None)
    assert seconds_within(left, 10, 30) == len([t for t in cells if 10 <= t < 30])


def test_a_persons_pause_is_one_span_whatever_restarts_in_it():
    """It ends with the resumption, or with the results; absences outside of it count as before."""
    found = Absences()
    for event in (
        ev.PauseAsked(at=10.0, reason="asked"),
        ev.Restarted(at=30.0, seen_at=20.0),
        ev.PauseAsked(at=35.0, reason="again"),
        ev.ResumeAsked(at=40.0),
        ev.ResumeAsked(at=45.0),
        ev.Restarted(at=60.0, seen_at=50.0),
        ev.PauseAsked(at=70.0, reason="asked"),
        ev.ResultsWritten(at=80.0),
    ):
        found.take(event)
    assert found.spans == [(10.0, 40.0), (50.0, 60.0), (70.0, 80.0)]


@pytest.fixture(scope="module")
def world():
    """An evaluation that has ended; each of its trials ran from its job's start until its outcome."""
    world = World(3, Faults())
    world.run()
    started = {f"{e.job}.{e.index}": e.at for e in world.journal if isinstance(e, ev.JobStarted)}
    for number, event in enumerate(world.journal):
        if isinstance(event, ev.OutcomeSeen) and isinstance(event.outcome, TrialEnded):
            ran = {"started_at": started[event.outcome.name], "ended_at": event.at}
            outcome = event.outcome.model_copy(update=ran)
            world.journal[number] = event.model_copy(update={"outcome": outcome})
    return world


def shifted(value, after, seconds):
    """A later event, or its outcome, with all of its times later than `after` put off."""
    update = {}
    for name in value.model_fields_set:
        found = getattr(value, name)
        if name == "at" or (name in TIMES and found is not None and found > after):
            update[name] = found + seconds
        elif name == "outcome":
            update[name] = shifted(found, after, seconds)
    return value.model_copy(update=update)


def after_absence(world, at, seconds, seen_at):
    """The report where the coordinator died after event `at` and the next one came `seconds` later."""
    died = world.journal[at].at
    journal = [
        *world.journal[: at + 1],
        ev.Restarted(at=died + seconds, seen_at=seen_at),
        *(shifted(e, died, seconds) for e in world.journal[at + 1 :]),
    ]
    return make_report(world.state, journal, [], world.now + seconds)


@given(data=st.data(), seconds=st.floats(1, 1e5))
def test_makespan_and_pause_add_up_to_the_time_from_acceptance_to_the_last_score(world, data, seconds):
    """Wherever the coordinator died: a pause is no longer than its absence, and no trial ran in it. Before any job all of it is
    one; where a trial ran on, as Slurm's do, none is, and the absence is named."""
    at = data.draw(st.integers(0, len(world.journal) - 1))
    died = world.journal[at].at
    whole = make_report(world.state, world.journal, [], world.now)
    report = after_absence(world, at, seconds, died)
    scored = whole.accepted_at + whole.makespan_seconds
    wall = whole.makespan_seconds + (seconds if died < scored else 0.0)
    assert report.makespan_seconds + report.paused_seconds == pytest.approx(wall)
    assert 0 <= report.paused_seconds <= report.away_seconds
    assert report.away_seconds == pytest.approx(seconds if died < scored else 0.0)
    assert report.makespan_seconds >= whole.makespan_seconds - 1e-6
    for gpu in report.gpus:
        assert report.makespan_seconds >= gpu.held - 1e-6
    if at == 0:
        assert report.paused_seconds == report.away_seconds == seconds
        assert report.stages.build == pytest.approx(whole.stages.build)
    outcomes = (e.outcome for e in world.journal if isinstance(e, ev.OutcomeSeen))
    if any(isinstance(o, TrialEnded) and o.started_at < died < o.ended_at for o in outcomes):
        assert (report.away_seconds, report.paused_seconds) == (pytest.approx(seconds), 0.0)


def test_work_counts_when_it_was_done_not_when_it_was_seen(world):
    """Jobs went on while no coordinator ran, and the next one found their outcomes at once: stages are as ever, and the
    pause is the hour in which no job worked. Only the last score was made later.
    """
    whole = make_report(world.state, world.journal, [], world.now)
    back = world.now + 3600.0
    outcomes = [e for e in world.journal if isinstance(e, ev.OutcomeSeen)]
    outcomes.sort(key=lambda e: isinstance(e.outcome, Scored))
    first = min(world.journal.index(e) for e in outcomes)
    died = world.journal[first - 1].at
    journal = [
        *world.journal[:first],
        ev.Restarted(at=back, seen_at=died),
        *(e.model_copy(update={"at": back, "left_at": e.at}) for e in outcomes[:-1]),
        outcomes[-1].model_copy(update={"at": back + 30.0, "left_at": back + 30.0}),
    ]
    report = make_report(world.state, journal, [], back)
    assert report.stages.build == pytest.approx(whole.stages.build)
    assert report.stages.staging == pytest.approx(whole.stages.staging)
    assert report.away_seconds == pytest.approx(back - died)
    assert report.makespan_seconds + report.paused_seconds == pytest.approx(back + 30.0 - report.accepted_at)
    worked = sum(getattr(e.outcome, "seconds", 15.0) for e in outcomes)
    assert max(3590.0, report.away_seconds - worked) <= report.paused_seconds <= report.away_seconds


def test_a_trial_that_never_loaded_says_nothing_of_loads(world):
    """Mean and lower bound are of the trials that loaded."""

    def of(*loads):
        journal = [
            e
            for e in world.journal
            if not (isinstance(e, ev.OutcomeSeen) and isinstance(e.outcome, TrialEnded))
        ]
        for number, load in enumerate(loads):
            trial = ended("n1", f"es-1-trial-n1-a{number}.0", "drained").model_copy(
                update={"load_seconds": load}
            )
            journal.append(ev.OutcomeSeen(at=world.now, outcome=trial))
        return make_report(world.state, journal, spans_of(world), world.now)

    alone, beside = of(20.0), of(20.0, 0.0)
    assert alone.lower_bound_seconds
    assert (beside.lower_bound_seconds, beside.stages.load) == (alone.lower_bound_seconds, 20.0)


@pytest.mark.parametrize(
    ("events", "spans"),
    [
        *(
            ([ev.PlanAsked(at=20.0), ev.Restarted(at=50.0, seen_at=seen)], spans)
            for seen, spans in ((10.0, [(20.0, 50.0)]), (30.0, [(30.0, 50.0)]), (50.0, []), (None, []))
        ),
        (
            [
                ev.ResultsWritten(at=100.0),
                ev.PlanAsked(at=101.0),
                ev.Restarted(at=200.0, seen_at=150.0),
                ev.RetryAsked(at=900.0),
                ev.ResultsWritten(at=1000.0),
            ],
            [(100.0, 900.0)],
        ),
    ],
)
def test_a_coordinator_was_there_until_its_last_sign(events, spans):
    """The later of its last event and the journal's age; without a known age nothing is left out. From an end to its retry none
    was there, also where coordinators came and went meanwhile.
    """
    absences = Absences()
    for event in events:
        absences.take(event)
    assert absences.spans == spans
