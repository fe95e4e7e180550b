"""Laws of the work queue, on a real server."""

from __future__ import annotations

import json
import uuid
from collections import Counter

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from evaljobs.queue import lua, redis_client
from evaljobs.queue.redis_client import Link, QueueUnavailable
from evaljobs.queue.work_queue import MAX_SHARDS_AHEAD, Claim, QueuedShard, WorkQueue


def shards(*names, seconds=1.0):
    return [QueuedShard(shard=n, rank=i, seconds=seconds) for i, n in enumerate(names)]


@pytest.fixture
def queue(shared_work):
    return WorkQueue(Link(shared_work.redis_address), uuid.uuid4().hex)


def late(queue, client, shard, seconds):
    """As if `shard` had been claimed that much earlier."""
    claims = f"{queue._prefix}claims"
    trial, since = json.loads(client.hget(claims, shard) or "[]")
    client.hset(claims, shard, json.dumps([trial, str(float(since) - seconds)]))
    client.zincrby(f"{queue._prefix}ends", -seconds, shard)


def straggling(queue, client):
    """`fast` has done its shard in the predicted 10 s; `slow` has been at its own of 10 s for 100."""
    queue.fill({"a": shards("x", seconds=10), "b": shards("y", seconds=10)}, "1")
    assert [queue.claim("fast", "a").shard, queue.claim("slow", "b").shard] == ["x", "y"]
    late(queue, client, "x", 10)
    late(queue, client, "y", 100)
    assert queue.done("fast", "x", 1)


@pytest.mark.parametrize("first", ["fast", "slow"])
def test_the_first_of_two_to_finish_a_slow_shard_counts(queue, client, first):
    """A freed trial runs a straggler's shard once more, one copy only; the second to finish it is answered to drop it."""
    straggling(queue, client)
    assert queue.claim("fast", "a").shard == "y"
    assert queue.claim("fast", "a").shard == "y", "its answer may have been lost"
    assert queue.claim("third", "a").kind == "drained"
    assert queue.heartbeat("fast", phase="infer", shard="y")
    assert queue.heartbeat("slow", phase="infer", shard="y")
    second = {"fast": "slow", "slow": "fast"}[first]
    queue.done(first, "y", 2)
    assert not queue.heartbeat(second, phase="infer", shard="y")
    assert queue.snapshot().claims == {}
    queue.done(second, "y", 2)
    assert queue.claim("slow", "b").kind == "drained"
    assert queue.unclaimed() == ()


def test_a_shard_on_its_way_is_not_run_twice(queue, client):
    """Where its own trial will be sooner, by its rate or because all predictions were too short, nothing is copied."""
    straggling(queue, client)
    queue.heartbeat("slow", phase="infer", shard="y", batches_done=9, batches=10)
    assert queue.claim("fast", "a").kind == "drained"
    queue.heartbeat("slow", phase="infer", shard="y", batches_done=2, batches=10)
    assert queue.claim("fast", "a").shard == "y"


def test_a_dead_copy_is_forgotten_and_a_dead_straggler_is_replaced(queue, client):
    """The copy's trial dies: another may copy. The straggler dies: its shard is queued again."""
    straggling(queue, client)
    assert queue.claim("fast", "a").shard == "y"
    assert queue.requeue_claims("fast") == ()
    assert queue.claim("third", "a").shard == "y"
    assert queue.requeue_claims("slow") == ("y",)
    assert queue.heartbeat("third", phase="infer", shard="y")
    assert queue.snapshot().claims == {"y": "third"}
    assert queue.unclaimed() == ()


