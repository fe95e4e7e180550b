"""A training whose checkpoints are evaluated on spare slots: `scripts/demo-training` on a real Slurm of this machine.

One data set of each group of the suite `portfolio`, on drawn rows. Evaluations run in a partition that other users' jobs
preempt; such a job takes a whole node again and again. Each checkpoint must be evaluated once, and nothing may be left.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from chaos_lib.site import Site
from dev_cluster.api import dev_cluster

from bench.harness import ROOT, Options, RunError, command, option, row, say, targets
from bench.whole_portfolio import CPU_NODES, SETTINGS, SUITE, furnished

SECONDS = 3000  # that training and evaluations may take
HELD = 30  # seconds that a job of other users holds a node


def one_of_each_group(suite: str) -> str:
    """A suite file of the first task of each group."""
    head, *tasks = suite.split("[[task]]")
    first: dict[str, str] = {}
    for task in tasks:
        if (group := re.search(r'group = "(.*)"', task)) is not None:
            first.setdefault(group[1], task)
    return "[[task]]".join([head, *first.values()])


def trained(options: Options) -> dict[str, Any]:
    """Figures of one training. RunError: it did not end as it should."""
    with dev_cluster(nodes=options.nodes, gpus=options.gpus, cpu_nodes=CPU_NODES) as cluster:
        folder, env = furnished(cluster, options, one_of_each_group(SUITE.read_text()), ())
        suite, settings, demo = folder / "groups.toml", folder / "settings.toml", folder / "demo"
        text = SETTINGS.format(workers=options.workers, trial="", plan="").replace('"gpu"', '"spare"')
        text += '[slurm.build]\npartition = "cpu"\n[slurm.metric]\npartition = "cpu"\n'
        cluster.run_as_user(["mv", str(folder / "suite.toml"), str(suite)], check=True)
        cluster.run_as_user(["tee", str(settings)], input=text, check=True)
        words = ["--folder", demo, "--suite", suite, "--settings", settings, "--every", options.every]
        words += ["--checkpoints", options.checkpoints - 1, "--timeout", SECONDS]
        argv = [cluster.python, ROOT / "scripts" / "demo_training.py", *words]
        site = Site(cluster, folder, demo / "work")
        taken = itertools.count()
        with subprocess.Popen(
            cluster.user_argv([str(word) for word in argv], cwd=folder), env=env, stdout=sys.stderr
        ) as training:
            while training.poll() is None:
                job = f"-p gpu -N1 --gres=gpu:{options.gpus} --mem=100 -J other -o /dev/null"
                site.user(["sbatch", *job.split(), f"--wrap=sleep {HELD}"])
                say(f"other users' job {next(taken)}")
                for _ in range(int(options.others)):
                    if training.poll() is None:
                        time.sleep(1)
        site.user(["scancel", "--name=other"])
        left = site.wait_clean(60)
        evaluations = site.evaluations()
        events = [event for one in evaluations for event in site.events(one)]
        if training.returncode:
            raise RunError(f"the demo ended with {training.returncode}")
        ended = Counter(event["state"] for event in events if event["kind"] == "job-ended")
        done = Counter(json.loads((one / "report.json").read_text())["checkpoint"] for one in evaluations)
    return {
        "evaluations": len(evaluations),
        "evaluations_of_a_checkpoint": sorted(set(done.values())),
        "checkpoints": len(done),
        "other_jobs": next(taken),
        "jobs_preempted": ended["PREEMPTED"],
        "left": left,
    }


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    found = trained(options)
    rows = [
        row("checkpoints", found["checkpoints"], options.checkpoints, at_least=True),
        # one of the sums that the demo learns, one of the data sets
        row("evaluations_not_two", sum(count != 2 for count in found["evaluations_of_a_checkpoint"]), 0),
        row("left", len(found["left"]), 0),
    ]
    return targets(rows, **found)


OPTIONS = (
    option("--checkpoints", 10, "of the training, the first before its first step"),
    option("--every", 60.0, "seconds between two checkpoints at least"),
    option("--others", 90.0, "seconds between two jobs of other users"),
    option("--nodes", 2, "GPU nodes"),
    option("--gpus", 2, "slots of a node"),
    option("--workers", 2, "CPU jobs that run metrics"),
    option("--tokens", 8, "generated tokens of a document at most"),
)
if __name__ == "__main__":
    sys.exit(command("bench_portfolio training", __doc__, measure, *OPTIONS, slurm=True))
