"""What the seeded world is made of: the faults and their probabilities, its jobs, an evaluation to run in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs, RunOptions
from coordinator.site.cluster import Job
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
FIRST_MB = {"build": 4096, "trial": 4097, "metric": 4096, "stage": 513}


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
    too_large: float = 0.0  # a claimed shard has a batch that does not fit, where its cut is above `Odd.fits`
    slow_outcome: float = 0.0  # an outcome is seen later than it was written
    mute: float = 0.0  # no news of the work queue this tick


MANY = 1 << 20


@dataclass
class Odd:
    """What is odd about a cluster, its nodes or the shards; a new one is an ordinary cluster's."""

    # submissions and starts
    unfit: frozenset[str] = frozenset()  # nodes whose jobs are refused
    refused: frozenset[str] = frozenset()  # purposes that are refused there; empty: all
    banned: str = ""  # purpose of jobs that are refused everywhere
    array: int = MANY  # most members of a job array
    submitted: int = MANY  # members that this user may have
    opens: float = 0.0  # before that time the user may have none
    running: int = MANY  # members that run at a time
    host_gpus: int = MANY  # of the largest host that starts
    full: tuple[str, int] = ("", 0)  # purpose whose members do not start, from this one on
    reason: str = ""  # the cluster's word for pending jobs, but for jobs of other purposes than `full`
    unlaunchable: frozenset[str] = frozenset()  # CPU nodes that end a build at once
    ends_workers: bool = False  # a node ends each worker in the tick of its start
    # nodes
    names: str = "n"  # how they begin
    ahead: bool = False  # memory is offered first, and GPUs when the dice say so
    node_mb: int = 0  # MiB of the largest node; 0: not said
    bad: dict[str, str] = field(default_factory=dict)  # node -> error of its trials
    blind: bool = False  # those see no GPU
    unready: frozenset[str] = frozenset()  # nodes whose trials die while they load
    private: bool = False  # trials beside a precursor see nothing of its memory
    power_cut: bool = False  # ... the first ones on each node
    preempts: bool = False  # takes each trial's place before it has done anything
    life: float = 0.0  # seconds that the cluster gives a precursor; 0: no limit
    pace: float = 1.0  # probability that a trial gets something done in a tick
    copied: bool = False  # earlier answers are of a checkpoint with equal samples and other content
    hashes: bool = False  # ... and precursors say the content
    # shards, builds, metrics
    fits: int = 0  # batch size or token budget that always fits
    poison: dict[str, str] = field(default_factory=dict)  # shard -> error of the trial that holds it
    silent: bool = False  # ... which is a word of the cluster's
    in_order: bool = False  # trials claim as in the real queue: the head of their lane, else of the longest
    builds_from: float = 0.0  # before that time no build ends
    deadly: int = -1  # the build of this entry ends its job; -2: each does
    workers: int = 1  # that a plan asks for
    # memory: purpose -> MiB, jobs that ask for less are killed; workers that have less say of each job that it needs more
    takes_mb: dict[str, int] = field(default_factory=dict)
    metric_mb: int = 0


@dataclass
class FakeMember:
    phase: str = "pending"
    index: int = 0
    word: str = ""  # the cluster's for its end, where it has one
    begun: float | None = None  # of a precursor with a limit


@dataclass
class FakeJob:
    job: Job
    job_id: str
    specs: dict[str, Any]
    members: dict[int, FakeMember]
    listed: bool = True
    released: bool = False

    @property
    def spec(self):
        return next(iter(self.specs.values()))


def ended(node, trial, reason):
    """A trial's own account."""
    waits = dict.fromkeys(("wait", "import", "load", "dump"), 0.0)
    seconds = {f"{part}_seconds": took for part, took in {**waits, "infer": 1.0}.items()}
    did = {"shards": 1, "started_at": 0, "ended_at": 1, "devices": "cpu", "gpus": 1}
    return TrialEnded(name=trial, node=node, reason=reason, **did, **seconds)


def too_large(shard, trial, node, **changes):
    """Half of a batch of the shard fits the GPU."""
    units = Cut.parse(ShardId.parse(shard).cut or "8").token_budget
    sizes = {"what": "unit" if units else "likelihoods", "fits": 1, "of": 2}
    where = {"node": node, "devices": "A100", "error": "CUDA out of memory"}
    return TooLarge(**{"name": trial, "trial": trial, "shard": shard, **where, **sizes, **changes})


def record(entries=3, *, convert=None, suite=None, **options):
    """An evaluation of `entries` tasks; every second one executes programs. `suite`: more settings of the suite."""
    weights = CheckpointFile(name="model.safetensors", size=1 << 20, mtime_ns=1)
    tasks = tuple(TaskEntry(name=f"t{i}") for i in range(entries))
    made = SuiteSpec(**{"name": "suite", "batch_size": 8, "tasks": tasks, **(suite or {})})
    return EvaluationRecord(
        evaluation_id="ckpt-suite-12345678",
        checkpoint=CheckpointSpec(source="/c", digest="d", files=(weights,)),
        suite=made,
        inputs=Inputs(entries=tuple(Sources() for _ in made.tasks)),
        model=ModelOptions(),
        options=RunOptions(execute_documents=3, **options),
        convert=convert,
        accepted_at=0.0,
    )


def limited(limits, *, groups=False, **options):
    """Tasks of these limits. `groups`: they may be groups of tasks."""
    tasks = tuple(TaskEntry(name=f"t{i}", limit=limit) for i, limit in enumerate(limits))
    names = tuple(task.name for task in tasks)
    inputs = Inputs(entries=tuple(Sources() for _ in tasks), single=() if groups else names)
    return record(suite={"tasks": tasks}, **options).model_copy(update={"inputs": inputs})


def planned(action, count, now, *, screens=False, **more):
    """A plan of so many shards a task, dealt out in turns; every second task executes programs. `screens`: each shard is a block."""
    leaves, rows = [], []
    for entry, sets in action.sets.items():
        for name, folder in sets.items():
            executes, cut = entry % 2 == 1 and not screens, action.cuts.get(entry, "")
            shards = tuple(str(ShardId(name, i, i + 1, cut)) for i in range(count()))
            leaf = ev.PlannedLeaf(
                task=folder.rpartition("/")[2],
                name=name,
                entry=entry,
                key="k",
                folder=folder,
                executes=executes,
                sampled=False,
                documents=len(shards) + 1,
                shards=shards,
                shard_documents=tuple((i, i + 1) for i in range(len(shards))) if executes or screens else (),
                shard_blocks=tuple(range(len(shards))) if screens else (),
                executes_at_once=len(shards) % 2 if executes else 0,
            )
            leaves.append(leaf)
            rows += [(s, float(i), 1.0) for i, s in enumerate(shards)]
    lanes = [
        ev.PlannedLane(lane=lane, node=node, shards=tuple(rows[i :: len(action.lanes)]))
        for i, (lane, node) in enumerate(action.lanes)
    ]
    predicted = dict.fromkeys(("predicted_makespan_seconds", "lower_bound_seconds", "gpu_seconds"), 1.0)
    told = {**predicted, "workers": 1, "work_seconds_95": 4000, "load_seconds_95": 20, **more}
    return ev.Planned(at=now, batch_size=8, leaves=tuple(leaves), lanes=tuple(lanes), **told)
