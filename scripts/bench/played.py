"""A cluster and a clock that are played, for a daemon whose other parts are real: no process, no wait.

Rule: jobs leave what real ones leave: outcomes, frames, claims in the work queue, RQ's records. A turn of the daemon's loop
takes BUSY_SECONDS of the played clock, or IDLE_SECONDS while nothing runs. `play` installs it in this process.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rq.worker import SimpleWorker
from support.fake_cluster import FakeCluster, FakeMember, fake_node

from bench import synthetic
from coordinator.base import clock
from coordinator.cluster import Job
from coordinator.cluster.slurm_rules import Hosting
from coordinator.evaluation.job_specs import workers_stop_file
from coordinator.runtime import wiring
from evaljobs.contract.outcomes import Cleared, Staged, TrialEnded
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SPEC, LaneSpec, StageSpec, TrialSpec
from evaljobs.contract.storage import FrameWriter, write_outcome
from evaljobs.queue import redis_client
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.scoring import rq_jobs
from evaljobs.trial.shard_runner import RequestSet, run_shard

BUSY_SECONDS, IDLE_SECONDS = 1.0, 0.2
LISTED_SECONDS = 300.0  # that an ended job stays in the listing, as Slurm's MinJobAge
NODES = 20


@dataclass(slots=True, kw_only=True)
class Cluster(FakeCluster):
    """The fake cluster, which forgets jobs that ended long ago."""

    ids: Any = field(default_factory=itertools.count)

    def submit(self, job: Job) -> str:
        job_id, told = str(next(self.ids)), {"job": job, "submitted_at": self.now}
        self.members += [FakeMember(job_id=job_id, index=index, **told) for index in range(job.count)]
        return job_id

    def forget(self) -> None:
        old = self.now - LISTED_SECONDS
        self.members = [m for m in self.members if m.phase != "ended" or m.submitted_at > old]


class Worker(SimpleWorker):  # type: ignore[misc]
    """RQ's worker in this process: it leaves the daemon's signal handlers, and takes no commands, as evalspan's."""

    def _install_signal_handlers(self) -> None: ...

    def subscribe(self) -> None: ...

    def unsubscribe(self) -> None: ...


class World:
    """The cluster, its clock, and what its running jobs do."""

    def __init__(self) -> None:
        gpu = [fake_node(f"n{number}", gpus=2) for number in range(NODES)]
        fleet = (*gpu, replace(fake_node("c1", gpus=0), partitions=("cpu",)))
        self.cluster = Cluster(fleet=fleet, now=time.time())
        self._running: dict[tuple[str, int], Any] = {}  # each job, begun

    def turn(self, *, busy: bool) -> None:
        """Let the time of one turn pass: a job is begun in its first turn, and ended where it has nothing left to do."""
        self.cluster.advance(BUSY_SECONDS if busy else IDLE_SECONDS)
        kinds = {"stage": _Stage, "metric": _Workers}
        before, self._running = self._running, {}
        for member in [m for m in self.cluster.members if m.phase == "running"]:
            key = (member.job_id, member.index)
            job = before.get(key) or kinds.get(member.job.purpose, _Trial)(member)
            self._running[key] = job
            if job.over(self.cluster.now):
                self.cluster.end(*key)
        self.cluster.forget()


class _Stage:
    def __init__(self, member: FakeMember) -> None:
        self.name, self.paths = member.job.name, EvaluationPaths(Path(member.job.log).parent.parent)
        spec = SPEC.validate_json(self.paths.spec(self.name).read_bytes())
        assert isinstance(spec, StageSpec)
        self.node, self.size = spec.node, spec.checkpoint.bytes
        more: dict[str, Any] = {"path": spec.checkpoint.source, "rung": "shm", "bytes": self.size}
        more |= {"storage_bytes": self.size, "seconds": 1.0}
        write_outcome(self.paths, Staged(name=self.name, node=self.node, **more))

    def over(self, _now: float) -> bool:
        released = self.paths.release_file(self.name).exists()
        if released:
            told = {"freed_bytes": self.size, "reason": "released"}
            write_outcome(self.paths, Cleared(name=self.name, node=self.node, **told))
        return released


class _Workers:
    """A crew of workers: it runs what is queued, until it is asked to stop."""

    def __init__(self, member: FakeMember) -> None:
        self.paths = EvaluationPaths(Path(member.job.log).parent.parent)
        work = self.paths.root.parent
        self.client = redis_client.shared(redis_client.read(work / "redis" / "address.json"))

    def over(self, _now: float) -> bool:
        queue = rq_jobs.open_queue(self.client, self.paths.root.name)
        if queue.count:
            how = {"job_class": rq_jobs.MetricJob, "serializer": queue.serializer}
            Worker([queue], connection=self.client, **how).work(burst=True, logging_level="WARNING")
        return Path(workers_stop_file(self.paths)).exists()


class _Trial:
    """A trial: a shard a turn, from the real queue to a real response file."""

    def __init__(self, member: FakeMember) -> None:
        self.paths, self.node = EvaluationPaths(Path(member.job.log).parent.parent), member.node or ""
        spec = SPEC.validate_json(self.paths.spec(member.job.name).read_bytes())
        assert isinstance(spec, TrialSpec)
        self.lane: LaneSpec = spec.lanes[member.index]
        self.shards = 0
        self.queue = WorkQueue.connect(Path(spec.redis_file), spec.evaluation_id)
        self.sets = {task: RequestSet(f, spec.batch_size) for task, f in spec.request_sets.items()}

    def over(self, now: float) -> bool:
        trial = self.lane.trial
        claim = self.queue.claim(trial, self.lane.lane)
        if claim.shard is not None:
            requests = self.sets[claim.shard.partition("|")[0]]
            made = run_shard(synthetic.SyntheticEngine(0.0), requests, claim.shard, trial=trial, seed=1)
            with FrameWriter(self.paths.response_file(trial)) as file:
                file.append(made.model_copy(update={"started_at": now, "seconds": 1.0}))
                self.queue.done(trial, claim.shard, file.bytes)
            self.shards += 1
        if claim.kind != "drained":
            return False
        seconds = {f"{what}_seconds": 0.1 for what in ("wait", "import", "load", "dump", "idle")}
        seconds |= {"infer_seconds": float(self.shards), "started_at": now - self.shards, "ended_at": now}
        told = {"reason": "drained", "shards": self.shards, "devices": "synthetic", "gpus": 1}
        write_outcome(self.paths, TrialEnded(name=trial, node=self.node, **told, **seconds))
        return True


def play() -> World:
    """Have the daemon of this process run on a played cluster and clock."""
    sys.modules["evaljobs.scoring.score"] = synthetic
    logging.getLogger("rq").setLevel(logging.WARNING)
    world = World()
    clock.now = lambda: world.cluster.now
    wiring.cluster_of = lambda _config: world.cluster
    wiring.hosting = lambda _config, _cluster: Hosting(listed=tuple(world.cluster.nodes()))
    plain = wiring.Pace
    wiring.Pace = lambda **more: plain(tick=0.0, **more)  # type: ignore[misc,assignment]
    return world
