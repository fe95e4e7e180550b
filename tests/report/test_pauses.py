"""Laws of pauses: a makespan leaves out exactly the time in which neither a coordinator nor a job worked."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated.parts import Faults, ended
from support.simulated.world import World

from coordinator.evaluation import events as ev
from coordinator.report.measurements import Report, ShardSpan, make_report
from coordinator.report.pauses import Absences, covered, within, without
from evaljobs.contract.outcomes import Scored, TrialEnded

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=8
)
TIMES = ("started_at", "submitted_at", "ended_at")


@given(edges=st.lists(st.integers(0, 40), unique=True, max_size=8).map(sorted), work=SPANS)
def test_what_work_covers_is_no_pause(edges: list[int], work: list[tuple[int, int]]) -> None:
    """Second by second: in a span and in no work; what is left is in order and does not overlap."""
    spans = list(pairwise(edges))[::2]
    left = without(spans, work)
    cells = {t for a, b in spans for t in range(a, b)} - {t for a, b in work for t in range(a, b)}
    assert {t for a, b in left for t in range(int(a), int(b))} == cells
    assert all(a < b for a, b in left)
    assert all(before[1] <= after[0] for before, after in pairwise(left))
    assert covered(left) == (len(cells) if left else None)
    assert within(left, 10, 30) == len([t for t in cells if 10 <= t < 30])


@given(spans=SPANS)
def test_what_overlaps_counts_once(spans: list[tuple[int, int]]) -> None:
    """A stage's seconds are those in which at least one of its jobs ran."""
    assert covered(spans) == (len({t for a, b in spans for t in range(a, b)}) if spans else None)


@pytest.fixture(scope="module")
def world() -> World:
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


def shifted(value: Any, after: float, seconds: float) -> Any:
    """A later event, or its outcome, with all of its times later than `after` put off."""
    update = {}
    for name in value.model_fields_set:
        found = getattr(value, name)
        if name == "at" or (name in TIMES and found is not None and found > after):
            update[name] = found + seconds
        elif name == "outcome":
            update[name] = shifted(found, after, seconds)
    return value.model_copy(update=update)


def after_absence(world: World, at: int, seconds: float, seen_at: float | None) -> Report:
    """The report where the coordinator died after event `at` and the next one came `seconds` later."""
    died = world.journal[at].at
    journal = [
        *world.journal[: at + 1],
        ev.Restarted(at=died + seconds, seen_at=seen_at),
        *(shifted(e, died, seconds) for e in world.journal[at + 1 :]),
    ]
    return make_report(world.state, journal, [], world.now + seconds)


@given(data=st.data(), seconds=st.floats(1, 1e5))
def test_makespan_and_pause_add_up_to_the_time_from_acceptance_to_the_last_score(
    world: World, data: st.DataObject, seconds: float
) -> None:
    """Wherever the coordinator died: a pause is no longer than its absence, and no trial ran in it."""
    at = data.draw(st.integers(0, len(world.journal) - 1))
    died = world.journal[at].at
    whole = make_report(world.state, world.journal, [], world.now)
    report = after_absence(world, at, seconds, died)
    assert whole.makespan_seconds is not None
    assert report.makespan_seconds is not None
    scored = whole.accepted_at + whole.makespan_seconds
    wall = whole.makespan_seconds + (seconds if died < scored else 0.0)
    assert report.makespan_seconds + report.paused_seconds == pytest.approx(wall)
    assert 0 <= report.paused_seconds <= report.away_seconds
    assert report.away_seconds == pytest.approx(seconds if died < scored else 0.0)
    assert report.makespan_seconds >= whole.makespan_seconds - 1e-6
    for gpu in report.gpus:
        assert report.makespan_seconds >= gpu.held - 1e-6


def test_an_absence_before_any_job_is_all_pause(world: World) -> None:
    """However long it was: makespan and stages are those of a run without it."""
    whole = make_report(world.state, world.journal, [], world.now)
    for seconds in (10.0, 86400.0):
        report = after_absence(world, 0, seconds, world.journal[0].at)
        assert report.paused_seconds == report.away_seconds == seconds
        assert report.makespan_seconds == pytest.approx(whole.makespan_seconds)
        assert report.stages.build == pytest.approx(whole.stages.build)


def test_an_absence_in_which_a_trial_ran_on_is_no_pause(world: World) -> None:
    """Slurm's jobs outlive the coordinator: their seconds stay in the makespan, and the absence is named."""
    outcomes = (e.outcome for e in world.journal if isinstance(e, ev.OutcomeSeen))
    trial = next(outcome for outcome in outcomes if isinstance(outcome, TrialEnded))
    inside = next(i for i, e in enumerate(world.journal) if trial.started_at < e.at < trial.ended_at)
    report = after_absence(world, inside, 600.0, world.journal[0].at)
    assert (report.away_seconds, report.paused_seconds) == (600.0, 0.0)


def test_work_counts_when_it_was_done_not_when_it_was_seen(world: World) -> None:
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
    assert report.makespan_seconds is not None
    assert report.makespan_seconds + report.paused_seconds == pytest.approx(back + 30.0 - report.accepted_at)
    worked = sum(getattr(e.outcome, "seconds", 15.0) for e in outcomes)
    assert max(3590.0, report.away_seconds - worked) <= report.paused_seconds <= report.away_seconds


def test_a_trial_that_never_loaded_says_nothing_of_loads(world: World) -> None:
    """Mean and lower bound are of the trials that loaded."""

    def of(*loads: float) -> Report:
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
        spans = [
            ShardSpan(shard=name, trial="t", started_at=10.0, seconds=5.0)
            for name in world.state.shards.by_name
        ]
        return make_report(world.state, journal, spans, world.now)

    alone, beside = of(20.0), of(20.0, 0.0)
    assert alone.lower_bound_seconds
    assert (beside.lower_bound_seconds, beside.stages.load) == (alone.lower_bound_seconds, 20.0)


@pytest.mark.parametrize(
    ("events", "spans"),
    [
        *(
            ([ev.QueueLost(at=20.0), ev.Restarted(at=50.0, seen_at=seen)], spans)
            for seen, spans in ((10.0, [(20.0, 50.0)]), (30.0, [(30.0, 50.0)]), (50.0, []), (None, []))
        ),
        (
            [
                ev.ResultsWritten(at=100.0),
                ev.QueueLost(at=101.0),
                ev.Restarted(at=200.0, seen_at=150.0),
                ev.RetryAsked(at=900.0),
                ev.ResultsWritten(at=1000.0),
            ],
            [(100.0, 900.0)],
        ),
    ],
)
def test_a_coordinator_was_there_until_its_last_sign(
    events: list[Any], spans: list[tuple[float, float]]
) -> None:
    """The later of its last event and the journal's age; without a known age nothing is left out. From an end to its retry none
    was there, also where coordinators came and went meanwhile.
    """
    absences = Absences()
    for event in events:
        absences.take(event)
    assert absences.spans == spans
