"""Who may use which free GPUs, who is a straggler, which waiting checkpoints are dropped: laws over random worlds."""

import itertools
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.parts import FakeJob, Faults, record
from support.simulated.shared import Shared, Tenant

from coordinator.base import clock
from coordinator.decide.allocation import cordons
from coordinator.decide.allocation.allocate import Demand, Limits, allocate
from coordinator.decide.allocation.backlog import SeriesMember, stale_evaluations
from coordinator.decide.allocation.demand import NODE_LOSS, Use, nodes_to_give_back
from coordinator.decide.evaluation import nodes
from coordinator.decide.evaluation.nodes import idle_nodes
from coordinator.runtime.detect import (
    LEAST_SECONDS,
    LEAST_SHARDS,
    LEAST_SIGMA,
    SIGMAS,
    Pace,
    find_stragglers,
)

NAMES = [f"n{i}" for i in range(8)]


@st.composite
def clusters(draw):
    made = []
    for name in NAMES[: draw(st.integers(0, 8))]:
        gpus = draw(st.integers(0, 8))
        drawn = {
            "usable": draw(st.booleans()),
            "gpus_free": draw(st.integers(0, gpus)),
            "memory_free_mb": draw(st.integers(0, 1000)),
            "counts_memory": draw(st.booleans()),
            "partitions": tuple(draw(st.sets(st.sampled_from(["gpu", "spare"])))),
            "best_effort": draw(st.booleans()),
        }
        made.append(replace(fake_node(name, gpus=gpus, cpus=8, memory_mb=1000), **drawn))
    return made


@st.composite
def demands(draw):
    return [
        Demand(
            evaluation_id=f"e{number}",
            priority=draw(st.integers(-2, 2)),
            accepted_at=draw(st.integers(0, 5)),
            gpus=draw(st.integers(1, 40)),
            gpus_per_trial=draw(st.integers(1, 4)),
            in_use=draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), max_size=3)),
            avoid=draw(st.frozensets(st.sampled_from(NAMES), max_size=2)),
            precursor_mb=draw(st.integers(0, 1200)),
            trial_mb=draw(st.integers(0, 400)),
        )
        for number in range(draw(st.integers(0, 5)))
    ]


LIMITS = st.builds(
    Limits,
    max_nodes=st.none() | st.integers(1, 8),
    max_gpus=st.none() | st.integers(0, 30),
    leave_nodes_free=st.integers(0, 4),
)
GPUS_PROMISED = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(0, 8), st.just(0)))
MEMORY_PROMISED = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.just(0), st.integers(-500, 800)))
HAD = st.tuples(st.integers(0, 20), st.sets(st.sampled_from(["n0", "n5", "n7"])))


@given(clusters(), demands(), LIMITS, HAD, GPUS_PROMISED)
def test_offers_keep_every_limit(nodes, asked, limit, had, promised):
    """Never more than is free and not promised, asked for or allowed; whole trials; a node to one evaluation a time; spared
    nodes stay spared; on a node of its own an evaluation keeps what it has and grows."""
    used, others = had
    offers = allocate(nodes, asked, limit, gpus_in_use=used, nodes_in_use=others, promised=promised)
    by_name = {n.name: n for n in nodes}
    given_ = [
        (d, o, o.gpus - d.in_use.get(o.node, 0)) for d in asked for o in offers.get(d.evaluation_id, ())
    ]
    offered = {o.node for _, o, _ in given_}
    assert len(offered) == len(given_), "a node is offered once"
    for demand, offer, more in given_:
        node = by_name[offer.node]
        assert node.usable
        assert 0 < more <= node.gpus_free - promised.get(node.name, (0, 0))[0]
        assert offer.gpus <= node.gpus, "what it has there may have ended and look free"
        assert more % demand.gpus_per_trial == 0
        assert offer.node not in demand.avoid
    for demand in asked:
        assert sum(more for d, _, more in given_ if d is demand) <= demand.gpus
    ours = set(others).union(*(d.in_use for d in asked))
    if limit.max_nodes is not None and offered - ours:
        assert len(offered | ours) <= limit.max_nodes, "of all evaluations together"
    if limit.max_gpus is not None:
        assert sum(more for _, _, more in given_) <= max(0, limit.max_gpus - used)
    free = [n for n in nodes if n.usable and n.gpus and n.gpus_free == n.gpus]
    idle = {n.name for n in free if not promised.get(n.name, (0, 0))[0]}
    assert len(idle - offered) >= min(limit.leave_nodes_free, len(idle))


