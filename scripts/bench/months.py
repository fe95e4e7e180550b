"""What a daemon of months holds: descriptors, threads, memory, Redis, files.

A daemon on a development cluster, real Slurm, real Redis, synthetic engine: `--evaluations`, several at once, `--real` of
them by lm-eval. A row is taken whenever a group of evaluations has ended; no group begins after `--minutes`. The same command
with the same `--keep` FOLDER goes on after a kill, or an end, with a daemon and a cluster of its own. A measure grows where
the confidence interval of its slope over the last half of the rows (Theil-Sen with Sen's interval from Kendall's statistic)
lies above 0, and its growth over 1,000 evaluations is 1 % of its level or more. The intervals of all measures together hold
with CONFIDENCE.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_lib.campaign import kept
from dev_cluster.api import dev_cluster

from bench.harness import Options, RunError, command, option, row, spread, targets
from bench.on_slurm import furnished, run_daemon
from coordinator.runtime.summary import read_ended_summary
from evaljobs.contract.paths import EvaluationPaths

PATIENCE_SECONDS = 4 * 3600
TASKS = {"tasks": 3, "batches": 3, "batch_seconds": 0.1, "seed": 1, "trials_each": 1}
TASKS |= {"load_seconds": 0.2}  # of each evaluation
FEWEST_ROWS = 3
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
    settings = TASKS | {"evaluations": options.evaluations, "real": options.real, "watched": True}
    with dev_cluster(nodes=options.nodes, gpus=2, cpu_nodes=1) as cluster:
        folder = Path(options.keep) if options.keep else None
        site = furnished(cluster, "months", settings, answer=None, folder=folder)
        if options.trace:
            site.env["PYTHONTRACEMALLOC"] = "1"
        run_daemon(site, str(options.at_once), str(options.minutes), seconds=PATIENCE_SECONDS)
        if left := site.wait_clean(60):
            raise RunError(f"left behind: {left}")
        rows = kept(str(site.folder / "rows.jsonl"))
        ends = [read_ended_summary(EvaluationPaths(folder)) for folder in site.evaluations()]
    scored = sum(summary is not None and summary.scored == summary.entries for summary in ends)
    if scored != rows[-1]["ended"]:
        why = next((summary.errors or summary.stage for summary in ends if summary is not None), "none ended")
        raise RunError(f"{scored} of {rows[-1]['ended']} evaluations have all their scores: {why}")
    return judge([row for row in rows if row["seconds"]], scored)


def judge(rows: Sequence[dict[str, Any]], scored: int) -> tuple[dict[str, Any], bool]:
    """Judge each measure by the rows of the longest life of the daemon: what it holds begins anew with each."""
    if len(rows) < FEWEST_ROWS:
        raise RunError(f"{len(rows)} rows with an evaluation's end: no slope")
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    took = {
        kind: [spread([*itertools.chain(*(row[kind] for row in half))]) for half in halves]
        for kind in ("seconds", "real_seconds")
    }
    lives = Counter(row["life"] for row in rows)
    life = [row for row in rows if row["life"] == lives.most_common(1)[0][0]]
    blocks = [row.get("blocks_of", {}) for row in life]
    grown = Counter(blocks[-1])
    grown.subtract(blocks[0])
    half = [row | {"seconds": statistics.median(row["seconds"])} for row in life[len(life) // 2 :]]
    at, names = (
        [row["ended"] for row in half],
        [*half[0].keys() - {"ended", "life", "real_seconds", "blocks_of"}],
    )
    slopes = {name: slope(at, [row[name] for row in half], len(names)) for name in sorted(names)}
    bad = [name for name, one in slopes.items() if not one["met"]]
    figures = {"scored": scored, "looks": len(rows), "lives": len(lives), "slopes": slopes, "halves": took}
    figures["grown_blocks"] = dict(grown.most_common(12))
    return targets([row("measures that grow", len(bad), 0, which=bad)], **figures)


OPTIONS = (
    option("--evaluations", 200, "real ones included"),
    option("--real", 0, "of them, of a tiny model by lm-eval"),
    option("--minutes", 10_000, "after which no further evaluation begins"),
    option("--at-once", 4, "evaluations between two rows"),
    option("--nodes", 2, "of two GPUs each"),
    option("--keep", "", "a folder outside of the cluster's, for a campaign that goes on", metavar="FOLDER"),
    option("--trace", False, "name lines of code whose blocks grow (slower)", action="store_true"),
)
if __name__ == "__main__":
    sys.exit(command("bench_months", __doc__, measure, *OPTIONS, slurm=True))
