"""What the seeded world is made of: the faults and their probabilities, its jobs, an evaluation to run in it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.cluster import Job, Purpose
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord, Inputs, RunOptions
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import TooLarge, TrialEnded
from evaljobs.contract.specs import (
    CheckpointFile,
    CheckpointSpec,
    ModelOptions,
    Sources,
    SuiteSpec,
    TaskEntry,
)

SITE = Site(work_dir="/w", trial_command=("python",), worker_command=("python",))


# MiB that a job of `record` asks for at first: a trial also for the 1 MiB of the weights
FIRST_MB: dict[Purpose, int] = {"build": 4096, "trial": 4097, "metric": 4096, "stage": 513}


@dataclass
class Faults:
    """Probabilities per chance."""

    submit_waits: float = 0.0  # a submission, and all behind it, wait for the next tick
    submit_lost: float = 0.0  # an acknowledged or timed-out submission that never happened
    submit_timeout: float = 0.0  # a submission that happened and then timed out
    kill: float = 0.0  # a running member dies without a word
    vanish: float = 0.0  # ... and is in no listing afterwards
    listing: float = 0.0  # no news this tick
    overrun: float = 0.0  # a running trial is told to end by its time limit: it hands back what it holds
    wipe_queue: float = 0.0
    lose_metric: float = 0.0
    restart: float = 0.0  # the coordinator dies and replays its journal
    torn: float = 0.0  # ... while it writes what an event decided: a part of that is in the journal
    node_down: float = 0.0
    drain: float = 0.0  # a node that is not the last one starts no job any more
    preempt: float = 0.0  # a running member on a node is told to end for a job of higher priority
    build_fails: float = 0.0
    convert_fails: float = 0.0
    stage_fails: float = 0.0
    metric_fails: float = 0.0
    metric_slow: float = 0.0  # a worker does not get to a job this tick
    item_fails: float = 0.0  # a score leaves an item out
    metric_dies: float = 0.0  # its worker dies with it as often as the queue lets it
    straggle: float = 0.0  # a living trial is named as a straggler
    too_large: float = (
        0.0  # a claimed shard has a batch that does not fit, where its cut is above `World.fits`
    )
    slow_outcome: float = 0.0  # an outcome is seen later than it was written


@dataclass
class FakeMember:
    phase: str = "pending"
    word: str = ""  # the cluster's for its end, where it has one
    trials: list[str] = field(default_factory=list)


@dataclass
class FakeJob:
    job: Job
    job_id: str
    specs: dict[str, Any]
    members: dict[int, FakeMember]
    listed: bool = True
    released: bool = False


def ended(node: str, trial: str, reason: str) -> TrialEnded:
    """A trial's own account."""
    return TrialEnded(
        name=trial,
        node=node,
        reason=reason,
        shards=1,
        started_at=0,
        ended_at=1,
        wait_seconds=0,
        import_seconds=0,
        load_seconds=0,
        infer_seconds=1,
        dump_seconds=0,
        idle_seconds=0,
        devices="cpu",
        gpus=1,
    )


def too_large(shard: str, trial: str, node: str, number: int) -> TooLarge:
    """Half of a batch of the shard fits the GPU."""
    return TooLarge(
        name=f"{trial}.{number}",
        trial=trial,
        node=node,
        shard=shard,
        what="unit" if Cut.parse(ShardId.parse(shard).cut or "8").token_budget else "likelihoods",
        fits=1,
        of=2,
        devices="A100",
        error="CUDA out of memory",
    )


def record(
    entries: int = 3, *, convert: str | None = None, suite: Mapping[str, Any] | None = None, **options: Any
) -> EvaluationRecord:
    """An evaluation of `entries` tasks; every second one executes programs. `suite`: more settings of the suite."""
    return EvaluationRecord(
        evaluation_id="ckpt-suite-12345678",
        checkpoint=CheckpointSpec(
            source="/c",
            digest="d",
            files=(CheckpointFile(name="model.safetensors", size=1 << 20, mtime_ns=1),),
        ),
        suite=SuiteSpec(
            **{
                "name": "suite",
                "batch_size": 8,
                "tasks": tuple(TaskEntry(name=f"t{i}") for i in range(entries)),
                **(suite or {}),
            }
        ),
        model=ModelOptions(),
        options=RunOptions(execute_documents=3, **options),
        convert=convert,
        accepted_at=0.0,
    )


def limited(limits: Sequence[float | None], *, groups: bool = False, **options: Any) -> EvaluationRecord:
    """Tasks of these limits. `groups`: they may be groups of tasks."""
    made = record(entries=len(limits), **options)
    tasks = [t.model_copy(update={"limit": n}) for t, n in zip(made.suite.tasks, limits, strict=True)]
    names = tuple(t.name for t in tasks)
    inputs = Inputs(entries=tuple(Sources() for _ in tasks), single=() if groups else names)
    suite = made.suite.model_copy(update={"tasks": tuple(tasks)})
    return made.model_copy(update={"suite": suite, "inputs": inputs})


def planned(action: do.MakePlan, dice: random.Random, now: float) -> ev.Planned:
    """A plan of one to six shards a task; every second task executes programs."""
    leaves, rows = [], []
    for entry, sets in action.sets.items():
        for name, folder in sets.items():
            executes = entry % 2 == 1
            cut = action.cuts.get(entry, "")
            shards = tuple(str(ShardId(name, i, i + 1, cut)) for i in range(dice.randint(1, 6)))
            documents = tuple((i, i + 1) for i in range(len(shards))) if executes else ()
            leaves.append(
                ev.PlannedLeaf(
                    task=folder.rpartition("/")[2],
                    name=name,
                    entry=entry,
                    key="k",
                    folder=folder,
                    executes=executes,
                    sampled=False,
                    documents=len(shards) + 1,
                    shards=shards,
                    shard_documents=documents,
                    executes_at_once=len(shards) % 2 if executes else 0,
                )
            )
            rows += [(s, float(i), 1.0) for i, s in enumerate(shards)]
    lanes = [
        ev.PlannedLane(lane=lane, node=node, shards=tuple(rows[i :: len(action.lanes)]))
        for i, (lane, node) in enumerate(action.lanes)
    ]
    return ev.Planned(
        at=now,
        batch_size=8,
        leaves=tuple(leaves),
        lanes=tuple(lanes),
        predicted_makespan_seconds=1,
        lower_bound_seconds=1,
        gpu_seconds=1,
        workers=1,
        work_seconds_95=4000,
        load_seconds_95=20,
    )
