"""What a listing means: absence, twins, unknown words, trials that stand still, shards that lie nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.invariants import validate
from support.simulated.parts import SITE, Faults, record
from support.simulated.world import World

from coordinator.base import clock
from coordinator.cluster import JobState
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.state import State
from coordinator.runtime import detect
from evaljobs.contract.outcomes import Built
from evaljobs.contract.storage import write_outcome

GRACE = detect.Grace(lost=30.0, uncertain=10.0, hung=100.0, overdue=60.0, outcome=3.0)


def fresh() -> tuple[State, str]:
    """An evaluation with one build job submitted as 100, seen at 0; and that job's name."""
    state, _ = machine.start(ev.Accepted(at=0.0, record=record(1)))
    event = ev.RequestSetsFound(at=0.0, sets={}, folders={0: "/s"}, batch_size=8)
    (submit,) = (a for a in machine.step(state, SITE, event).actions if isinstance(a, do.SubmitJob))
    machine.step(state, SITE, ev.JobSubmitted(at=0.0, job=submit.job.name, job_id="100"))
    return state, submit.job.name


def row(name: str, **more: Any) -> JobState:
    return JobState(**{"job_id": "100", "name": name, "index": 0, "phase": "running", "state": "R", **more})


def kinds(events: list[ev.AnyEvent]) -> list[str]:
    return [e.kind for e in events]


