"""Plans from request sets and priors. Called by `effects` for the action MakePlan.

Rule: everything decided here goes into the `Planned` event, so replaying the journal needs no file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from coordinator.decide.evaluation.actions import MakePlan
from coordinator.decide.evaluation.events import Planned, PlannedLane, PlannedLeaf
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.decide.evaluation.state import NodeUse
from coordinator.decide.planning.flow_shop import end_of
from coordinator.decide.planning.model import UNLIMITED, Lane, LanePlan, PlannedShard, Problem, WorkSet
from coordinator.decide.planning.planner import PLANNERS
from coordinator.decide.verdicts.screening import likely_share
from coordinator.site.cluster import CPU_SLOT
from evaljobs.contract.names import ShardId
from evaljobs.contract.specs import BatchIndex, RequestSetManifest
from priors.estimate import (
    JUDGES_AT_ONCE,
    Features,
    Prediction,
    PriorHistory,
    predict_batches,
    predict_load,
    predict_metric,
)

SHARD_OVERHEAD_SECONDS = 0.02
"""Seconds between two shards of a trial: claim, read, dump, fsync. Measured on a local disk: 0.005 s (32 trials on 2 cores,
95th percentile 0.013); shared storage takes longer. It decides how finely a short run is cut, and thus the cost of a prior
that is off by 10x.
"""
EACH = 1 << 20  # shards per set: one for each of its parts
METRICS_SLACK = 1.02  # latest accepted end of the metrics, relative to the end with the most workers
# CPU seconds of metrics at a high percentile that justify one more worker: importing lm-eval takes 10 s, and such seconds are
# three times the likely ones
WORKER_SECONDS = 30.0
BYTES_PER_PARAMETER = 2  # in bf16 and fp16, the usual formats of checkpoints


def hardware_of(nodes: Iterable[NodeUse]) -> str:
    """Return the hardware key of priors: the first known GPU type, otherwise "gpu"; "cpu" if trials run on CPU slots."""
    named = next((known for n in nodes if (known := n.gpu_type or n.gpu_name)), "gpu")
    return "cpu" if named == CPU_SLOT else named


class _Found(NamedTuple):
    """A leaf task's request set, and its folder."""

    entry: int
    folder: str
    cut: str
    manifest: RequestSetManifest
    batches: BatchIndex


def _work_sets(
    record: EvaluationRecord, sets: Mapping[str, _Found], hardware: str, history: PriorHistory
) -> Iterator[tuple[WorkSet, float]]:
    """Yield the work of each leaf task, and CPU seconds of its metric at a high percentile."""
    scored = Counter(one.entry for one in sets.values() if not one.manifest.executes)
    for name, (entry, _, _, manifest, index) in sets.items():
        features = Features(
            task=manifest.task,
            model_parameters=record.checkpoint.bytes // BYTES_PER_PARAMETER,
            hardware=hardware,
            engine=record.model.engine,
            batch_size=index.batch_size,
            mode=record.suite.computes,
        )
        batches = predict_batches(features, index.prefill_tokens, index.generated_tokens, history)
        together = 1 if manifest.executes else scored[entry]  # one job scores all tasks of an entry
        metric = predict_metric(
            manifest.task, manifest.documents, manifest.executes, history, together=together
        )
        # a judge job may send as many concurrent requests as the judge's limit allows
        at_once = JUDGES_AT_ONCE if record.suite.tasks[entry].judge else metric.at_once
        starts = (0, *index.ends[:-1])
        blocks = [sum(batches.seconds[a:b]) for a, b in zip(starts, index.ends, strict=False) if b > a]
        work = WorkSet(
            name=name,
            batch_seconds=blocks or batches.seconds,
            metric_seconds=metric.seconds,
            metric="execute" if manifest.executes else "score",
            metric_parallelism=at_once or UNLIMITED,
            sigma=batches.sigma,
        )
        yield work, metric.late


def _leaf(found: _Found, work: WorkSet, shards: Iterable[PlannedShard]) -> PlannedLeaf:
    entry, folder, cut, manifest, index = found
    own = sorted(shards, key=lambda s: s.first_batch)
    named = manifest.executes or index.ends
    batches = [index.documents[s.first_batch : s.end_batch] for s in own] if named else []
    return PlannedLeaf(
        task=manifest.task,
        name=work.name,
        entry=entry,
        key=manifest.key,
        folder=folder,
        executes=manifest.executes,
        sampled=manifest.sampled,
        documents=manifest.documents,
        shards=tuple(_name(s, cut) for s in own),
        shard_documents=tuple(tuple(sorted({d for b in its for d in b})) for its in batches),
        shard_blocks=tuple(bisect_left(index.ends, s.end_batch) for s in own) if index.ends else (),
        executes_at_once=0 if work.metric_parallelism == UNLIMITED else work.metric_parallelism,
        metric_seconds=work.metric_seconds,
    )


def _name(shard: PlannedShard, cut: str) -> str:
    return str(ShardId(shard.set, shard.first_batch, shard.end_batch, cut))


