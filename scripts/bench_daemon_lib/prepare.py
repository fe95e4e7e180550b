"""What the daemon of the scale bench finds, written as its user: settings, suite, request sets, checkpoints, notices.

    python -m bench_daemon_lib.prepare FOLDER SETTINGS

SETTINGS is JSON with evaluations, tasks, batches, batch_seconds, nodes_each, poll, seed.
Rule: all checkpoints have one tokenizer, so they share their request sets, as a training run's do.
It does not know: the cluster.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_slurm_lib import folder
from bench_slurm_lib.portfolio import Set

from coordinator.intake.checkpoint import inspect
from coordinator.intake.sources import Notice, submit
from coordinator.intake.suites import load_suite
from coordinator.runtime import wiring
from evaljobs.contract.paths import WorkPaths

LOAD_SECONDS = 2.0
METRIC_SECONDS = 0.2
EXECUTES_EVERY = 10  # a set in so many has programs to execute
CONFIG = """
work_dir = "work"
[trial]
engine = "{engine}"
memory_mb = 500
model_args = {{ load_seconds = {load} }}
[metric]
workers = 1
memory_mb = 500
[cluster]
kind = "slurm"
partition = "gpu"
cpu_partition = "cpu"
poll_seconds = {poll}
[borrow]
max_nodes = {nodes_each}
"""


def draw(tasks: int, batches: int, seconds: float, seed: int) -> list[Set]:
    """Sets of `batches` batches on average, each batch of about `seconds`; programs are executed in some of them."""
    dice = random.Random(seed)
    sets = []
    for index in range(tasks):
        count = dice.randint(max(1, batches // 2), batches + batches // 2)
        mean = seconds * dice.uniform(0.5, 1.5)
        sets.append(
            Set(
                name=f"set{index:03d}",
                predicted=(mean,) * count,
                seconds=tuple(mean * dice.lognormvariate(0.0, 0.3) for _ in range(count)),
                metric_predicted=METRIC_SECONDS,
                metric_seconds=METRIC_SECONDS,
                executes=index % EXECUTES_EVERY == 0,
                alone=False,
            )
        )
    return sets


def main(root: Path, said: dict[str, Any]) -> None:
    sets = draw(said["tasks"], said["batches"], said["batch_seconds"], said["seed"])
    config = root / "evalspan.toml"
    config.write_text(
        CONFIG.format(
            engine=folder.ENGINE, load=LOAD_SECONDS, poll=said["poll"], nodes_each=said["nodes_each"]
        )
    )
    suite_file = root / "scale.toml"
    rows = "".join(f'[[task]]\nname = "{one.name}"\n' for one in sets)
    suite_file.write_text(f'name = "scale"\nbatch_size = 1\n{rows}')
    settings = wiring.load(config, {})
    site = wiring.site_of(settings)
    suite, model = load_suite(suite_file), wiring.model_options(settings)
    first = root / "checkpoints" / "step-0"
    checkpoint = folder.write_checkpoint(first, 1)
    version = metadata.version("lm_eval")
    folder.write_request_sets(sets, suite, checkpoint, model, site=site, version=version)
    folder.write_history(sets, checkpoint, site.paths.observations, load_seconds=LOAD_SECONDS)
    folder.write_metrics(sets, root)
    for number in range(said["evaluations"]):
        place = root / "checkpoints" / f"step-{number}"
        if place != first:
            shutil.copytree(first, place)
            with (place / "model.safetensors").open("r+b") as weights:  # another checkpoint: other weights
                weights.seek(-8, os.SEEK_END)
                weights.write(number.to_bytes(8, "little"))
        notice = Notice(
            checkpoint=inspect(place).source, step=number, suite=str(suite_file), noticed_at=time.time()
        )
        submit(WorkPaths(settings.work_dir), notice)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
