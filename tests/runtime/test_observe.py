"""What a listing means: absence, twins, unknown words, trials that stand still; and what is queued again in Redis."""

import subprocess
from dataclasses import replace

import pytest
import redis
from dev_cluster.testing import wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.invariants import validate
from support.simulated.parts import SITE, Faults, record
from support.simulated.world import World

from coordinator.base import clock
from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.job_specs import Site
from coordinator.runtime import detect
from coordinator.runtime.effects import Performer
from coordinator.runtime.journal import Journal, read_events
from coordinator.runtime.runner import Running
from coordinator.site.cluster import JobState
from coordinator.site.services.redis_server import server_binary
from evaljobs.contract.outcomes import Built, ShardResponses
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import FrameWriter, write_outcome, write_record
from evaljobs.queue.redis_client import RedisAddress

GRACE = detect.Grace(lost=30.0, uncertain=10.0, hung=100.0, overdue=60.0, outcome=3.0)


def fresh():
    """An evaluation with one build job submitted as 100, seen at 0; and that job's name."""
    state, _ = machine.start_evaluation(ev.Accepted(at=0.0, record=record(1)))
    event = ev.RequestSetsFound(at=0.0, sets={}, folders={0: "/s"}, batch_size=8)
    (submit,) = (a for a in machine.step(state, SITE, [event]).actions if isinstance(a, do.SubmitJob))
    machine.step(state, SITE, [ev.JobSubmitted(at=0.0, job=submit.job.name, job_id="100")])
    return state, submit.job.name


def row(name, **more):
    return JobState(**{"job_id": "100", "name": name, "index": 0, "phase": "running", "state": "R", **more})