def test_of_many_open_shards_those_that_are_late_most_are_copied_each_once(queue, client):
    """However many are claimed: with a shard that is withdrawn, and a copy whose trial died, as if neither had been."""
    straggling(queue, client)
    names = [f"s{n}" for n in range(40)]
    queue.add("a", shards(*names, seconds=10))
    held = {queue.claim(f"t{n}", "a").shard for n in range(40)}
    assert held == set(names)
    for name, seconds in (("s33", 70), ("s12", 50), ("s25", 60)):
        late(queue, client, name, seconds)
    queue.withdraw(["s25"])
    assert [queue.claim(f"free{n}", "a").shard for n in range(4)] == ["y", "s33", "s12", None]
    queue.requeue_claims("free1")
    assert [queue.claim(f"free{n}", "a").shard for n in (4, 5)] == ["s33", None]
    assert {name.decode() for name in client.zrange(f"{queue._prefix}ends", 0, -1)} == held - {
        "s33",
        "s12",
        "s25",
    }


def test_without_stealing_a_lane_is_handed_its_own_shards_alone(queue, client):
    """A fill without stealing: an empty lane's trial ends and copies no late shard; what is added to its lane it
    takes. The next fill decides anew.
    """
    straggling(queue, client)
    queue.fill({"a": shards("x0"), "b": shards("b0", "b1")}, "2", steal=False)
    assert queue.claim("fast", "a").shard == "x0"
    assert queue.done("fast", "x0", 2)
    assert queue.claim("fast", "a") == Claim(kind="drained")
    assert queue.claim("third", "b").shard == "b0"
    queue.add("a", shards("b1"))
    assert queue.claim("fast", "a").shard == "b1"
    queue.fill({"b": shards("b2")}, "3")
    assert queue.claim("fourth", "a").shard == "b2"


def test_shards_ahead_are_the_lanes_own_first_and_then_the_ends_of_others(queue):
    """A trial without Redis begins at its lane's head; one without a lane of its own at another's end."""
    many = [f"b{n:03}" for n in range(MAX_SHARDS_AHEAD + 9)]
    queue.fill({"a": shards("a0", "a1"), "b": shards(*many)}, "1")
    assert queue.ahead("b") == tuple(many[:MAX_SHARDS_AHEAD])
    assert queue.ahead("a") == ("a0", "a1", *many[::-1][: MAX_SHARDS_AHEAD - 2])
    assert queue.claim("t", "c").shard == "b000", "any trial may still steal them"
    queue.fill({"a": shards("a0")}, "2", steal=False)
    assert queue.ahead("c") == ()


def test_progress_moves_only_with_figures(queue):
    """A heartbeat that says nothing new moves beat_at and leaves progress_at. Without one, nothing is read anew: of thousands
    of trials few change between two looks.
    """
    queue.heartbeat("t", phase="infer", shard="x", batches_done=1, batches=4)
    first = queue.snapshot().trials["t"]
    queue.heartbeat("t", phase="infer", shard="x", batches_done=1, batches=4)
    second = queue.snapshot().trials["t"]
    assert second.beat_at > first.beat_at
    assert second.progress_at == first.progress_at
    assert queue.snapshot().trials["t"] is second
    queue.heartbeat("t", phase="infer", shard="x", batches_done=2, batches=4)
    assert queue.snapshot().trials["t"].progress_at > first.progress_at
    assert (first.shard, first.batches_done, first.batches) == ("x", 1, 4)


def test_a_fill_overtaken_by_another_does_nothing_more(queue, client):
    """Of two fills at once the one that began last decides; the other's rest is refused."""
    queue.fill({"a": shards(*(f"x{i}" for i in range(3)))}, "1")
    client.hset(f"{queue._prefix}meta", "filling", "another's")
    queue._run(lua.FILL, "mine", "a", "late", "0.0", "1.0")
    assert "late" not in queue.unclaimed()


def test_redis_away_is_one_error(tmp_path):
    """Whatever is wrong with Redis comes as QueueUnavailable, naming the place."""
    with pytest.raises(QueueUnavailable, match="the Redis address"):
        WorkQueue(Link(tmp_path / "address.json"), "e").snapshot()
    address = redis_client.RedisAddress(host="127.0.0.1", port=1)
    redis_client.publish_address(address, tmp_path / "address.json")
    with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:1/0 cannot be reached"):
        WorkQueue(Link(tmp_path / "address.json"), "e").snapshot()