@given(clusters(), demands(), MEMORY_PROMISED)
def test_an_offer_fits_into_the_nodes_free_memory(nodes, asked, promised):
    """Its precursor and one trial at least, as many trials as fit; unless no node of the cluster could ever hold them: then the
    cluster's refusal says why."""
    offers = allocate(nodes, asked, Limits(), gpus_in_use=0, promised=promised)
    by_name = {n.name: n for n in nodes}
    for demand in asked:
        least = demand.precursor_mb + demand.trial_mb
        if not any(n.gpus and (not n.counts_memory or n.memory_mb >= least) for n in nodes):
            free = replace(demand, precursor_mb=0, trial_mb=0)
            (unbound,) = allocate(nodes, [free], Limits(), gpus_in_use=0).values()
            (alone,) = allocate(nodes, [demand], Limits(), gpus_in_use=0, promised=promised).values()
            assert [(o.node, o.gpus) for o in alone] == [(o.node, o.gpus) for o in unbound]
            continue
        for offer in offers[demand.evaluation_id]:
            node, has = by_name[offer.node], demand.in_use.get(offer.node, 0)
            trials = (offer.gpus - has) // demand.gpus_per_trial
            once = 0 if has else demand.precursor_mb
            room = node.memory_free_mb - promised.get(node.name, (0, 0))[1]
            assert not node.counts_memory or once + trials * demand.trial_mb <= room


@given(clusters(), demands().filter(bool), st.integers(0, 30))
def test_the_first_in_priority_gets_what_it_would_get_alone(nodes, asked, gpus):
    """Others change nothing for the first demand: by priority, then age."""
    first = min(asked, key=lambda d: (-d.priority, d.accepted_at, d.evaluation_id))
    limit = Limits(max_gpus=gpus)
    together = allocate(nodes, asked, limit, gpus_in_use=0)
    alone = allocate(nodes, [first], limit, gpus_in_use=0)
    assert together[first.evaluation_id] == alone[first.evaluation_id]


# --- stragglers ----------------------------------------------------------------------------------------------------------

SIGMA = st.floats(0.0, 0.5)
# so many times as long as predicted, each of the others
OTHERS = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=30)


def paces(others, **named):
    times = {**{f"t{i}": x for i, x in enumerate(others)}, **named}
    return {trial: Pace(took=x * 1e5, predicted=1e5, shards=5) for trial, x in times.items()}


@given(others=OTHERS, prior=st.floats(0.01, 100.0), sigma=SIGMA, slow=st.floats(0.1, 100.0))
def test_stragglers_are_few_and_the_slowest(others, prior, sigma, slow):
    """Never half of the trials, and no trial that is not named is slower than one that is. A prior that is off for all names
    none: where what all trials take is multiplied by the same, the same ones are stragglers, by the same factor."""
    every = paces(others, slow=slow)
    found = find_stragglers(every, sigma)
    assert 2 * len(found) < len(every) + 1
    assert all(every[t].log >= max(p.log for o, p in every.items() if o not in found) for t in found)
    assert find_stragglers(paces([x * prior for x in others], slow=slow * prior), sigma) == pytest.approx(
        found
    )


@given(others=st.lists(st.floats(0.95, 1.05), min_size=3, max_size=30), sigma=SIGMA)
def test_one_that_is_slower_by_more_than_three_sigma_is_named(others, sigma):
    """Above the spread by a tenth it is named with its factor, below it is not; the others never are."""
    limit = exp(SIGMAS * max(sigma, LEAST_SIGMA))
    # of 0.05 on both sides, the others' own spread is below the least that counts
    assert find_stragglers(paces(others, slow=1.2 * limit), sigma) == {
        "slow": pytest.approx(1.2 * limit, rel=0.06)
    }
    assert not find_stragglers(paces(others, slow=0.9 * limit), sigma)


