"""Trials that fail for a reason: on bad nodes, and with poison shards."""

from __future__ import annotations

from typing import Any

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.specs import FrameRef, TrialSpec
from support.simulated.parts import FakeJob, FakeMember
from support.simulated.world import World

VAGUE = "RuntimeError: CUDA error: an illegal memory access was encountered"


class Faulty(World):
    """Trials of bad nodes (node -> error), and those that run a poison shard (shard -> error), fail while they hold it.

    Shards are claimed as from the real queue: the head of the trial's own lane, else of the longest one.
    """

    bad: dict[str, str]
    poison: dict[str, str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.bad, self.poison = {}, {}
        self.deaths: dict[str, int] = {}  # of trials, by shard
        self.died_at: dict[str, int] = {}  # by node
        super().__init__(*args, **kwargs)

    def effect(self, action: do.Action) -> list[ev.AnyEvent]:
        if isinstance(action, do.QueueShards):
            for shard, _, _ in action.shards:
                self.claims.pop(shard, None)
        return super().effect(action)

    def next_of(self, lane: str) -> str | None:
        queue = self.queue or {}
        lanes: dict[str, list[tuple[float, str]]] = {}
        for shard, (where, rank) in queue.items():
            lanes.setdefault(where, []).append((rank, shard))
        if not lanes:
            return None
        chosen = lanes.get(lane) or max(lanes.values(), key=len)
        return min(chosen)[1]

    def run_trial(self, job: FakeJob, index: int, member: FakeMember) -> None:
        spec: TrialSpec = next(iter(job.specs.values()))
        lane, node = spec.lanes[index], job.job.node or ""
        for shard in [s for s, t in self.claims.items() if t == lane.trial]:
            error = self.bad.get(node) or self.poison.get(shard)
            del self.claims[shard]
            if error:
                self.fail(lane.trial, node, shard, error)
                self.end_member(job, index, member)
                return
            self.frames[shard] = self.frames.get(shard, 0) + 1
            frame = FrameRef(file=f"{lane.trial}.frames", offset=self.frames[shard], length=1)
            self.dumped.append((shard, frame))
        if self.queue is None:
            return
        chosen = self.next_of(lane.lane)
        if chosen is None:
            super().run_trial(job, index, member)
            return
        self.claim(job, index, member, chosen)

    def fail(self, trial: str, node: str, shard: str, error: str) -> None:
        known = self.state.shards.by_name[shard]
        if self.queue is not None and not known.quarantined:
            self.queue[shard] = (known.lane, known.rank)  # it gives back what it holds
        if known.frame is None and not known.quarantined:
            self.deaths[shard] = self.deaths.get(shard, 0) + 1
        self.died_at[node] = self.died_at.get(node, 0) + 1
        self.leave(Failed(name=trial, job="trial", blame="retry", error=error, node=node, shard=shard))

    def until_planned(self) -> None:
        while not self.state.shards.leaves and self.state.ended_at is None:
            self.tick()
