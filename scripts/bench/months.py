"""What a daemon of months holds: descriptors, threads, memory, Redis, files, and the time of a turn with nothing to do.

`real`: a daemon on a development cluster, real Slurm, real Redis, synthetic engine: `--evaluations`, several at once.
`simulated`: the daemon's loop in this process on a simulated clock: coordinator, service, performer, Redis and files are
real; jobs are played (`bench.months_world`).
With --dir a run of `real` that was cut goes on when the command is typed again: the same work folder and rows, a new
cluster, and a new daemon, which first ends what was open. Figures are of the longest stretch of rows of one daemon.
A row is taken whenever a group of evaluations has ended. Each measure's slope over the last half of the rows must be
indistinguishable from zero (`bench.growth`), or its growth over 1,000 evaluations below 1 % of its level.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dev_cluster.api import dev_cluster

from bench.growth import grown
from bench.harness import Options, RunError, command, option, row, targets
from bench.synthetic_run import furnished, run_module
from coordinator.runtime.summary import ended
from evaljobs.contract.paths import EvaluationPaths

PATIENCE_SECONDS = 4 * 3600
TASKS = {
    "tasks": 3,
    "batches": 3,
    "batch_seconds": 0.1,
    "seed": 1,
}  # of each evaluation; one executes programs
BOUNDED = ("observations_kb",)  # what grows up to a bound: `priors.table` drops old runs


def real(options: Options) -> dict[str, Any]:
    """A daemon as a process on real Slurm, with real jobs."""
    settings = TASKS | {"evaluations": options.evaluations, "announced": False, "nodes_each": 1}
    place = options.dir and options.dir.resolve()
    if place:
        place.mkdir(parents=True, exist_ok=True)
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, expose=[place] if place else []) as cluster:
        if place:
            shutil.chown(place, cluster.user)
        site = furnished(cluster, "months", settings, folder=place and place / "months")
        at_once = str(options.at_once)
        run_module(site, "bench.months_daemon", at_once, seconds=PATIENCE_SECONDS, log=options.log)
        rows = [json.loads(line) for line in (site.folder / "rows.jsonl").read_text().splitlines()]
        return {**figures(rows, site.work), "left": site.wait_clean(60)}


def simulated(options: Options) -> dict[str, Any]:
    """The daemon's loop on a played cluster and clock; it watches the folder in which checkpoints appear."""
    more = {
        "announced": False,
        "watched": True,
        "kilobytes": 4,
        "nodes_each": 1,
        "evaluations": options.evaluations,
    }
    with tempfile.TemporaryDirectory(prefix="evalspan-months-", dir=options.dir) as place:
        root = Path(place)
        env = {**os.environ, "NO_COLOR": "1"}
        words = [sys.executable, "-m", "bench.folder", place, json.dumps(TASKS | more)]
        subprocess.run(words, check=True, env=env)
        words = [sys.executable, "-m", "bench.months_daemon", place, str(options.at_once), "played"]
        with (options.log or root / "daemon.log").open("w") as log:
            ended = subprocess.run(words, env=env, stdout=log, stderr=log, check=False)
        if ended.returncode:
            raise RunError(f"the daemon ended with {ended.returncode}: {Path(log.name).read_text()[-4000:]}")
        rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
        return figures(rows, root / "work")


def figures(rows: list[dict[str, float]], work: Path) -> dict[str, Any]:
    """First and last row and slopes of the longest stretch, and how many evaluations have all their scores."""
    stretches = [list(of_one) for _, of_one in itertools.groupby(rows, lambda row: row["process"])]
    rows = max(stretches, key=len)
    if len(rows) < 3:
        raise RunError(f"no slope of {len(rows)} rows: no daemon lasted for more")
    scored = 0
    for journal in work.glob("*/journal.jsonl"):
        summary = ended(EvaluationPaths(journal.parent))
        scored += summary is not None and summary.scored == summary.entries
    found = {"rows": len(rows), "first": rows[0], "last": rows[-1], "scored": scored, "slopes": grown(rows)}
    return {"daemons": len(stretches), **found}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    found = {"real": real, "simulated": simulated}[options.part](options)
    if found["scored"] != options.evaluations:
        raise RunError(f"{found['scored']} of {options.evaluations} evaluations have all their scores")
    slopes = found["slopes"]
    bad = [name for name, one in slopes.items() if not one["met"] and name not in BOUNDED]
    return targets([row("measures that grow", len(bad), 0, which=bad)], **{options.part: found})


OPTIONS = (
    option("--part", "simulated", "simulated or real"),
    option("--evaluations", 200),
    option("--at-once", 4, "evaluations between two rows"),
    option("--dir", text="where the work folder lies; real: it stays there", metavar="DIR", type=Path),
    option("--log", text="the daemon's log", metavar="FILE", type=Path),
)
if __name__ == "__main__":
    sys.exit(
        command("bench_months", __doc__, measure, *OPTIONS, slurm=lambda options: options.part == "real")
    )
