"""What a daemon of months holds: descriptors, threads, memory, Redis, files, and the time of a turn with nothing to do.

`real`: a daemon on a development cluster, real Slurm, real Redis, synthetic engine: `--evaluations`, several at once.
`simulated`: the daemon's loop on a simulated clock: coordinator, service, performer, Redis and files are real; jobs are
played (`bench.played`).
A row is taken whenever a group of evaluations has ended. A measure grows where the confidence interval of its slope over the
last half of the rows (Theil-Sen with Sen's interval from Kendall's statistic) lies above 0, and its growth over 1,000
evaluations is 1 % of its level or more. The intervals of all measures together hold with CONFIDENCE.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dev_cluster.api import dev_cluster

from bench.harness import Options, RunError, command, option, row, targets
from bench.on_slurm import furnished, run_daemon
from coordinator.runtime.summary import ended
from evaljobs.contract.paths import EvaluationPaths

PATIENCE_SECONDS = 4 * 3600
TASKS = {"tasks": 3, "batches": 3, "batch_seconds": 0.1, "seed": 1, "nodes_each": 1}  # of each evaluation
BOUNDED = ("observations_kb",)  # what grows up to a bound: `priors.table` drops old runs
CONFIDENCE = 0.95
SMALL_SHARE = 0.01  # of a measure's level: growth over 1,000 evaluations that is named, and passed


@contextlib.contextmanager
def real(options: Options) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder of a daemon that ran on real Slurm, with real jobs; and what it left there."""
    place = options.dir and options.dir.resolve()
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, expose=[place] if place else []) as cluster:
        if place:
            place.mkdir(parents=True, exist_ok=True)
            shutil.chown(place, cluster.user)
        settings = TASKS | {"evaluations": options.evaluations, "announced": False}
        site = furnished(cluster, "months", settings, folder=place and place / "months")
        run_daemon(site, str(options.at_once), seconds=PATIENCE_SECONDS)
        yield site.folder, {"left": site.wait_clean(60)}


@contextlib.contextmanager
def simulated(options: Options) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder of a daemon that ran on a played cluster and clock; it watches the folder in which checkpoints appear."""
    settings = TASKS | {"evaluations": options.evaluations, "announced": False, "played": True}
    with tempfile.TemporaryDirectory(prefix="evalspan-months-", dir=options.dir) as place:
        log = Path(place) / "daemon.log"
        for module, word in (("world", json.dumps(settings)), ("in_daemon", str(options.at_once))):
            argv = [sys.executable, "-m", f"bench.{module}", place, word]
            with log.open("w") as out:
                env = {**os.environ, "NO_COLOR": "1"}
                done = subprocess.run(argv, env=env, stdout=out, stderr=out, check=False)
            if done.returncode:
                raise RunError(f"{module} ended with {done.returncode}: {log.read_text()[-4000:]}")
        yield Path(place), {}


def grown(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """By measure: its slope over the last half of `rows`, which have "ended", the number of ended evaluations."""
    half = rows[len(rows) // 2 :]
    names = [name for name in half[0] if name not in ("ended", "at")]
    at = [row["ended"] for row in half]
    return {name: slope(at, [row[name] for row in half], len(names)) for name in names}


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
    share = middle / level if level else 0.0
    met = low <= 0 or share < SMALL_SHARE
    found = {"level": level, "per_1000": middle, "interval": [low, high], "zero": low <= 0}
    return {**found, "share_per_1000": share, "met": met}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with {"real": real, "simulated": simulated}[options.part](options) as (folder, found):
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        ends = [ended(EvaluationPaths(file.parent)) for file in (folder / "work").glob("*/journal.jsonl")]
    scored = sum(summary is not None and summary.scored == summary.entries for summary in ends)
    if scored != options.evaluations or len(rows) < 3:
        raise RunError(
            f"{scored} of {options.evaluations} evaluations have all their scores; {len(rows)} rows"
        )
    slopes = grown(rows)
    found |= {"rows": len(rows), "first": rows[0], "last": rows[-1], "scored": scored, "slopes": slopes}
    bad = [name for name, one in slopes.items() if not one["met"] and name not in BOUNDED]
    return targets([row("measures that grow", len(bad), 0, which=bad)], **{options.part: found})


OPTIONS = (
    option("--part", "simulated", "simulated or real", choices=("simulated", "real"), type=str),
    option("--evaluations", 200),
    option("--at-once", 4, "evaluations between two rows"),
    option(
        "--dir",
        text="where the work folder lies; real: it stays there, new at the start",
        metavar="DIR",
        type=Path,
    ),
)
if __name__ == "__main__":
    sys.exit(
        command("bench_months", __doc__, measure, *OPTIONS, slurm=lambda options: options.part == "real")
    )
