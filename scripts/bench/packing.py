"""Planner, run-time policy and baselines against their targets, on the portfolio of 63 data sets.

Ratios are those of one machine-independent computation; only the group `scale` measures time and memory.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from simulation.policies import simulate_instance
from support.oracle import best_known, random_problem

from bench.harness import Options, command, option, row, targets
from bench.portfolio import instance_text
from coordinator.decide.planning.instance import plan_instance
from coordinator.decide.planning.model import Lane, Problem, WorkSet
from coordinator.decide.planning.planner import plan

Rows = Iterator[dict[str, Any]]
TEXTS = {gpus: instance_text(gpus) for gpus in (8, 32)}
PLANNED = {8: 1.01, 32: 1.02}
NOISY = {(0.3, 8): 1.02, (0.3, 32): 1.05, (0.6, 8): 1.04, (0.6, 32): 1.09}
# what is measured -> policy, times that evalspan is faster at least: on 8 and on 32 GPUs
FASTER: dict[str, tuple[str, tuple[float, float]]] = {
    "per-dataset": ("per-dataset", (1.6, 3.2)),
    "num-worker": ("opencompass-num-worker", (1.25, 1.9)),
    "round-robin of Hu et al., tokens cached": ("round-robin", (1, 1)),
    "round-robin of Hu et al., tokens made in each trial": ("paper", (1, 1)),
}


def planned(_options: Options) -> Rows:
    for gpus, text in TEXTS.items():
        made = plan_instance(text)
        ratio = made["planned_makespan_seconds"] / made["lower_bound_seconds"]
        yield row(f"planned / bound, {gpus} GPUs", ratio, PLANNED[gpus])


def noisy(options: Options) -> Rows:
    for (sigma, gpus), target in NOISY.items():
        got = simulate_instance(TEXTS[gpus], "evalspan", sigma, options.seeds)
        yield row(f"run time, sigma {sigma}, {gpus} GPUs", got["ratio"]["median"], target)


def tail(options: Options) -> Rows:
    """Of the makespan: from the first GPU without a shard to the last shard."""
    for gpus in (8, 32, 256):
        got = simulate_instance(instance_text(gpus), "evalspan", 0.3, options.seeds)
        yield row(f"tail / makespan, sigma 0.3, {gpus} GPUs", got["tail_fraction"], 0.01)


def speedup(_options: Options) -> Rows:
    for which, (gpus, text) in enumerate(TEXTS.items()):
        ours, bound = _span(text, "evalspan"), plan_instance(text)["lower_bound_seconds"]
        for what, (policy, target) in FASTER.items():
            seconds = _span(text, policy)
            name = f"speed-up over {what}, {gpus} GPUs"
            yield row(name, seconds / ours, target[which], at_least=True, most_possible=seconds / bound)


def _span(text: str, policy: str) -> float:
    return float(simulate_instance(text, policy, 0.0, 1)["makespan_seconds"]["median"])


def random(options: Options) -> Rows:
    """Best known: CP-SAT on the plan's own shards, CPU slots unlimited, never below the bound."""
    ratios = []
    for seed in range(options.random):
        sets, lanes, costs = random_problem(seed)
        made = plan(Problem(sets, lanes, **costs))
        ratios.append(made.makespan_seconds / best_known(made, sets, seconds=options.oracle_seconds, **costs))
    yield row("random instances, planned / best known, median", median(ratios), 1.02, instances=len(ratios))
    yield row("random instances, planned / best known, worst", max(ratios), 1.05)


def scale(_options: Options) -> Rows:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        shards, cpu, megabytes = child.submit(large_plan).result()
    what = f"planning {shards:,} shards on 4,704 GPUs"
    yield row(f"{what}, CPU seconds", cpu, 1.0)
    yield row(f"{what}, peak MB of the process", megabytes, 500)


def large_plan() -> tuple[int, float, float]:
    """20 evaluations of 60 sets, 84 shards each, on 588 nodes of 8 GPUs.

    Shards, CPU seconds (the median of three), peak MB of this process (ru_maxrss would count the parent's from before exec).
    """
    draw = Random(1)
    sets = []
    for index in range(1200):
        seconds, metric = [draw.lognormvariate(1, 1)] * 420, draw.lognormvariate(1, 1.5)
        kind = draw.choice(["score", "execute"])
        sets.append(WorkSet(name=f"{index}", batch_seconds=seconds, metric_seconds=metric, metric=kind))
    lanes = [Lane(name=f"gpu{index}", node=f"node{index // 8}") for index in range(4704)]
    times = []
    for _ in range(3):
        began = time.process_time()
        made = plan(Problem(sets, lanes, load_seconds=20.0, cpu_slots=9408, shards_per_task=84))
        times.append(time.process_time() - began)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(text.split()[1]) for text in lines if text.startswith("VmHWM:")) / 1024
    return sum(len(lane.shards) for lane in made.lanes), median(times), peak


GROUPS = {
    "planned": planned,
    "noisy": noisy,
    "tail": tail,
    "speedup": speedup,
    "random": random,
    "scale": scale,
}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    return targets([one for group in options.only for one in GROUPS[group](options)])


OPTIONS = (
    option("--seeds", 50),
    option("--random", 40, "random instances"),
    option("--oracle-seconds", 15.0),
    option("--only", [*GROUPS], nargs="*", choices=GROUPS, type=str),
)
if __name__ == "__main__":
    sys.exit(command("bench_packing", __doc__, measure, *OPTIONS))
