"""`evalspan prepare`: build a suite's request sets here and now, with the internet that jobs do not have.

Rule: exactly the build that a job would run, in a process of its own, into the same folders; only not offline.
It does not know: evaluations.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command
from coordinator.errors import OperatorError
from coordinator.evaluation.records import Inputs
from coordinator.evaluation.specs import Site
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
    """Entry -> {leaf task: folder}; what is there already is kept. OperatorError with the build's own last line."""
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
    """Where an evaluation will look for it: a data set that was fetched for the build has a revision only now."""
    place = folder.with_name(name)
    if place != folder and not place.exists():
        folder.rename(place)
    return place


def _build(spec: BuildSpec, site: Site) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=site.work_dir) as file:
        file.write(spec.model_dump_json())
        file.flush()
        argv = [*site.trial_command, "-m", "evaljobs", "build", file.name]
        try:
            run_command(argv, env={**os.environ, **site.trial_env})
        except CommandError as error:
            name = spec.suite.tasks[spec.entry].name
            raise OperatorError(f"{name} could not be built: {error}") from error
