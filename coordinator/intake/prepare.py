"""Builds a suite's request sets on this machine, with internet, for `evalspan prepare`.

Rule: runs the same build as a job, in a process of its own, into the same folders, but online.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from coordinator.errors import OperatorError
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import Inputs
from coordinator.intake import request_sets
from coordinator.intake.checkpoint import inspect
from coordinator.intake.suites import load_suite
from evaljobs.contract.specs import BuildSpec, ModelOptions, SuiteSpec


def prepare(
    suite_name: str,
    tokenizer: str,
    *,
    site: Site,
    model: ModelOptions,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
) -> dict[str, dict[str, str]]:
    """Entry -> {leaf task: folder}; keeps existing sets. OperatorError with the build's last line."""
    suite = load_suite(suite_name)
    checkpoint = inspect(Path(tokenizer), allow_bin=True, step=None)
    made_of = inputs(suite, model)
    sets: dict[str, dict[str, str]] = {}
    for index, task in enumerate(suite.tasks):
        name = request_sets.folder_name(suite, index, checkpoint, model, made_of)
        folder = site.paths.request_sets / name
        there = request_sets.found(folder, suite.batch_size)
        if there is None:
            spec = BuildSpec(
                name=f"prepare-{index}",
                evaluation_dir=None,
                suite=suite,
                entry=index,
                batch_size=suite.batch_size,
                model_dir=checkpoint.source,
                model=model,
                out_dir=str(folder),
                offline=False,
                source=made_of.entries[index].files,
            )
            _build(spec, site)
            folder = _as_looked_up(
                folder, request_sets.folder_name(suite, index, checkpoint, model, inputs(suite, model))
            )
            there = request_sets.found(folder, suite.batch_size)
        if there is None:
            raise OperatorError(
                f"{task.name} was built, but {folder} does not hold it: is the work folder shared?"
            )
        sets[task.name] = there
    return sets


def _as_looked_up(folder: Path, name: str) -> Path:
    """The folder where an evaluation looks: a data set has a revision only after its fetch."""
    place = folder.with_name(name)
    if place != folder and not place.exists():
        folder.rename(place)
    return place


def _build(spec: BuildSpec, site: Site) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=site.work_dir) as file:
        file.write(spec.model_dump_json())
        file.flush()
        argv = [*site.trial_command, "-m", "evaljobs", "build", file.name]
        done = subprocess.run(
            argv,
            env={**os.environ, **site.trial_env},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OperatorError(f"{spec.suite.tasks[spec.entry].name} could not be built: {last}")
