"""Planner, run-time policy and baselines against their targets.

--instances names a folder with portfolio63_8gpus.instance.json and portfolio63_32gpus.instance.json. Ratios are those of
one machine-independent computation; only the group `scale` measures time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from simulation.policies import simulate_instance

from bench.harness import Options, command, option, row, targets
from coordinator.planning.instance import plan_instance
from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import plan

Texts = dict[int, str]
Rows = Iterator[dict[str, Any]]

INSTANCES = Path(__file__).parent
GPUS = (8, 32)
PLANNED = {8: 1.01, 32: 1.02}
NOISY = {(0.3, 8): 1.02, (0.3, 32): 1.05, (0.6, 8): 1.04, (0.6, 32): 1.09}
FASTER = {8: 1.6, 32: 3.2}
ROUND_ROBIN = [  # Hu et al.: what is measured, policy, stealing
    ("no stealing, tokens cached", "round-robin", False),
    ("no stealing, tokens made in each trial", "paper", False),
    ("stealing, tokens cached", "round-robin", True),
    ("stealing, tokens made in each trial", "paper", True),
]
THAN_WORKERS = {8: 1.25, 32: 1.9}


def planned(texts: Texts, _options: Options) -> Rows:
    for gpus, text in texts.items():
        made = plan_instance(text)
        ratio = made["planned_makespan_seconds"] / made["lower_bound_seconds"]
        yield row(f"planned / bound, {gpus} GPUs", ratio, PLANNED[gpus])


def noisy(texts: Texts, options: Options) -> Rows:
    for (sigma, gpus), target in NOISY.items():
        got = simulate_instance(texts[gpus], "evalspan", sigma, options.seeds)
        yield row(
            f"run time, sigma {sigma}, {gpus} GPUs",
            got["ratio"]["median"],
            target,
            p95=got["ratio"]["p95"],
            gpu_busy_fraction=got["gpu_busy_fraction"],
        )


def speedup(texts: Texts, _options: Options) -> Rows:
    for gpus, text in texts.items():
        ours = _span(text, "evalspan")

        def over(
            what: str, seconds: float, target: float, *, ours: float = ours, **more: Any
        ) -> dict[str, Any]:
            return row(f"speed-up over {what}", seconds / ours, target, at_least=True, **more)

        seconds = _span(text, "per-dataset")
        most = {"most_possible": seconds / plan_instance(text)["lower_bound_seconds"]}
        what = f"per-dataset, {gpus} GPUs, reads share the NIC while they overlap"
        yield over(what, seconds, FASTER[gpus], **most)
        what = f"per-dataset, {gpus} GPUs, every read as on a node that is full of readers"
        yield over(what, _span(text, "per-dataset", contention="full-node"), FASTER[gpus])
        workers = "opencompass-num-worker"
        yield over(f"num-worker, {gpus} GPUs", _span(text, workers), THAN_WORKERS[gpus])
        what = f"num-worker, {gpus} GPUs, its metrics free, ours paid"
        yield over(what, _span(text, workers, metrics_free=True), 1.0)
        yield over(f"opencompass-size, {gpus} GPUs", _span(text, "opencompass-size"), 1.0)
        for what, policy, steal in ROUND_ROBIN:
            yield over(f"round-robin, {gpus} GPUs, {what}", _span(text, policy, steal=steal), 1.0)


def round_robin(texts: Texts, options: Options) -> Rows:
    """Medians of `--seeds` draws, with the spread of the group `noisy`'s first rows."""
    for gpus, text in texts.items():
        ours = _span(text, "evalspan", 0.3, options.seeds)
        for what, policy, steal in ROUND_ROBIN:
            seconds = _span(text, policy, 0.3, options.seeds, steal=steal)
            yield row(f"round-robin, {gpus} GPUs, sigma 0.3, {what}", seconds / ours, 1.0, at_least=True)


def _span(text: str, policy: str, sigma: float = 0.0, seeds: int = 1, **more: Any) -> float:
    return float(simulate_instance(text, policy, sigma, seeds, **more)["makespan_seconds"]["median"])


def random(_texts: Texts, options: Options) -> Rows:
    """Best known: CP-SAT on the plan's own shards, CPU slots unlimited, never below the bound."""
    from support.oracle import best_known, random_problem  # noqa: PLC0415 - OR-Tools is optional

    import_module("ortools")
    ratios = []
    for seed in range(options.random):
        sets, lanes, costs = random_problem(seed)
        made = plan(Problem(sets, lanes, **costs))
        ratios.append(made.makespan_seconds / best_known(made, sets, seconds=options.oracle_seconds, **costs))
    yield row("random instances, planned / best known, median", median(ratios), 1.02, instances=len(ratios))
    yield row("random instances, planned / best known, worst", max(ratios), 1.05)


def scale(_texts: Texts, _options: Options) -> Rows:
    argv = [sys.executable, "-m", "bench.packing", "--scale-child"]
    got = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    more = {"shards": got["shards"], "gpus": 4704}
    yield row("planning 100,000 shards on 4,704 GPUs, seconds", got["seconds"], 1.0, cpu=got["cpu"], **more)
    yield row("planning 100,000 shards on 4,704 GPUs, peak MB of the process", got["megabytes"], 500, **more)


def _peak_megabytes() -> float:
    """Of this program: ru_maxrss would count the parent's from before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith("VmHWM:")) / 1024


def _scale_child() -> None:
    """20 evaluations of 60 sets, 84 shards each, on 588 nodes of 8 GPUs; median of three."""
    draw = Random(1)
    sets = [
        WorkSet(
            name=f"{index}",
            batch_seconds=[draw.lognormvariate(1, 1)] * 420,
            metric_seconds=draw.lognormvariate(1, 1.5),
            metric=draw.choice(["score", "execute"]),
        )
        for index in range(1200)
    ]
    lanes = [Lane(name=f"gpu{index}", node=f"node{index // 8}") for index in range(4704)]
    times = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        made = plan(Problem(sets, lanes, load_seconds=20.0, cpu_slots=9408, shards_per_task=84))
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    shards = sum(len(lane.shards) for lane in made.lanes)
    wall, cpu = (median(each) for each in zip(*times, strict=True))
    print(json.dumps({"shards": shards, "seconds": wall, "cpu": cpu, "megabytes": _peak_megabytes()}))


GROUPS = {
    "planned": planned,
    "noisy": noisy,
    "speedup": speedup,
    "round-robin": round_robin,
    "random": random,
    "scale": scale,
}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    texts = {gpus: (options.instances / f"portfolio63_{gpus}gpus.instance.json").read_text() for gpus in GPUS}
    rows: list[dict[str, Any]] = []
    for group in options.only:
        try:
            rows += [{"group": group, **one} for one in GROUPS[group](texts, options)]
        except ModuleNotFoundError as error:
            rows.append({"group": group, "skipped": str(error)})
    return targets(rows)


OPTIONS = (
    option("--instances", INSTANCES, "folder of the two portfolio63 instances", type=Path),
    option("--seeds", 50),
    option("--random", 40, "random instances; needs OR-Tools"),
    option("--oracle-seconds", 15.0),
    option("--only", [*GROUPS], nargs="*", choices=GROUPS, type=str),
)
if __name__ == "__main__":
    if sys.argv[1:] == ["--scale-child"]:
        _scale_child()
    else:
        sys.exit(command("bench_packing", __doc__, measure, *OPTIONS))
