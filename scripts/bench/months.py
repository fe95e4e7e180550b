"""What a daemon of months holds: descriptors, threads, memory, Redis, files.

A daemon on a development cluster, real Slurm, real Redis, synthetic engine: `--evaluations`, several at once. A row is
taken whenever a group of evaluations has ended; no group begins after `--minutes`. A measure grows where the confidence interval of its slope over the last
half of the rows (Theil-Sen with Sen's interval from Kendall's statistic) lies above 0, and its growth over 1,000 evaluations
is 1 % of its level or more. The intervals of all measures together hold with CONFIDENCE.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from dev_cluster.api import dev_cluster

from bench.harness import Options, RunError, command, option, row, spread, targets
from bench.on_slurm import furnished, run_daemon
from coordinator.runtime.summary import read_ended_summary
from evaljobs.contract.paths import EvaluationPaths

PATIENCE_SECONDS = 4 * 3600
TASKS = {"tasks": 3, "batches": 3, "batch_seconds": 0.1, "seed": 1, "nodes_each": 1}  # of each evaluation
CONFIDENCE = 0.95
SMALL_SHARE = 0.01  # of a measure's level: growth over 1,000 evaluations that is named, and passed


def slope(at: Sequence[float], values: Sequence[float], measures: int = 1) -> dict[str, Any]:
    """Theil-Sen slope of `values` for 1,000 evaluations, its interval, and the verdict.

    `measures`: among how many the error is shared (Bonferroni).
    """
    pairs = itertools.combinations(zip(at, values, strict=True), 2)
    slopes = sorted(1000 * (second[1] - first[1]) / (second[0] - first[0]) for first, second in pairs)
    count = len(values)
    ties = [values.count(value) for value in set(values)]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    reach = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / measures) * variance**0.5
    low = slopes[max(0, int((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, int((len(slopes) + reach) / 2) + 1)]
    level, middle = statistics.median(values), statistics.median(slopes)
    met = low <= 0 or middle < SMALL_SHARE * level
    return {"level": level, "per_1000": middle, "interval": [low, high], "met": met}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    settings = TASKS | {"evaluations": options.evaluations, "watched": True}
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1) as cluster:
        site = furnished(cluster, "months", settings)
        run_daemon(site, str(options.at_once), str(options.minutes), seconds=PATIENCE_SECONDS)
        if left := site.wait_clean(60):
            raise RunError(f"left behind: {left}")
        rows = [json.loads(line) for line in (site.folder / "rows.jsonl").read_text().splitlines()]
        ends = [read_ended_summary(EvaluationPaths(folder)) for folder in site.evaluations()]
    scored = sum(summary is not None and summary.scored == summary.entries for summary in ends)
    if scored != rows[-1]["ended"] or len(rows) < 3:
        why = next((summary.errors or summary.stage for summary in ends if summary is not None), "none ended")
        raise RunError(
            f"{scored} of {rows[-1]['ended']} evaluations have all their scores; {len(rows)} rows: {why}"
        )
    took = [row.pop("seconds") for row in rows]
    half = [
        row | {"seconds": statistics.median(group)} for row, group in zip(rows, took, strict=True) if group
    ]
    half = half[len(half) // 2 :]
    first, last = (
        spread([*itertools.chain(*part)]) for part in (took[: len(took) // 2], took[len(took) // 2 :])
    )
    at, names = [row["ended"] for row in half], [name for name in half[0] if name != "ended"]
    slopes = {name: slope(at, [row[name] for row in half], len(names)) for name in names}
    bad = [name for name, one in slopes.items() if not one["met"]]
    grown = row("measures that grow", len(bad), 0, which=bad)
    return targets([grown], scored=scored, looks=len(rows), slopes=slopes, first_half=first, last_half=last)


OPTIONS = (
    option("--evaluations", 200),
    option("--minutes", 10_000, "after which no further evaluation begins"),
    option("--at-once", 4, "evaluations between two rows"),
)
if __name__ == "__main__":
    sys.exit(command("bench_months", __doc__, measure, *OPTIONS, slurm=True))