@given(slow=st.floats(1.0, 1000.0))
def test_little_evidence_names_no_trial(slow):
    """One shard, or seconds that are noise, or too few others to compare with."""
    one = Pace(took=slow * 1000, predicted=1000.0, shards=LEAST_SHARDS - 1)
    short = Pace(took=LEAST_SECONDS / 2, predicted=LEAST_SECONDS / 2 / slow, shards=9)
    for known in (
        paces([1.0] * 2, slow=slow),
        paces([1.0] * 9) | {"slow": one},
        paces([1.0] * 9) | {"slow": short},
    ):
        assert not find_stragglers(known, 0.1)


@given(elapsed=st.floats(0, 1000), predicted=st.floats(0.1, 1000), done=st.integers(0, 8))
def test_a_claimed_shard_counts_only_against_its_trial(elapsed, predicted, done):
    """It never makes a trial look faster than the shards that it has done, and counts what must be over by now."""
    before = paces([1.0])["t0"]
    after = before.and_in_hand(elapsed, predicted, done, 8)
    assert after.log >= before.log
    late = elapsed > predicted * min(1.0, (done + 1) / 8)
    assert (after.shards == before.shards + 1) == late


# --- checkpoints that wait -----------------------------------------------------------------------------------------------


@st.composite
def history(draw):
    return [
        SeriesMember(
            evaluation_id=f"e{i}",
            series=draw(st.sampled_from("ab")),
            order=(float(draw(st.integers(0, 9))), float(draw(st.integers(0, 3)))),
            phase=draw(st.sampled_from(["waiting", "started", "over"])),
        )
        for i in range(draw(st.integers(0, 12)))
    ]


@given(history())
def test_a_started_or_newest_checkpoint_is_never_dropped_and_no_other_waits(items):
    """And each drop has its reason."""
    dropped = stale_evaluations(items)
    assert all(dropped.values())
    for series in "ab":
        mine = sorted((s for s in items if s.series == series), key=lambda s: (s.order, s.evaluation_id))
        open_ones = [s for s in mine if s.phase != "over"]
        stale_ones = {s.evaluation_id for s in open_ones[:-1] if s.phase == "waiting"}
        assert stale_ones == {s.evaluation_id for s in mine} & dropped.keys()


# --- whole evaluations: nodes that others take, a limit on jobs, nodes that are given back ---------------------------


def finish(world, turns):
    """The time at which all evaluations are scored, with nothing left."""
    world.run(turns)
    for tenant in world.tenants:
        tenant.assert_scored()
        tenant.assert_nothing_left()
    return world.now


class Seized(Shared):
    """From some moment on a node's GPUs go to another user for good, as they become free; at first it is the only one."""

    def __init__(self, seed, after):
        super().__init__(seed, Faults())
        self.after, self.names = after, ["n0"]
        self.foreign = {"n0": 0, "n1": 0}
        self.contention = self.outages = 0.0

    def change(self):
        super().change()
        if self.now >= self.after:
            self.foreign["n0"] += max(0, self.gpus - self.used("n0")[0])
        if self.now >= self.after + 60.0 and "n1" not in self.names:
            self.names.append("n1")


@some(13)
@given(seed=st.integers(0, 2**32), after=st.floats(0.0, 400.0))
def test_an_evaluation_whose_offered_gpus_are_taken_goes_where_there_is_room(seed, after):
    """Evaluations whose only node is taken before their trials start are scored on the next one that is free."""
    finish(Seized(seed, after), 1000)


# --- a limit on this user's jobs -----------------------------------------------------------------------------------------

REASON = "QOSMaxJobsPerUserLimit"
PLACES = 3  # MaxJobsPerUser=4, of which the daemon's own job has one