def _likely(record: EvaluationRecord, problem: Problem, sets: Mapping[str, _Found]) -> Problem:
    """Return the problem of the documents that screens of these sets are likely to ask: the first blocks of each set."""
    options = record.suite.screen
    assert options is not None
    documents: Counter[int] = Counter()
    for one in sets.values():
        documents[one.entry] += one.manifest.documents

    def first(work: WorkSet) -> WorkSet:
        share = likely_share(documents[sets[work.name].entry], options)
        return replace(
            work, batch_seconds=work.batch_seconds[: max(1, ceil(share * len(work.batch_seconds)))]
        )

    return replace(problem, sets=[first(work) for work in problem.sets])


def _by_block(lane: LanePlan, sets: Mapping[str, _Found]) -> LanePlan:
    """The lane's shards, planned as blocks of documents, as batches and in the order in which blocks are asked."""

    def batches(shard: PlannedShard) -> PlannedShard:
        ends = sets[shard.set].batches.ends
        distinct = [0, *sorted({end for end in ends if end})]
        first, end = distinct[shard.first_batch], distinct[shard.end_batch]
        return replace(shard, first_batch=first, end_batch=end, rank=float(bisect_left(ends, end)))

    return replace(lane, shards=tuple(sorted(map(batches, lane.shards), key=lambda shard: shard.rank)))


def fewest_workers(end: Callable[[int], float], most: int, cpu_seconds: float) -> int:
    """Return the fewest metric workers, up to `most`, that end within SLACK times the end with `most` workers.

    `end`: number of workers -> seconds until the last metric has ended. A spare worker idles on a CPU, a missing one delays
    the evaluation. `cpu_seconds`: of all metrics; each worker gets at least WORKER_SECONDS of them.
    """
    most = max(1, min(most, int(cpu_seconds / WORKER_SECONDS)))
    enough = METRICS_SLACK * end(most)
    return 1 + bisect_left(range(1, most), True, key=lambda workers: end(workers) <= enough)


def make_plan(
    record: EvaluationRecord,
    wanted: MakePlan,
    read: Mapping[str, tuple[RequestSetManifest, BatchIndex]],
    history: PriorHistory,
    *,
    hardware: str,
    now: float,
) -> Planned:
    """Plan these sets on these lanes. `read`: contents of the folders of `wanted`, by leaf task."""
    options = record.options
    sets = {
        task: _Found(entry, folder, wanted.cuts.get(entry, ""), *read[task])
        for entry, folders in wanted.sets.items()
        for task, folder in folders.items()
    }
    pairs = list(_work_sets(record, sets, hardware, history))
    works, late = [work for work, _ in pairs], {work.name: seconds for work, seconds in pairs}
    asked = [work for work in works if sets[work.name].batches.requests]
    load = predict_load(record.checkpoint.bytes, hardware, history)
    problem = Problem(
        asked,
        [Lane(name=lane, node=node) for lane, node in wanted.lanes],
        load_seconds=load.seconds,
        shard_overhead_seconds=SHARD_OVERHEAD_SECONDS,
        cpu_slots=options.workers * options.metric.cpus,
        shards_per_task=options.shards_per_task,
    )
    planner = PLANNERS[options.plan.policy]
    if record.screening is None:
        made = planner(problem)
        lanes = made.lanes
    else:
        problem = replace(problem, shards_per_task=EACH)
        lanes = tuple(_by_block(lane, sets) for lane in planner(problem).lanes)
        problem = _likely(record, problem, sets)
        made = planner(problem)
    slow = [replace(work, metric_seconds=late[work.name]) for work in asked]

    def end(workers: int, sets: Sequence[WorkSet]) -> float:
        return end_of(made, replace(problem, sets=sets, cpu_slots=workers * options.metric.cpus))

    workers = fewest_workers(lambda number: end(number, slow), options.workers, sum(late.values()))
    shards: dict[str, list[PlannedShard]] = defaultdict(list)
    for lane in lanes:
        for shard in lane.shards:
            shards[shard.set].append(shard)
    return Planned(
        at=now,
        batch_size=wanted.batch_size,
        leaves=tuple(_leaf(sets[work.name], work, shards[work.name]) for work in works),
        lanes=tuple(
            PlannedLane(
                lane=lane.lane,
                node=lane.node,
                shards=tuple((_name(s, sets[s.set].cut), s.rank, s.seconds) for s in lane.shards),
            )
            for lane in lanes
        ),
        predicted_makespan_seconds=max(made.makespan_seconds, end(workers, asked)),
        lower_bound_seconds=made.lower_bound_seconds,
        gpu_seconds=made.gpu_seconds,
        # as if all priors were off in the same direction: too short a limit costs a load, too long a backfill slot
        work_seconds_95=sum(Prediction(seconds=sum(w.batch_seconds), sigma=w.sigma).late for w in works),
        load_seconds_95=load.late,
        workers=workers,
        sigma=max((work.sigma for work in works), default=0.0),
    )
