"""evalspan's own run, as the user on the submit side: the real coordinator, with the bench's interpreter on the nodes.

    python -m bench_slurm_lib.drive FOLDER SETTINGS

FOLDER is empty; SETTINGS is JSON with scale, sigma, seed, workers. Report and journal lie in FOLDER afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path

from bench_slurm_lib import folder, synthetic
from bench_slurm_lib.portfolio import INSTANCE, Portfolio
from coordinator.base.signals import Signals
from coordinator.evaluation.records import EvaluationRecord, Inputs, evaluation_id
from coordinator.runtime import wiring
from evaljobs.contract.specs import Sources

CHECKPOINT_MB = 64


def main(root: Path, said: dict[str, float]) -> None:
    portfolio = Portfolio(
        INSTANCE.read_text(), scale=said["scale"], sigma=said["sigma"], seed=int(said["seed"])
    )
    os.environ[synthetic.FOLDER] = str(root)
    os.environ["BENCH_STORAGE_SECONDS"] = str(portfolio.instance.storage_seconds_alone)
    settings = wiring.load(
        None,
        {
            "work_dir": root / "work",
            "cluster.kind": "slurm",
            "cluster.partition": "gpu",
            "cluster.cpu_partition": "cpu",
            "cluster.poll_seconds": 1.0,
            "trial.engine": folder.ENGINE,
            "trial.memory_mb": 500,
            "trial.model_args": {"load_seconds": portfolio.instance.load_seconds},
            "metric.workers": int(said["workers"]),
            "metric.memory_mb": 500,
        },
    )
    coordinator = wiring.coordinator_of(settings)
    command = (sys.executable, str(Path(__file__).with_name("node.py")))
    site = dataclasses.replace(coordinator.performer.site, trial_command=command, worker_command=command)
    coordinator.performer.site = site
    checkpoint = folder.write_checkpoint(root / "checkpoint", CHECKPOINT_MB)
    suite, model = folder.suite_of(portfolio.sets), wiring.model_options(settings)
    inputs = Inputs(lm_eval=metadata.version("lm_eval"), entries=(Sources(),) * len(suite.tasks))
    folder.write_request_sets(portfolio.sets, suite, checkpoint, model, site=site, inputs=inputs)
    load = portfolio.instance.load_seconds
    folder.write_history(portfolio.sets, checkpoint, site.paths.observations, load_seconds=load)
    folder.write_metrics(portfolio.sets, root)
    with coordinator.in_charge(), Signals() as signals:
        running = coordinator.accept(
            EvaluationRecord(
                evaluation_id=evaluation_id(checkpoint, suite, model, inputs=inputs),
                checkpoint=checkpoint,
                suite=suite,
                model=model,
                options=wiring.run_options(settings),
                inputs=inputs,
                accepted_at=time.time(),
            )
        )

        def over() -> bool:
            if signals.received:
                coordinator.cancel(running.state.evaluation_id, "interrupted")
                signals.received.clear()
            return running.state.ended_at is not None

        coordinator.run(over)
    for path in (running.paths.report, running.paths.journal):
        (root / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