class Limited(Shared):
    """Three nodes; of all evaluations together so many jobs run, the one that was submitted first before the others."""

    def __init__(self, seed, evaluations, share):
        super().__init__(seed, Faults())
        self.names, self.gpus, self.memory, self.share = ["n0", "n1", "n2"], 2, 3000, share
        self.foreign = dict.fromkeys(self.names, 0)
        self.contention = self.outages = self.releases = 0.0
        self.limits = type(self.limits)()
        self.arrivals = [0.0] * evaluations
        self.seed, self.order = seed, list[FakeJob]()

    def arrives(self):
        return Tenant(self.seed, self, len(self.tenants))

    def living(self, phase):
        jobs = (job for tenant in self.tenants for job in tenant.jobs.values())
        return [job for job in jobs for member in job.members.values() if member.phase == phase]

    def starts(self, job, _dice):
        self.order += [j for j in self.living("pending") if j not in self.order]
        waiting = [j for j in self.order if any(m.phase == "pending" for m in j.members.values())]
        return len(self.living("running")) < PLACES and job is waiting[0]

    def kept_out(self):
        full = len(self.living("running")) >= PLACES
        return {j.job.name: REASON for j in self.living("pending")} if full else {}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_three_equal_evaluations_take_no_longer_than_one_after_the_other(seed, share):
    """Under the limit each waits at most for those before it: none holds its places with weights that are not used."""
    assert finish(Limited(seed, 3, share), 2000) <= 3 * finish(Limited(seed, 1, share), 2000)


class Fitted(Limited):
    """The settings of `doctor` and `init` for it: one trial at a time beside its precursor and a worker, nothing prefetched."""

    def __init__(self, seed, evaluations):
        super().__init__(seed, evaluations, 0.0)
        self.kept = 0  # looks that found a job kept out while weights without a trial held a place

    def arrives(self):
        tenant = super().arrives()
        self.limits = replace(self.limits, max_gpus=tenant.state.record.options.trial.gpus_per_trial)
        return tenant

    def change(self):
        super().change()
        idle = [node for tenant in self.open for node in idle_nodes(tenant.state)]
        self.kept += bool(self.kept_out() and len(idle) > 1)


@pytest.mark.parametrize("seed", range(8))
def test_with_the_settings_that_fit_a_limit_nothing_staged_ahead_holds_a_place(seed):
    """Three take no longer than three times a lone one, and a turn of 5 s for each of the two that are passed on to."""
    lone, three = finish(Fitted(seed, 1), 2000), Fitted(seed, 3)
    assert finish(three, 2000) <= 3 * lone + 2 * 5.0
    assert three.kept == 0
    assert not any("limit" in warning for tenant in three.tenants for warning in tenant.state.warnings)


# --- nodes that are given back -------------------------------------------------------------------------------------------

USES = st.lists(
    st.builds(
        Use,
        evaluation_id=st.sampled_from(["a", "b"]),
        node=st.sampled_from(["n1", "n2", "n3", "n4"]),
        status=st.sampled_from(list(NODE_LOSS)),
        gpus=st.integers(0, 8),
        trials=st.integers(0, 8),
    ),
    max_size=8,
    unique_by=lambda use: (use.evaluation_id, use.node),
)


@given(USES, st.integers(1, 40))
def test_as_many_nodes_as_are_asked_for_and_the_cheapest(uses, gpus):
    """No node without GPUs; enough, where there are enough; none too many; none that loses more than one that is kept."""
    chosen = nodes_to_give_back(uses, gpus)
    at = {node: [u for u in uses if u.node == node] for node in {u.node for u in uses}}
    hold = {node: sum(u.gpus for u in there) for node, there in at.items()}
    loss = {
        node: (max(NODE_LOSS[u.status] for u in there), sum(u.trials for u in there))
        for node, there in at.items()
    }
    assert all(hold[n] for n in chosen)
    assert sum(hold[n] for n in chosen) >= min(gpus, sum(hold.values()))
    assert sum(hold[n] for n in chosen[:-1]) < gpus
    kept = [n for n in hold if hold[n] and n not in chosen]
    assert all(loss[a] <= loss[b] for a, b in itertools.product(chosen, kept))


@some(25)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 100)), max_size=8))
def test_the_last_word_on_a_node_counts_until_its_time_is_over(tmp_path, words):
    """Out of use to the second; a time that is over takes back what was said before; nothing else is forgotten."""
    path = tmp_path / "nodes.json"
    path.unlink(missing_ok=True)
    said = {}
    now = 0.0
    for node, until, passed in words:
        now += passed
        left = cordons.cordon_nodes(path, [node], until, now)
        said[node] = until
        assert left == cordons.read_cordons(path, now) == {n: at for n, at in said.items() if at > now}