RUNS, ODD = {"phase": "running"}, {"phase": "unknown", "state": "HYPERDRIVE"}
ENDED = {"phase": "ended", "state": "COMPLETED"}
# the submission's phase; (seconds, our job's row or None) of each listing, and the events that the last one gives
LOOKS = {
    "lost only after two good listings and the grace": (
        "submitted", [(100.0, None), (101.0, None), (131.0, None)], ["job-ended"],
    ),
    "one listing late is no loss": ("submitted", [(1e6, None)], []),
    "being seen starts the count anew": ("submitted", [(0.0, None), (1e6, RUNS), (2e6, None), (2e6 + 1, None)], []),
    "an unknown word never ends a job": ("submitted", [(t * 10.0, ODD) for t in range(100)], []),
    "an end is told after the grace for its files": ("submitted", [(10.0, ENDED), (13.0, ENDED)], ["job-ended"]),
    "a submission that timed out is found by its name": (
        "uncertain", [(1.0, {"job_id": "7"})], ["job-submitted", "job-started"],
    ),
    "one that no listing shows is made again after the grace": (
        "uncertain", [(5.0, None), (16.0, None)], ["job-not-submitted"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_what_a_row_of_listings_means(name: str) -> None:
    """Only the last listing of a row tells of an end or a loss; what was not submitted is submitted again, by its name."""
    phase, looks, told = LOOKS[name]
    state, job = fresh()
    if phase == "uncertain":
        state.jobs.by_name[job].phase, state.jobs.by_name[job].job_id = "uncertain", ""
    seen = detect.Sightings()
    for number, (now, shown) in enumerate(looks, 1):
        events, twins = detect.job_events(
            state, [] if shown is None else [row(job, **shown)], seen, GRACE, now
        )
        assert twins == []
        if number < len(looks):
            assert not {"job-ended", "job-not-submitted"} & set(kinds(events))
            continue
        assert [k for k in kinds(events) if told or k != "job-started"] == told
        assert all(e.lost == (shown is None) for e in events if isinstance(e, ev.JobEnded))
        for event in events:
            again = machine.step(state, SITE, event).actions
            if isinstance(event, ev.JobNotSubmitted):
                assert not event.maybe_done
                assert [a.job.name for a in again if isinstance(a, do.SubmitJob)] == [job]


def test_the_later_twin_of_a_job_goes() -> None:
    """A name submitted twice: the one we know stays, every other living one is named for cancelling, once each."""
    state, name = fresh()
    listing = [row(name), row(name, job_id="101"), row(name, job_id="101", index=1)]
    listing.append(row(name, job_id="102", phase="ended"))
    events, twins = detect.job_events(state, listing, detect.Sightings(), GRACE, 1.0)
    assert kinds(events) == ["job-started"]
    assert twins == ["101"]


words = st.text(max_size=12)
rows = st.builds(
    JobState,
    job_id=st.sampled_from(["100", "101", "", "x"]),
    name=st.one_of(st.just("OURS"), words),
    index=st.integers(-1, 3),
    phase=st.sampled_from(["pending", "running", "unknown"]),
    state=words,
    node=st.none() | words,
)


@given(st.lists(st.lists(rows, max_size=6), max_size=8))
def test_no_listing_of_living_jobs_ends_one_that_is_in_it(listings: list[list[JobState]]) -> None:
    """Garbage rows raise nothing and end nothing as long as our job is listed; every event is legal."""
    state, name = fresh()
    seen = detect.Sightings()
    for number, listing in enumerate(listings):
        named = [row(name if r.name == "OURS" else r.name, job_id=r.job_id, phase=r.phase) for r in listing]
        now = float(number * 50)
        events, twins = detect.job_events(state, [*named, row(name)], seen, GRACE, now)
        assert "job-ended" not in kinds(events)
        assert "100" not in twins
        for event in events:
            machine.step(state, SITE, event)
            validate(state)


def running_world(seed: int = 3) -> World:
    """A world in mid-inference: a trial runs and holds a shard."""
    world = World(seed, Faults())
    while not world.claims:
        world.tick()
    return world


def test_only_a_trial_without_progress_is_hung_and_it_is_told_until_it_is_gone() -> None:
    """Any change of a trial's stamp is progress, whatever clock it came from; standing still beyond the grace is none."""
    world = running_world()
    state = world.state
    seen = detect.Sightings()
    trials = [
        n for n, t in state.trials.live.items() if state.jobs.by_name[t.job].members[t.member] == "running"
    ]
    assert trials
    stamps = dict.fromkeys(trials, (1.0, "s"))  # of a clock that is far from ours
    assert detect.hung_trials(state, stamps, seen, GRACE, world.now) == []
    late = world.now + 150.0
    one = {**dict.fromkeys(trials, (2.0, "s")), trials[0]: (1.0, "shard")}
    (event,) = detect.hung_trials(state, one, seen, GRACE, late)
    assert isinstance(event, ev.TrialHung)
    assert (event.trial, event.shard) == (trials[0], "shard")
    assert detect.hung_trials(state, one, seen, GRACE, late + 10) == []
    still = {**dict.fromkeys(trials, (3.0, "s")), trials[0]: one[trials[0]]}
    (event,) = detect.hung_trials(state, still, seen, GRACE, late + 61)
    assert isinstance(event, ev.TrialHung)
    assert (event.trial, event.shard) == (trials[0], None), "cancelled again, its shard not blamed again"


def test_no_news_of_trials_is_not_their_silence() -> None:
    """A long trial outlives a Redis that is away for longer than it may be silent."""
    world = running_world()
    state, at = world.state, world.now
    seen = detect.Sightings()
    beats = dict.fromkeys(state.trials.live, (at, "s"))
    assert detect.hung_trials(state, beats, seen, GRACE, at) == []
    assert detect.hung_trials(state, None, seen, GRACE, at + 1000) == []
    assert detect.hung_trials(state, beats, seen, GRACE, at + 1001) == []
    assert detect.hung_trials(state, beats, seen, GRACE, at + 1102) != []


@pytest.mark.parametrize("seed", range(5))
def test_stray_shards_are_those_that_lie_nowhere(seed: int) -> None:
    """Queued, claimed by the living, or done: not stray. All the others are, also those a dead trial had claimed."""
    world = running_world(seed)
    state = world.state
    todo = {n for n, s in state.shards.by_name.items() if s.frame is None}
    assert set(detect.stray_shards(state, todo, {})) == set()
    assert set(detect.stray_shards(state, (), {})) == todo
    held = dict(world.claims)
    assert set(detect.stray_shards(state, (), held)) == todo - set(held)
    assert set(detect.stray_shards(state, (), dict.fromkeys(held, "a dead one"))) == todo


def test_metric_jobs_are_lost_only_after_a_while() -> None:
    """RQ may not show at once what was just enqueued."""
    world = World(1, Faults())
    while not world.state.scoring.outstanding:
        world.tick()
    state, name = world.state, min(world.state.scoring.outstanding)
    at = state.scoring.metrics[name].enqueued_at
    assert detect.missing_metrics(state, [], 5.0, at + 4.0) == []
    missing = detect.missing_metrics(state, [], 5.0, at + 6.0)
    assert name in missing
    assert detect.missing_metrics(state, sorted(state.scoring.outstanding), 5.0, at + 600.0) == []
    assert detect.metric_events(missing, {}, at) == [ev.MetricJobsLost(at=at, jobs=tuple(missing))]
    assert detect.metric_events(missing, dict.fromkeys(missing, "x"), at) == [
        ev.MetricJobsDied(at=at, jobs=dict.fromkeys(missing, "x"))
    ]
    state.scoring.metrics[name].losses = 3
    assert name not in detect.missing_metrics(state, [], 5.0, at + 39.0)
    assert name in detect.missing_metrics(state, [], 5.0, at + 41.0)


def test_a_holder_that_outstays_its_release_is_cancelled_until_it_is_gone() -> None:
    """Told to end and still there after the grace: its id is named, and again a grace later (scancel may fail)."""
    world = running_world()
    info = next(iter(world.state.live_jobs("stage")))
    info.released_at = 1000.0
    seen = detect.Sightings()
    assert detect.overdue_jobs(world.state, seen, GRACE, 1059.0) == []
    assert detect.overdue_jobs(world.state, seen, GRACE, 1061.0) == [info.job_id]
    assert detect.overdue_jobs(world.state, seen, GRACE, 1100.0) == []
    assert detect.overdue_jobs(world.state, seen, GRACE, 1122.0) == [info.job_id]


def test_a_precursor_near_its_time_limit_gets_a_successor_and_its_node_stays_in_use() -> None:
    """At the first look at which it is due, once: the trials read what the first one holds meanwhile."""
    world = running_world()
    state = world.state
    node = next(n for n in state.nodes.by_name.values() if n.status == "ready" and n.precursor)
    first, attempts = node.precursor, node.attempts
    state.nodes.renewals[first] = world.now
    (event,) = detect.waits_over(state, world.now)
    machine.step(state, world.site, event)
    assert state.jobs.by_name[first].successor in state.jobs.live
    assert (node.status, node.precursor, node.attempts) == ("ready", first, attempts)
    assert detect.waits_over(state, world.now) == []


def test_what_a_job_left_is_taken_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome appears after the look for new ones, in the same tick as its end: it did not end without a word."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=1)])
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record(1))
    coordinator.tick()
    (build,) = (job for job in cluster.submitted if job.purpose == "build")
    built = Built(name=f"{build.name}.0", entry=0, batch_size=8, sets={"t0": "/s"}, seconds=1)

    def late(_state: State) -> None:
        write_outcome(running.paths, built)

    monkeypatch.setattr(coordinator.performer, "snapshot", late)
    cluster.end(running.state.jobs.by_name[build.name].job_id)
    running.observe(cluster.jobs(), clock.now())
    assert running.state.jobs.by_name[build.name].phase == "ended"
    assert running.state.entries[0].build_attempts == 0
    assert not list(running.paths.outcomes.glob(".*"))


def test_a_state_that_no_table_has_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=1)])
    coordinator = coordinator_on(tmp_path, cluster)
    coordinator.accept(record(1))
    coordinator.tick()
    for member in cluster.members:
        member.state = "HYPERDRIVE"
    coordinator.tick()
    coordinator.tick()
    said = [line for line in caplog.messages if "HYPERDRIVE is a state of jobs that is unknown" in line]
    assert len(said) == 1
