"""A cluster and a clock that are played, for a daemon whose other parts are real: no process, no wait.

Rule: jobs leave what real ones leave: outcomes, frames, claims in the work queue, RQ's records. A turn of the daemon's loop
takes BUSY_SECONDS of the played clock, or IDLE_SECONDS while nothing runs. `play` installs it in this process.
"""

from __future__ import annotations

import itertools
import logging
import os
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
from evaljobs.contract.specs import SPEC, StageSpec, TrialSpec
from evaljobs.contract.storage import FrameWriter, write_outcome
from evaljobs.queue import redis_client
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.scoring import rq_jobs
from evaljobs.trial.shard_runner import RequestSet, run_shard

BUSY_SECONDS, IDLE_SECONDS = 1.0, 0.2
LISTED_SECONDS = 300.0  # that an ended job stays in the listing, as Slurm's MinJobAge
FLEET = (
    *(fake_node(f"n{number}", gpus=2) for number in range(20)),
    replace(fake_node("c1", gpus=0), partitions=("cpu",)),
)


@dataclass(slots=True, kw_only=True)
class Cluster(FakeCluster):
    """The fake cluster, which forgets jobs that ended long ago."""

    ids: Any = field(default_factory=itertools.count)

    def submit(self, job: Job) -> str:
        job_id = str(next(self.ids))
        self.members += [
            FakeMember(job=job, job_id=job_id, index=index, submitted_at=self.now)
            for index in range(job.count)
        ]
        return job_id

    def forget(self) -> None:
        self.members = [
            m for m in self.members if m.phase != "ended" or self.now - m.submitted_at < LISTED_SECONDS
        ]


class Worker(SimpleWorker):  # type: ignore[misc]
    """RQ's worker in this process, for one job."""

    def _install_signal_handlers(self) -> None:
        """Leave the daemon's in place."""

    def subscribe(self) -> None:
        """Take no commands over Redis, as evalspan's worker."""

    def unsubscribe(self) -> None:
        """As `subscribe`."""


class World:
    """The cluster, its clock, and what its running jobs do."""

    def __init__(self) -> None:
        self.cluster = Cluster(fleet=FLEET, now=time.time())
        self._begun: set[tuple[str, int]] = set()
        self._trials: dict[tuple[str, int], _Trial] = {}

    def turn(self, *, busy: bool) -> None:
        """Let the time of one turn pass."""
        self.cluster.advance(BUSY_SECONDS if busy else IDLE_SECONDS)
        for member in list(self.cluster.members):
            if member.phase == "running" and self._over(member):
                self.cluster.end(member.job_id, member.index)
        self.cluster.forget()
        there = {(m.job_id, m.index) for m in self.cluster.members if m.phase == "running"}
        self._begun &= there
        self._trials = {key: trial for key, trial in self._trials.items() if key in there}

    def _over(self, member: FakeMember) -> bool:
        """Do what the job does in a turn; has it ended?"""
        job, paths = member.job, EvaluationPaths(Path(member.job.log).parent.parent)
        key = (member.job_id, member.index)
        first = key not in self._begun
        self._begun.add(key)
        if job.purpose == "stage":
            return _stage(job, paths, first=first)
        if job.purpose == "metric":
            return _score(paths)
        if first:
            self._trials[key] = _Trial(job, paths, member.index, member.node or "")
        return self._trials[key].over(self.cluster.now)


def _stage(job: Job, paths: EvaluationPaths, *, first: bool) -> bool:
    spec = SPEC.validate_json(paths.spec(job.name).read_bytes())
    assert isinstance(spec, StageSpec)
    size, source = spec.checkpoint.bytes, spec.checkpoint.source
    if first:
        more: dict[str, Any] = {"path": source, "rung": "shm", "bytes": size, "storage_bytes": size}
        write_outcome(paths, Staged(name=job.name, node=spec.node, seconds=1.0, **more))
    if not paths.release_file(job.name).exists():
        return False
    write_outcome(paths, Cleared(name=job.name, node=spec.node, freed_bytes=size, reason="released"))
    return True


def _score(paths: EvaluationPaths) -> bool:
    """Run what is queued, as a crew of workers does; until it is asked to stop."""
    file = paths.root.parent / "redis" / "address.json"
    client = redis_client.shared(redis_client.read(file))
    queue = rq_jobs.open_queue(client, paths.root.name)
    if queue.count:
        made = Worker([queue], connection=client, job_class=rq_jobs.MetricJob, serializer=queue.serializer)
        made.work(burst=True, logging_level="WARNING")
    return Path(workers_stop_file(paths)).exists()


class _Trial:
    """A trial: a shard a turn, from the real queue to a real response file."""

    def __init__(self, job: Job, paths: EvaluationPaths, index: int, node: str) -> None:
        spec = SPEC.validate_json(paths.spec(job.name).read_bytes())
        assert isinstance(spec, TrialSpec)
        self.spec, self.paths, self.node = spec, paths, node
        self.lane = spec.lanes[index]
        self.began = time.time()
        self.shards = 0
        self.queue = WorkQueue.connect(Path(spec.redis_file), spec.evaluation_id)
        self.sets = {task: RequestSet(f, spec.batch_size) for task, f in spec.request_sets.items()}

    def over(self, now: float) -> bool:
        claim = self.queue.claim(self.lane.trial, self.lane.lane)
        if claim.shard is not None:
            requests = self.sets[claim.shard.partition("|")[0]]
            engine = synthetic.SyntheticEngine(0.0)
            made = run_shard(engine, requests, claim.shard, trial=self.lane.trial, seed=1)
            with FrameWriter(self.paths.response_file(self.lane.trial)) as file:
                file.append(made.model_copy(update={"started_at": now, "seconds": 1.0}))
                self.queue.done(self.lane.trial, claim.shard, file.bytes)
            self.shards += 1
        if claim.kind != "drained":
            return False
        self._leave(now)
        return True

    def _leave(self, now: float) -> None:
        seconds = dict.fromkeys(("wait", "import", "load", "dump", "idle"), 0.1)
        ended = TrialEnded(
            name=self.lane.trial,
            node=self.node,
            reason="drained",
            shards=self.shards,
            started_at=now - self.shards,
            ended_at=now,
            infer_seconds=float(self.shards),
            devices="synthetic",
            gpus=1,
            **{f"{what}_seconds": value for what, value in seconds.items()},
        )
        write_outcome(self.paths, ended)


def play(root: Path) -> World:
    """Have the daemon of this process run on a played cluster and clock."""
    os.environ[synthetic.FOLDER] = str(root)
    os.environ[synthetic.SLOW] = ""
    for metric in synthetic.given()["metrics"].values():
        metric["seconds"] = 0.0
    synthetic.answer = lambda batch: [(piece.index, "") for piece in batch.pieces]  # no second passes
    sys.modules["evaljobs.scoring.score"] = synthetic
    logging.getLogger("rq").setLevel(logging.WARNING)
    world = World()
    clock.now = lambda: world.cluster.now
    wiring.cluster_of = lambda _config: world.cluster
    wiring.hosting = lambda _config, _cluster: Hosting(listed=tuple(world.cluster.nodes()))
    plain = wiring.Pace
    wiring.Pace = lambda **more: plain(tick=0.0, **more)  # type: ignore[misc,assignment]
    return world
