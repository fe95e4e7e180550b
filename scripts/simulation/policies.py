"""Makespans of a policy on a planning instance, over drawn run times: instance text in, dicts out.

Rule: text that is not an instance raises ValueError with its line or field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal, get_args

from coordinator.decide.planning.instance import Instance, parse_instance, plan_of
from simulation import baselines
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import Run, simulate

Policy = Literal["per-dataset", "opencompass-num-worker", "paper", "round-robin", "evalspan"]
"""`round-robin` is what `[plan] policy = "round-robin"` runs: staged weights, cached tokens, no stealing. `paper` is the same
plan where each trial also tokenizes on its GPU, as the trials of Hu et al., NSDI 2024, do."""
POLICIES: tuple[str, ...] = get_args(Policy)
PLANNED_BY = {"paper": "round-robin", "round-robin": "round-robin", "evalspan": "evalspan"}
"""Policies whose plans are made by the planners of real evaluations; the others are simulated by `baselines`."""
MOST_SIGMA = 10.0


def simulate_instance(json_text: str, policy: str, sigma: float | None, seeds: int) -> dict[str, Any]:
    """Makespans of `seeds` drawn runs of one policy, and the medians of their own lower bounds.
    `tail_fraction`: the median part of the makespan between the first idle GPU and the last shard; 0 of baselines.

    `sigma`: spread of log seconds around the predictions; None: each set's own. A run's bound is
    that of its drawn seconds, with staging for policies that stage.
    ValueError: no instance, an unknown policy, fewer than one seed, a sigma below 0 or above 10.
    """
    instance = parse_instance(json_text)
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
    if seeds < 1:
        raise ValueError("a simulation needs at least one seed")
    if sigma is not None and not 0 <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma must be between 0 and {MOST_SIGMA:g}")
    planned = policy in PLANNED_BY
    run = _planned(instance, policy) if planned else _baseline(instance, policy)
    predicted = Predicted(instance.sets())
    runs = [run(Truth(predicted, sigma=sigma, seed=seed)) for seed in range(seeds)]
    ratios = [one.makespan_seconds / one.lower_bound_seconds for one in runs if one.lower_bound_seconds]
    return {
        "policy": policy,
        "lower_bound_seconds": median(one.lower_bound_seconds for one in runs),
        "makespan_seconds": _spread([one.makespan_seconds for one in runs]),
        "ratio": _spread(ratios) if ratios else None,
        "gpu_busy_fraction": median(one.busy_fraction for one in runs),
        "tail_fraction": median(one.tail_seconds / max(one.makespan_seconds, 1e-9) for one in runs),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "p95": quantile(sorted(values), 0.95)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def _planned(instance: Instance, policy: str) -> Callable[[Truth], Run]:
    planned, lanes = plan_of(instance, PLANNED_BY[policy]), instance.lanes()
    costs = {
        "load_seconds": instance.load_seconds,
        "shard_overhead_seconds": instance.shard_overhead_seconds,
        "stage_seconds": instance.staging_seconds,
        "preprocess_seconds": instance.preprocess_seconds if policy == "paper" else 0.0,
    }
    steals = policy == "evalspan"
    return lambda truth: simulate(planned, lanes, truth, cpu_slots=instance.cpu_slots, steal=steals, **costs)


def _baseline(instance: Instance, policy: str) -> Callable[[Truth], Run]:
    sets, gpus, slots = instance.datasets, instance.gpus, instance.cpu_slots
    alone = (
        policy == "per-dataset"
    )  # the other is submitted by OpenCompass, and scores when all have inferred
    tasks = baselines.per_dataset(sets) if alone else baselines.opencompass_num_worker(sets, gpus)
    costs = {"preprocess": instance.preprocess_seconds, "load": instance.load_seconds}
    costs["storage"] = instance.storage_seconds_alone
    submitted = {"gap": baselines.SUBMIT_SECONDS, "running": baselines.MAX_RUNNING}
    own = baselines.Costs(**costs, **({"metric_slots": slots} if alone else submitted))
    bounded = {"load_seconds": instance.load_seconds, "cpu_slots": slots, "stage_seconds": 0.0}

    def run(truth: Truth) -> Run:
        ended = baselines.run_tasks(tasks, truth, own, gpus=gpus, gpus_per_node=instance.gpus_per_node)
        last = max((job.end for job in ended), default=0.0)
        held = sum(job.held for job in ended)
        return Run(
            makespan_seconds=last if alone else baselines.metrics_after(ended, truth, slots),
            busy_fraction=sum(job.busy for job in ended) / held if held else 0.0,
            lower_bound_seconds=truth.bound(instance.lanes(), **bounded).seconds,
        )

    return run