# --- any order of calls ------------------------------------------------------------------------------------------------

TRIALS = ("t0", "t1", "t2", "t3", "t4")
LANES = ("a", "b", "c")
NAMES = st.sampled_from([f"s{i}" for i in range(8)])
TRIAL = st.sampled_from(TRIALS)
LANE = st.sampled_from(LANES)
QUEUED = st.builds(QueuedShard, shard=NAMES, rank=st.integers(0, 3), seconds=st.sampled_from([0.0, 0.5, 2.0]))
PLAN = st.lists(st.tuples(LANE, QUEUED), max_size=8, unique_by=lambda x: x[1].shard)


class AgainstModel(RuleBasedStateMachine):
    """Any order of calls leaves the queue as a few dictionaries would have it: nothing lost, nothing twice.

    The dictionaries do not know time: nothing is ever late here, so that no shard is run twice.
    """

    client: redis.Redis
    link: Link

    @initialize()
    def begin(self):
        self.queue = WorkQueue(self.link, uuid.uuid4().hex)
        self.epoch = None
        self.steal = True
        self.info = {}
        self.unclaimed = {}
        self.claims = {}
        self.withdrawn = set()
        self.last_done = {}
        self.shards_done = Counter()
        self.gone = set()

    @rule(plan=PLAN, epoch=st.sampled_from(["1", "2"]), steal=st.booleans())
    def fill(self, plan, epoch, steal):
        lanes = {lane: [shard for at, shard in plan if at == lane] for lane in LANES}
        self.queue.fill({lane: own for lane, own in lanes.items() if own}, epoch, steal=steal)
        self.steal = steal
        self.info = {s.shard: (lane, s.rank, s.seconds) for lane, s in plan}
        self.unclaimed = {s: i for s, i in self.info.items() if s not in self.claims}
        self.withdrawn = set()
        self.epoch = epoch

    @rule(lane=LANE, more=st.lists(QUEUED, max_size=3, unique_by=lambda s: s.shard))
    def add(self, lane, more):
        self.queue.add(lane, more)
        for s in more:
            self.claims.pop(s.shard, None)
            self.withdrawn.discard(s.shard)
            self.info[s.shard] = self.unclaimed[s.shard] = (lane, s.rank, s.seconds)

    @rule(names=st.lists(NAMES, max_size=3, unique=True))
    def withdraw(self, names):
        self.queue.withdraw(names)
        for name in names:
            self.unclaimed.pop(name, None)
            self.withdrawn.add(name)

    @rule(trial=TRIAL, lane=LANE)
    def claim(self, trial, lane):
        mine = {s for s, t in self.claims.items() if t == trial}
        got = self.queue.claim(trial, lane)
        if trial in self.gone:
            assert got.kind == "drained"
        elif mine:
            assert got.shard in mine
        elif self.epoch is None:
            assert got.kind == "wait"
        elif not any(self.steal or i[0] == lane for i in self.unclaimed.values()):
            assert got.kind == "drained"
        else:
            taken = self.unclaimed.pop(got.shard)
            self.claims[got.shard] = trial
            rest = [(s, i) for s, i in self.unclaimed.items() if i[0] == taken[0]]
            assert all((taken[1], got.shard) < (i[1], s) for s, i in rest)
            if taken[0] != lane:
                assert self.steal
                assert all(i[0] != lane for i in self.unclaimed.values())
                loads = self._loads()
                load = taken[2] + loads.get(taken[0], 0.0)
                assert load == max([load, *loads.values()])

    @rule(trial=TRIAL, shard=NAMES, overtakes_a_beat=st.booleans())
    def done(self, trial, shard, overtakes_a_beat):
        assert self.queue.done(trial, shard, 1) == (self.claims.get(shard) == trial)
        # where it is unknown how far predictions are off nothing is late, however long this machine stands still
        self.client.hdel(f"{self.queue._prefix}meta", "predicted", "took")
        if self.claims.get(shard) == trial:
            del self.claims[shard]
        self.unclaimed.pop(shard, None)
        self.shards_done[trial] += self.last_done.get(trial) != shard  # else the answer had been lost
        self.last_done[trial] = shard
        if overtakes_a_beat:
            self.beat(trial, shard)

    def _return(self, shard):
        del self.claims[shard]
        if shard not in self.withdrawn:
            self.info.setdefault(shard, ("", 0.0, 0.0))
            self.unclaimed[shard] = self.info[shard]

    @rule(trial=TRIAL, shard=NAMES)
    def give_back(self, trial, shard):
        mine = self.claims.get(shard) == trial
        assert self.queue.give_back(trial, shard) == mine
        if mine:
            self._return(shard)

    @rule(trial=TRIAL)
    def release(self, trial):
        mine = {s for s, t in self.claims.items() if t == trial}
        assert set(self.queue.requeue_claims(trial)) == mine
        for shard in mine:
            self._return(shard)
        self.last_done.pop(trial, None)
        self.shards_done.pop(trial, None)
        self.gone.add(trial)

    @rule(trial=TRIAL, shard=NAMES)
    def beat(self, trial, shard):
        kept = self.queue.heartbeat(trial, phase="infer", shard=shard)
        if shard in self.withdrawn and trial not in self.gone:  # the trial drops it
            assert not kept
            if self.claims.get(shard) == trial:
                del self.claims[shard]
            return
        by = self.claims.get(shard)
        if by is None and self.last_done.get(trial) != shard and trial not in self.gone:
            self.claims[shard] = by = trial
            self.unclaimed.pop(shard, None)
        assert kept == (by == trial)

    @rule(lane=LANE)
    def ahead(self, lane):
        """The lane's own shards in order, then, where trials steal, others; none of them is claimed by that."""
        own = sorted((i[1], s) for s, i in self.unclaimed.items() if i[0] == lane)
        names = self.queue.ahead(lane)
        assert names[: len(own)] == tuple(s for _, s in own)
        assert len(names) == len(set(names))
        assert set(names) == set(self.unclaimed if self.steal else (s for _, s in own))

    @rule()
    def redis_comes_back_empty(self):
        self.queue.remove()
        assert list(self.client.scan_iter(match=f"{self.queue._prefix}*")) == []
        self.epoch, self.info, self.unclaimed, self.claims, self.steal = None, {}, {}, {}, True
        self.withdrawn, self.last_done, self.gone, self.shards_done = set(), {}, set(), Counter()

    def _loads(self):
        loads = {}
        for lane, _, seconds in self.unclaimed.values():
            loads[lane] = loads.get(lane, 0.0) + seconds
        return loads

    @invariant()
    def as_the_model_says(self):
        snapshot = self.queue.snapshot()
        assert snapshot.epoch == self.epoch
        assert snapshot.claims == self.claims
        assert snapshot.unclaimed == len(self.unclaimed)
        ends = {name.decode() for name in self.client.zrange(f"{self.queue._prefix}ends", 0, -1)}
        assert ends <= set(self.claims)
        assert set(self.queue.unclaimed()) == set(self.unclaimed)
        scores = self.client.zrange(f"{self.queue._prefix}load", 0, -1, withscores=True)
        loads = {lane.decode(): score for lane, score in scores}
        assert loads == pytest.approx(self._loads())
        for name, trial in snapshot.trials.items():
            assert name in self.gone or trial.shards_done == self.shards_done[name]

    def teardown(self):
        if hasattr(self, "queue"):
            self.queue.remove()


def test_any_order_of_calls_agrees_with_a_model(client, shared_work):
    """See AgainstModel."""
    known = {"client": client, "link": Link(shared_work.redis_address)}
    machine = type("Bound", (AgainstModel,), known)
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=30))
