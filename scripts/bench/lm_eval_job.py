"""`python -m bench.lm_eval_job MODEL SUITE OUT TASK…`: plain lm-eval on tasks of a suite file, a run a task, in one process.

Each leaves OUT/TASK.json: lm-eval's results, its groups' too, and when it ended. Programs are run by a plain interpreter
(the Hub's `code_eval` needs the internet).
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support.exactness.pipeline import reference_code_eval

from evaljobs.lmeval import hooks, quiet_environment


def main(model: str, suite_file: str, out: str, *tasks: str) -> None:
    quiet_environment(offline=True)
    hooks.install_seam()
    torch.set_num_threads(1)
    suite = tomllib.loads(Path(suite_file).read_text())
    manager = TaskManager()
    for entry in suite["task"]:
        if entry["name"] not in tasks:
            continue
        lm = HFLM(pretrained=model, batch_size=suite["batch_size"], device="cpu", dtype="float32")
        with hooks.SEAM.answering(reference_code_eval):
            found = lm_eval.simple_evaluate(
                model=lm,
                task_manager=manager,
                tasks=[entry["name"]],
                num_fewshot=entry["num_fewshot"],
                gen_kwargs=entry.get("gen_kwargs"),
                bootstrap_iters=0,
                confirm_run_unsafe_code=True,
            )
        kept = {"results": {**found["results"], **found.get("groups", {})}, "ended": time.time()}
        place = Path(out) / f"{entry['name']}.json"
        place.with_suffix(".new").write_text(json.dumps(kept, default=float))
        place.with_suffix(".new").replace(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
