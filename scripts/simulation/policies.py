"""Makespans of a policy on a planning instance, over drawn run times: instance text in, dicts out.

Rule: text that is not an instance raises ValueError with its line or field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal, get_args

from coordinator.planning.instance import Instance, parse_instance, plan_of
from priors.sizes import known
from simulation import baselines
from simulation.baselines import Costs, Ended, Source
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import Run, simulate

Policy = Literal[
    "per-dataset", "opencompass-size", "opencompass-num-worker", "paper", "round-robin", "evalspan"
]
"""`round-robin` is what `[plan] policy = "round-robin"` runs: staged weights, cached tokens, no stealing. `paper` is the same
plan where each trial also tokenizes on its GPU, as the trials of Hu et al., NSDI 2024, do."""
POLICIES: tuple[str, ...] = get_args(Policy)
PLANNED_BY = {"paper": "round-robin", "round-robin": "round-robin", "evalspan": "evalspan"}
"""Policies whose plans are made by the planners of real evaluations; the others are simulated by `baselines`."""
MOST_SIGMA = 10.0
Contention = Literal["overlap", "full-node"]
"""How reads share a node's link to storage: "overlap" among the jobs that read at that moment;
"full-node", pessimistic for policies that load from storage, always among all GPUs of the node."""


def simulate_instance(
    json_text: str,
    policy: str,
    sigma: float | None,
    seeds: int,
    *,
    metrics_free: bool = False,
    contention: Contention = "overlap",
    steal: bool | None = None,
) -> dict[str, Any]:
    """Makespans of `seeds` drawn runs of one policy, and the medians of their own lower bounds.

    `sigma`: spread of log seconds around the predictions; None: each set's own. A run's bound is
    that of its drawn seconds, with staging for policies that stage. `metrics_free`: all metric
    seconds are 0. `steal`: whether lanes of a planned policy steal; None: the policy's own way.
    ValueError: no instance, an unknown policy, fewer than one seed, a sigma below 0 or above 10.
    """
    instance = parse_instance(json_text)
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
    if seeds < 1:
        raise ValueError("a simulation needs at least one seed")
    if sigma is not None and not 0 <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma must be between 0 and {MOST_SIGMA:g}")
    if metrics_free:
        instance = instance.model_copy(
            update={
                "datasets": tuple(one.model_copy(update={"metric_seconds": 0.0}) for one in instance.datasets)
            }
        )
    predicted = Predicted(instance.sets())
    run = (
        _planned(instance, policy, steal) if policy in PLANNED_BY else _baseline(instance, policy, contention)
    )
    runs = [run(Truth(predicted, sigma=sigma, seed=seed)) for seed in range(seeds)]
    spans = sorted(one.makespan_seconds for one in runs)
    ratios = sorted(one.makespan_seconds / one.lower_bound_seconds for one in runs if one.lower_bound_seconds)
    return {
        "policy": policy,
        "lower_bound_seconds": median(one.lower_bound_seconds for one in runs),
        "makespan_seconds": {"median": median(spans), "p95": quantile(spans, 0.95)},
        "ratio": {"median": median(ratios), "p95": quantile(ratios, 0.95)} if ratios else None,
        "gpu_busy_fraction": median(one.busy_fraction for one in runs),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def _planned(instance: Instance, policy: str, steal: bool | None) -> Callable[[Truth], Run]:
    planned, lanes = plan_of(instance, PLANNED_BY[policy]), instance.lanes()

    def run(truth: Truth) -> Run:
        return simulate(
            planned,
            lanes,
            truth,
            load_seconds=instance.load_seconds,
            shard_overhead_seconds=instance.shard_overhead_seconds,
            cpu_slots=instance.cpu_slots,
            stage_seconds=instance.staging_seconds,
            steal=policy == "evalspan" if steal is None else steal,
            preprocess_seconds=instance.preprocess_seconds if policy == "paper" else 0.0,
        )

    return run


def _baseline(instance: Instance, policy: str, contention: Contention) -> Callable[[Truth], Run]:
    tasks = _tasks(instance, policy)
    costs = _costs(instance, policy, contention)
    lanes = instance.lanes()

    def run(truth: Truth) -> Run:
        ended = baselines.run_tasks(
            tasks,
            truth,
            costs,
            gpus=instance.gpus,
            gpus_per_node=instance.gpus_per_node,
        )
        floor = truth.bound(
            lanes, load_seconds=instance.load_seconds, cpu_slots=instance.cpu_slots, stage_seconds=0.0
        )
        held = sum(job.held for job in ended)
        return Run(
            makespan_seconds=_end(policy, ended, truth, instance.cpu_slots),
            busy_fraction=sum(job.busy for job in ended) / held if held else 0.0,
            lower_bound_seconds=floor.seconds,
        )

    return run


def _tasks(instance: Instance, policy: str) -> list[baselines.Task]:
    sources = [
        Source(name=one.name, docs=one.docs, labels=_labels(one.name, one.labels))
        for one in instance.datasets
    ]
    if policy == "per-dataset":
        return baselines.per_dataset(sources)
    if policy == "opencompass-size":
        return baselines.opencompass_size(sources)
    return baselines.opencompass_num_worker(sources, instance.gpus)


def _labels(name: str, given: int | None) -> int:
    """Labels scored per document: as given, else of the shipped table, else 0 (generation)."""
    if given is not None:
        return given
    row = known(name)
    return row.labels if row else 0


def _costs(instance: Instance, policy: str, contention: Contention) -> Costs:
    full = contention == "full-node"
    return Costs(
        preprocess=instance.preprocess_seconds,
        storage=0.0 if full else instance.storage_seconds_alone,
        load=instance.load_seconds
        + (instance.storage_seconds_alone * instance.gpus_per_node if full else 0.0),
        gap=0.0 if policy == "per-dataset" else baselines.SUBMIT_SECONDS,
        running=1 << 30 if policy == "per-dataset" else baselines.MAX_RUNNING,
        metric_slots=instance.cpu_slots if policy == "per-dataset" else 0,
    )


def _end(policy: str, ended: Sequence[Ended], truth: Truth, cpu_slots: int) -> float:
    if policy == "per-dataset":
        return max((job.end for job in ended), default=0.0)
    return baselines.metrics_after(ended, truth, cpu_slots)