ODD = {"phase": "unknown", "state": "HYPERDRIVE"}
ENDED = {"phase": "ended", "state": "COMPLETED"}
TWIN = {"job_id": "101"}
# the submission's phase; (seconds, rows of our job's name) of each listing; the events that the last one gives, and twins
LOOKS = {
    "lost only after two good listings and the grace": (
        "submitted", [(100.0, []), (101.0, []), (131.0, [])], ["job-ended"], [],
    ),
    "one listing late is no loss": ("submitted", [(1e6, [])], [], []),
    "being seen starts the count anew": (
        "submitted", [(0.0, []), (1e6, [{}]), (2e6, []), (2e6 + 1, [])], [], [],
    ),
    "an unknown word never ends a job": ("submitted", [(t * 10.0, [ODD]) for t in range(100)], [], []),
    "an end is told after the grace for its files": (
        "submitted", [(10.0, [ENDED]), (13.0, [ENDED])], ["job-ended"], [],
    ),
    "an end after which no outcome can come is told at once": (
        "released", [(10.0, [ENDED])], ["job-ended"], [],
    ),
    "a submission that timed out is found by its name": (
        "uncertain", [(1.0, [{"job_id": "7"}])], ["job-submitted", "job-started"], [],
    ),
    "one that no listing shows is made again after the grace": (
        "uncertain", [(5.0, []), (16.0, [])], ["job-not-submitted"], [],
    ),
    "of a name submitted twice the one that we know stays and every other living one goes, once each": (
        "submitted", [(1.0, [{}, TWIN, TWIN | {"index": 1}, ENDED | {"job_id": "102"}])], ["job-started"], ["101"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_what_a_row_of_listings_means(name):
    """Only the last listing of a row tells of an end or a loss; what was not submitted is submitted again, by its name."""
    phase, looks, told, gone = LOOKS[name]
    state, job = fresh()
    if phase == "uncertain":
        state.jobs.by_name[job].phase, state.jobs.by_name[job].job_id = "uncertain", ""
    if phase == "released":
        info = state.jobs.by_name[job]
        info.job, info.released_at = replace(info.job, purpose="metric"), 5.0
    seen = detect.Sightings()
    for number, (now, rows) in enumerate(looks, 1):
        events, twins = detect.job_events(state, [row(job, **shown) for shown in rows], seen, GRACE, now)
        assert twins == gone
        kinds = [event.kind for event in events]
        if number < len(looks):
            assert not {"job-ended", "job-not-submitted"} & set(kinds)
            continue
        assert [k for k in kinds if told or k != "job-started"] == told
        assert all(e.lost == (not rows) for e in events if isinstance(e, ev.JobEnded))
        for event in events:
            again = machine.step(state, SITE, [event]).actions
            if isinstance(event, ev.JobNotSubmitted):
                assert event.reason == "absent"
                assert [a.job.name for a in again if isinstance(a, do.SubmitJob)] == [job]


words = st.text(max_size=12)
garbage = st.builds(
    JobState,
    job_id=st.sampled_from(["100", "101", "", "x"]),
    name=st.one_of(st.just("OURS"), words),
    index=st.integers(-1, 3),
    phase=st.sampled_from(["pending", "running", "unknown"]),
    state=words,
    node=st.none() | words,
)


@given(st.lists(st.lists(garbage, max_size=6), max_size=8))
def test_no_listing_of_living_jobs_ends_one_that_is_in_it(listings):
    """Garbage rows raise nothing and end nothing as long as our job is listed; every event is legal."""
    state, name = fresh()
    seen = detect.Sightings()
    for number, listing in enumerate(listings):
        named = [row(name if r.name == "OURS" else r.name, job_id=r.job_id, phase=r.phase) for r in listing]
        now = float(number * 50)
        events, twins = detect.job_events(state, [*named, row(name)], seen, GRACE, now)
        assert "100" not in twins
        for event in events:
            assert event.kind != "job-ended"
            assert not machine.step(state, SITE, [event]).illegal
            validate(state)


def under_way(seed):
    """A world in mid-inference: a trial runs and holds a shard."""
    made = World(seed, Faults())
    while not made.claims:
        made.tick()
    return made


@pytest.fixture
def world():
    return under_way(3)


def test_only_a_trial_without_progress_is_hung_and_it_is_told_until_it_is_gone(world):
    """Any change of a trial's stamp is progress, whatever clock it came from; standing still beyond the grace is none. A Redis
    that is away for longer than a trial may be silent says nothing of it.
    """
    state, now = world.state, world.now
    trials = [
        n for n, t in state.trials.live.items() if state.jobs.by_name[t.job].members[t.member] == "running"
    ]
    one = trials[0]
    still, moved = dict.fromkeys(trials, (1.0, "s")), dict.fromkeys(trials, (2.0, "s"))  # of a far clock
    silent = moved | {one: (1.0, "shard")}
    later = dict.fromkeys(trials, (3.0, "s")) | {one: silent[one]}
    for looks in (
        # cancelled again, its shard not blamed again
        ((0, still, []), (150, silent, [(one, "shard")]), (160, silent, []), (211, later, [(one, None)])),
        ((0, still, []), (1000, None, []), (1001, still, []), (1102, silent, [(one, "shard")])),
    ):
        seen = detect.Sightings()
        for seconds, progress, hung in looks:
            events = detect.hung_trials(state, progress, seen, GRACE, now + seconds)
            assert [(event.trial, event.shard) for event in events] == hung


def test_metric_jobs_are_lost_only_after_a_while():
    """RQ shows for a moment neither what was just enqueued nor what a worker has popped: two looks lack a lost job. The while
    is doubled with each loss.
    """
    world = World(1, Faults())
    while not world.state.scoring.outstanding:
        world.tick()
    state, name = world.state, min(world.state.scoring.outstanding)
    at = state.scoring.metrics[name].enqueued_at
    lost, seen, metric = {name: ""}, detect.Sightings(), state.scoring.metrics[name]
    for gone, seconds, again in (
        (lost, 4.0, []), (lost, 6.0, [metric]), ({}, 600.0, []), (lost, 600.0, []), (lost, 601.0, [metric]),
        (lost, 610.0, []), (lost, 612.0, [metric]), (lost, 631.0, []), (lost, 633.0, [metric]),
    ):  # fmt: skip
        assert detect.metric_events(state, gone, seen, at + seconds) == ([], again), seconds
    (died,), again = detect.metric_events(state, {name: "x"}, seen, at + 700.0)
    assert (died.outcome.name, died.outcome.error, again) == (name, f"{name}: x", [])


@pytest.mark.parametrize("lanes", [2, 0])
def test_a_holder_that_outstays_its_release_is_cancelled_until_it_is_gone(world, lanes):
    """Told to end and still there after the grace: its id is named, and again a grace later (scancel may fail). Without lanes
    it was staged ahead of GPUs that never came.
    """
    info = next(iter(world.state.live_jobs("stage")))
    world.state.nodes.by_name[info.job.node].lanes = lanes
    info.released_at = 1000.0
    seen = detect.Sightings()
    for now, named in ((1059.0, []), (1061.0, [info.job_id]), (1100.0, []), (1122.0, [info.job_id])):
        assert detect.overdue_jobs(world.state, seen, GRACE, now) == named


def test_what_a_job_left_is_taken_before_its_end_and_a_state_of_no_table_is_logged_once(
    tmp_path, monkeypatch, caplog
):
    """Its outcome appears after the look for new ones, in the same tick as its end: it did not end without a word."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=1)])
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.evaluations.accept(record(1))
    coordinator.tick()
    for member in cluster.members:
        member.state = "HYPERDRIVE"
    for _ in range(2):
        coordinator.tick()
    assert caplog.text.count("HYPERDRIVE is a state of jobs that is unknown") == 1
    (build,) = (job for job in cluster.submitted if job.purpose == "build")
    built = Built(name=f"{build.name}.0", entry=0, batch_size=8, sets={"t0": "/s"}, seconds=1)
    late = lambda _: write_outcome(running.paths, built) and None  # noqa: E731 (there is no queue)
    monkeypatch.setattr(coordinator.performer, "snapshot", late)
    cluster.end(running.state.jobs.by_name[build.name].job_id)
    running.observe(cluster.jobs(), clock.now())
    assert running.state.jobs.by_name[build.name].phase == "ended"
    assert running.state.entries[0].building.failures == 0
    assert not list(running.paths.outcomes.glob(".*"))


# --- a Redis that takes no writes, or that comes back ----------------------------------------------------------------


def _answers(client):
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def server(tmp_path):
    """A server without ACL at the published address: a test may do to it what any user of a site's Redis may, and set its limits."""
    socket = tmp_path / "s"
    words = [
        str(server_binary()),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--dir",
        str(tmp_path),
    ]
    process = subprocess.Popen([*words, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL)
    write_record(WorkPaths(tmp_path).redis_address, RedisAddress(socket=str(socket)))
    try:
        with redis.Redis(unix_socket_path=str(socket)) as client:
            wait_until(lambda: _answers(client))  # its socket is there before anybody listens
            yield client
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def running(server, tmp_path):
    """An evaluation with shards to do, on that server."""
    world = World(3, Faults())
    while not world.state.shards.todo:
        world.tick()
    work = Site(work_dir=str(tmp_path), trial_command=("python",), worker_command=("python",))
    performer = Performer(
        site=work, cluster=FakeCluster(fleet=[]), lm_eval_version=lambda: "0", observations=tmp_path / "o"
    )
    (tmp_path / world.state.evaluation_id / "responses").mkdir(parents=True)
    journal = Journal(tmp_path / world.state.evaluation_id / "journal.jsonl")
    return Running(world.state, journal, performer, detect.Grace())


@pytest.fixture
def queue(running):
    return running.performer.queue(running.state.evaluation_id)


def looks(running, times):
    """Looks at the queue and audits of it, at these times."""
    for now in times:
        running._look_at_queue(now)
        running._audit(now)


def test_a_queue_that_redis_does_not_take_is_filled_when_it_does(server, running, queue):
    """Five times a second for as long as it lasts was megabytes of journal; so were shards told stray."""
    state = running.state
    todo = {name for name, shard in state.shards.by_name.items() if shard.frame is None}
    told = lambda: [event.kind for event in read_events(running.journal.path)]  # noqa: E731
    times = iter(range(1_000_000, 2_000_000))
    server.config_set("maxmemory", "1")
    looks(running, [next(times) for _ in range(50)])
    assert not told()
    server.config_set("maxmemory", "0")
    for _ in range(5):
        running._look_at_queue(next(times))
    assert running.snapshot.unclaimed == state.shards.todo == len(todo)
    assert not told()
    server.delete(f"evalspan:{{{state.evaluation_id}}}:where")
    server.config_set("maxmemory", "1")
    looks(running, [next(times) for _ in range(5)])
    assert told() == ["shards-stray"]
    server.config_set("maxmemory", "0")
    running._audit(next(times))
    assert set(queue.unclaimed()) == todo
    assert told() == ["shards-stray"]


def test_a_trial_believed_dead_that_lives_costs_no_task_a_run(running, queue):
    """Redis came back empty and has forgotten the release: the trial's heartbeat claims its shard once, is released again,
    and what it is running is not counted as run without a record.
    """
    shards = running.state.shards.by_name
    shard = next(name for name, found in shards.items() if found.frame is None)
    held = []
    for number in range(6):
        held.append(queue.heartbeat("dead", phase="infer", shard=shard))
        looks(running, [1e6 + 20.0 * number])
    assert shards[shard].unread.failures == 0
    assert held == [True, True, False, False, False, False], "once more while the queue is filled"
    assert shard in queue.unclaimed()


def test_a_shard_that_was_run_without_redis_is_not_run_again(server, running, queue):
    """Redis comes back with the queue that it had, and the trial that dumped meanwhile has died unreported: the shard is
    taken out. Also where nothing else is to do. It comes back empty: response files are read before it is filled again.
    """
    state = running.state
    for now in (1e6, 1e6 + 1):  # filled; seen as filled
        running._look_at_queue(now)
    first, second, *others = queue.unclaimed()
    planned = state.shards.leaves[state.shards.by_name[first].leaf].planned
    ran = {"task": planned.task, "key": planned.key, "shard": first, "trial": "t"}
    with FrameWriter(running.paths.responses / "t.frames") as responses:
        responses.append(ShardResponses(**ran, started_at=1e6, seconds=1.0, responses=()))
    server.flushall()
    running._look_at_queue(1e6 + 2)
    assert set(queue.unclaimed()) == {second, *others}
    frame = state.shards.by_name[first].frame
    running._look_at_queue(1e6 + 3)
    state.shards.by_name[second].frame = frame
    running._audit(1e6 + 21)
    assert set(queue.unclaimed()) == set(others)
    for name in others:
        state.shards.by_name[name].frame = frame
    state.shards.todo = 0
    looks(running, [1e6 + 41])
    assert queue.unclaimed() == ()
