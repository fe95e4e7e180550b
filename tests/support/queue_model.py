"""The work queue's law as a few dictionaries: what any order of calls must leave.

It does not know time: nothing is ever late here, so that no shard is run twice (its own laws are in test_work_queue.py).
"""

from __future__ import annotations

import uuid

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evaljobs.queue.work_queue import QueuedShard, WorkQueue

TRIALS = ("t0", "t1", "t2", "t3", "t4")
LANES = ("a", "b", "c")
NAMES = st.sampled_from([f"s{i}" for i in range(8)])
TRIAL = st.sampled_from(TRIALS)
LANE = st.sampled_from(LANES)
QUEUED = st.builds(QueuedShard, shard=NAMES, rank=st.integers(0, 3), seconds=st.sampled_from([0.0, 0.5, 2.0]))
PLAN = st.lists(st.tuples(LANE, QUEUED), max_size=8, unique_by=lambda x: x[1].shard)


class AgainstModel(RuleBasedStateMachine):
    """Any order of calls leaves the queue as a few dictionaries would have it: nothing lost, nothing twice."""

    client: redis.Redis

    @initialize()
    def begin(self) -> None:
        self.queue = WorkQueue(self.client, uuid.uuid4().hex)
        self.epoch: str | None = None
        self.steal = True
        self.info: dict[str, tuple[str, float, float]] = {}
        self.unclaimed: dict[str, tuple[str, float, float]] = {}
        self.claims: dict[str, str] = {}
        self.withdrawn: set[str] = set()
        self.last_done: dict[str, str] = {}
        self.gone: set[str] = set()

    def _lanes(self, plan) -> dict[str, list[QueuedShard]]:
        lanes: dict[str, list[QueuedShard]] = {}
        for lane, shard in plan:
            lanes.setdefault(lane, []).append(shard)
        return lanes

    @rule(plan=PLAN, epoch=st.sampled_from(["1", "2"]), steal=st.booleans())
    def fill(self, plan, epoch, steal) -> None:
        self.queue.fill(self._lanes(plan), epoch, steal=steal)
        self.steal = steal
        self.info = {s.shard: (lane, s.rank, s.seconds) for lane, s in plan}
        self.unclaimed = {s: i for s, i in self.info.items() if s not in self.claims}
        self.withdrawn = set()
        self.epoch = epoch

    @rule(lane=LANE, more=st.lists(QUEUED, max_size=3, unique_by=lambda s: s.shard))
    def add(self, lane, more) -> None:
        self.queue.add(lane, more)
        for s in more:
            self.claims.pop(s.shard, None)
            self.withdrawn.discard(s.shard)
            self.info[s.shard] = self.unclaimed[s.shard] = (lane, s.rank, s.seconds)

    @rule(names=st.lists(NAMES, max_size=3, unique=True))
    def withdraw(self, names) -> None:
        self.queue.withdraw(names)
        for name in names:
            self.unclaimed.pop(name, None)
            self.withdrawn.add(name)

    @rule(trial=TRIAL, lane=LANE, busy=st.booleans())
    def claim(self, trial, lane, busy) -> None:
        mine = {s for s, t in self.claims.items() if t == trial}
        got = self.queue.claim(trial, lane, holding=sorted(mine) if busy else ())
        if trial in self.gone:
            assert got.kind == "drained"
        elif mine and not busy:
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
                assert taken[2] + loads.get(taken[0], 0.0) == max(
                    [taken[2] + loads.get(taken[0], 0.0), *loads.values()]
                )

    @rule(trial=TRIAL, shard=NAMES)
    def done(self, trial, shard) -> None:
        assert self.queue.done(trial, shard, 1) == (self.claims.get(shard) == trial)
        # where it is unknown how far predictions are off nothing is late, however long this machine stands still
        self.client.hdel(f"{self.queue._prefix}meta", "predicted", "took")
        if self.claims.get(shard) == trial:
            del self.claims[shard]
        self.unclaimed.pop(shard, None)
        self.last_done[trial] = shard

    def _return(self, shard) -> None:
        del self.claims[shard]
        if shard not in self.withdrawn:
            self.info.setdefault(shard, ("", 0.0, 0.0))
            self.unclaimed[shard] = self.info[shard]

    @rule(trial=TRIAL, shard=NAMES)
    def give_back(self, trial, shard) -> None:
        mine = self.claims.get(shard) == trial
        assert self.queue.give_back(trial, shard) == mine
        if mine:
            self._return(shard)

    @rule(trial=TRIAL)
    def release(self, trial) -> None:
        mine = {s for s, t in self.claims.items() if t == trial}
        assert set(self.queue.requeue_claims(trial)) == mine
        for shard in mine:
            self._return(shard)
        self.last_done.pop(trial, None)
        self.gone.add(trial)

    @rule(trial=TRIAL, shard=NAMES)
    def beat(self, trial, shard) -> None:
        kept = self.queue.heartbeat(trial, phase="infer", shard=shard)
        by = self.claims.get(shard)
        if by is None and self.last_done.get(trial) != shard and trial not in self.gone:
            self.claims[shard] = by = trial
            self.unclaimed.pop(shard, None)
        assert kept == (by == trial)

    @rule(lane=LANE)
    def ahead(self, lane) -> None:
        """The lane's own shards in order, then, where trials steal, others; none of them is claimed by that."""
        own = sorted((i[1], s) for s, i in self.unclaimed.items() if i[0] == lane)
        names = self.queue.ahead(lane)
        assert names[: len(own)] == tuple(s for _, s in own)
        assert len(names) == len(set(names))
        assert set(names) == set(self.unclaimed if self.steal else (s for _, s in own))

    @rule()
    def redis_comes_back_empty(self) -> None:
        self.queue.remove()
        assert list(self.client.scan_iter(match=f"{self.queue._prefix}*")) == []
        self.epoch, self.info, self.unclaimed, self.claims, self.steal = None, {}, {}, {}, True
        self.withdrawn, self.last_done, self.gone = set(), {}, set()

    def _loads(self) -> dict[str, float]:
        loads: dict[str, float] = {}
        for lane, _, seconds in self.unclaimed.values():
            loads[lane] = loads.get(lane, 0.0) + seconds
        return loads

    @invariant()
    def as_the_model_says(self) -> None:
        snapshot = self.queue.snapshot()
        assert snapshot.epoch == self.epoch
        assert snapshot.claims == self.claims
        assert snapshot.unclaimed == len(self.unclaimed)
        assert set(self.queue.unclaimed()) == set(self.unclaimed)
        assert self.queue.loads() == pytest.approx(self._loads())

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.remove()