class Staging:
    """An evaluation that has begun to stage on the only node, n1, at a time that the test sets."""

    def __init__(self, work, patch):
        self.work, self.now = work, 1000.0
        patch.setattr(clock, "now", lambda: self.now)
        self.cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
        self.start()

    def start(self):
        self.coordinator = coordinator_on(self.work, self.cluster)
        self.running = self.coordinator.evaluations.accept(record())
        self.coordinator.tick()

    def cordon(self, seconds):
        self.coordinator.offers.cordon(("n1",), self.now + seconds)
        self.coordinator.tick()

    def later(self, seconds):
        """What the node is in after these seconds."""
        self.now += seconds
        self.coordinator.tick()
        return self.running.state.nodes.by_name["n1"].status

    def jobs(self):
        return [
            j.name
            for j in self.cluster.jobs()
            if j.phase != "ended" and (j.node == "n1" or "-stage-" in j.name)
        ]


@pytest.fixture
def staging(tmp_path, monkeypatch):
    return Staging(tmp_path, monkeypatch)


def test_a_node_that_is_given_back_is_left_alone_until_its_time(staging):
    """Its jobs are cancelled and it is offered to no evaluation, by the next coordinator neither; after its time, or where that is
    taken back, it is used again."""
    assert staging.jobs()
    staging.cordon(60)
    assert (staging.later(0), staging.jobs()) == ("withdrawn", [])
    staging.start()
    assert (staging.jobs(), staging.later(59), staging.jobs()) == ([], "withdrawn", [])
    assert staging.later(2) == "staging"
    staging.cordon(60)
    staging.cordon(0)
    assert staging.later(0) == "staging"


def test_a_resting_or_retried_node_is_given_back_too(staging):
    """A node that rests gives its memory back and does not return by itself; a retry takes no node that is out of use."""
    node = staging.running.state.nodes.by_name["n1"]
    node.status, node.back_off_until = "back-off", staging.now + 5
    staging.cordon(600)
    assert (staging.later(10), staging.jobs()) == ("withdrawn", [])
    staging.coordinator.evaluations.cancel(record().evaluation_id, "asked")
    for job in staging.cluster.jobs():
        staging.cluster.end(job.job_id)
    staging.later(0)
    assert staging.running.state.ended_at is not None
    staging.coordinator.evaluations.retry(record().evaluation_id)
    assert staging.later(0) == "withdrawn"
    assert staging.later(600) == "staging"


def test_a_node_is_offered_once_it_was_checked(staging):
    """Where the daemon checks nodes: each day anew; one in use is not disturbed."""
    coordinator, place = staging.coordinator, staging.coordinator.performer.site.paths.nodes
    coordinator.offers.checks_nodes = True
    assert (staging.later(3 * 86400), coordinator.offers.to_check) == ("staging", frozenset())
    staging.cordon(60)
    assert (staging.later(61), staging.later(11), coordinator.offers.to_check) == (
        "withdrawn",
        "withdrawn",
        {"n1"},
    )
    cordons.require_node_check(place, {"n1": staging.now + 86400}, staging.now)
    assert (staging.later(11), coordinator.offers.to_check) == ("staging", frozenset())
    staging.cordon(0)
    staging.cordon(60)
    assert (staging.later(86400), coordinator.offers.to_check) == ("withdrawn", {"n1"})


def test_a_nodes_failure_is_known_to_later_evaluations(staging):
    """A back-off counts once, with its reason and its evaluation, also after a restart."""
    node, began = staging.running.state.nodes.by_name["n1"], staging.now
    staging.running.take(nodes.back_off_node(node, "it died", began))
    assert [staging.later(11) for _ in range(3)] == ["back-off"] * 3
    staging.start()
    assert staging.later(11) == "back-off"
    found = cordons.read_node_failures(staging.coordinator.performer.site.paths.nodes, staging.now)
    seen = cordons.Failure(at=began, why="it died", seen_by=staging.running.state.evaluation_id)
    assert found == {"n1": (seen,)}
