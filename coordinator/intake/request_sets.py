"""Lookup of request sets on disk, by the digest of a suite entry, and builds for `evalspan prepare`.

Rule: the digest covers all inputs that decide a prompt or a token and are visible without a build: the entry, the suite's
settings, its source key (`intake.source_keys`), tokenizer and config bytes, model arguments, lm-eval's version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pydantic import ValidationError

from coordinator.base.run_command import CommandError
from coordinator.decide.evaluation.actions import FindResponses, MakePlan
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import Inputs, cut_of, cut_on_disk
from coordinator.errors import OperatorError
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.intake.source_keys import Present, evaljobs_says
from evaljobs.contract.names import ADAPTERS
from evaljobs.contract.paths import batch_index_file, entry_manifest, request_set_manifest, slug
from evaljobs.contract.specs import (
    BatchIndex,
    BuildSpec,
    CheckpointSpec,
    EntryManifest,
    ModelOptions,
    RequestSetManifest,
    SuiteSpec,
)
from evaljobs.contract.storage import find_record, read_record
from evaljobs.lmeval.shown_inputs import rows_of_set

# entries that `prepare` builds per process, which costs 5 s of CPU to start and reports progress once
IN_A_PROCESS = 8
WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def folder_names(
    suite: SuiteSpec, checkpoint: CheckpointSpec, model: ModelOptions, inputs: Inputs
) -> list[str]:
    """Return the folder name of each entry's request sets. Reads config and tokenizer files, once; raises OSError."""
    common = {
        "seed": suite.seed,
        "chat": suite.apply_chat_template,
        "system": suite.system_instruction,
        "multiturn": suite.fewshot_as_multiturn,
        "named": inputs.named(adapters=False),
        "env": inputs.env,
        "command": inputs.command,
        "fresh": inputs.fresh,
        "model": [
            _digest(Path(checkpoint.source) / f.name)
            for f in checkpoint.files
            if not f.name.endswith(WEIGHTS)
        ],
        "engine": model.engine,
        "args": {key: value for key, value in model.model_args.items() if key not in ADAPTERS},
        "lm_eval": inputs.lm_eval,
    }
    names = []
    for task, sources in zip(suite.tasks, inputs.entries, strict=True):
        # batches are cut from the same requests: one file per cut
        own = task.model_dump(mode="json", exclude={"batch_size", "group", "every"})
        what = common | {"task": own, "sources": sources.model_dump(mode="json")}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
        names.append(f"{slug(task.name)[:48]}-{digest}")
    return names


def _digest(path: Path) -> list[str]:
    return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]


def find_request_sets(folder: Path, cut: str, present: Present | None) -> dict[str, str] | None:
    """Return leaf task -> folder of a complete set with batches of this cut; None if one must be built.

    A set is rebuilt if an input that its build used has changed: `present` checks; None: it was just built. `cut`: as in
    `records.cut_on_disk`. The folder's mtime then records the last use, for `prune`.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
    if (entry := find_record(entry_manifest(folder), EntryManifest)) is None:
        return None
    if present is not None:
        rows = rows_of_set(folder, entry.shown)
        if rows is None or not present.reads_builds or present.changed(rows):
            return None
    sets = {task: str(folder / relative) for task, relative in entry.sets.items()}
    for place in sets.values():
        if find_record(request_set_manifest(place), RequestSetManifest) is None:
            return None
        if cut and not batch_index_file(place, cut).exists():
            return None
    return sets


class RequestSetError(OperatorError):
    """A request set on disk that cannot be read; the message names its folder."""


def read_request_sets(
    folders: Mapping[str, str], cuts: Mapping[str, str]
) -> dict[str, tuple[RequestSetManifest, BatchIndex]]:
    """Return the manifest and batches of every leaf task by name. Raise RequestSetError if one cannot be read.

    `cuts`: name -> the cut of its batch files, as in `records.cut_on_disk`.
    """
    sets = {}
    for task, folder in folders.items():
        try:
            manifest = read_record(request_set_manifest(folder), RequestSetManifest)
            index = read_record(batch_index_file(folder, cuts[task]), BatchIndex)
        except (OSError, ValidationError) as error:
            raise RequestSetError(f"the request set of {task} in {folder} cannot be read: {error}") from error
        if index.key != manifest.key:
            raise RequestSetError(
                f"the batches of {task} in {folder} are of other requests: remove that folder"
            )
        sets[task] = (manifest, index)
    return sets


def read_wanted(wanted: MakePlan | FindResponses) -> dict[str, tuple[RequestSetManifest, BatchIndex]]:
    """Return `read_request_sets` for the leaf tasks of an action."""
    cuts = {
        task: cut_on_disk(wanted.cuts.get(entry, ""), wanted.batch_size)
        for entry, sets in wanted.sets.items()
        for task in sets
    }
    return read_request_sets(
        {task: folder for sets in wanted.sets.values() for task, folder in sets.items()}, cuts
    )


def _on_disk(suite: SuiteSpec, entry: int) -> str:
    cut = cut_of(suite, entry, suite.batch_size, suite.token_budget)
    return cut_on_disk(cut, suite.batch_size)


def sets_at_hand(
    suite: SuiteSpec, checkpoint: CheckpointSpec, model: ModelOptions, inputs: Inputs, site: Site
) -> dict[str, dict[str, str]]:
    """Return task -> {leaf task: folder} of the suite's request sets that are built for this tokenizer."""
    sets, present = {}, None if site.foreign else Present(site)
    names = folder_names(suite, checkpoint, model, inputs)
    for index, (task, name) in enumerate(zip(suite.tasks, names, strict=True)):
        there = find_request_sets(site.paths.request_sets / name, _on_disk(suite, index), present)
        if there is not None:
            sets[task.name] = there
    return sets


def prepare_request_sets(
    suite: SuiteSpec,
    tokenizer: str,
    *,
    site: Site,
    model: ModelOptions,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext,
    offline: bool = False,
) -> dict[str, dict[str, str]]:
    """Build a suite's request sets here, for `evalspan prepare` and `rescore`, in the same way as a job.

    Return entry -> {leaf task: folder}; existing sets are kept. Raise OperatorError with the build's last line. `busy`:
    context around each process that builds, called with a description.
    """
    checkpoint = inspect_checkpoint(tokenizer, weights=False)
    made_of, present = inputs(suite, model), Present(site)
    tasks = list(enumerate(suite.tasks))
    places = [site.paths.request_sets / name for name in folder_names(suite, checkpoint, model, made_of)]
    waiting = [i for i, _ in tasks if find_request_sets(places[i], _on_disk(suite, i), present) is None]
    specs = {
        index: BuildSpec(
            name=f"prepare-{index}",
            evaluation_dir=None,
            suite=suite,
            entry=index,
            batch_size=suite.batch_size,
            cut=cut_of(suite, index, suite.batch_size, suite.token_budget),
            model_dir=checkpoint.source,
            model=model,
            out_dir=str(places[index]),
            offline=offline,
            source=made_of.entries[index].files,
        )
        for index in waiting
    }
    for first in range(0, len(waiting), IN_A_PROCESS):
        some = waiting[first : first + IN_A_PROCESS]
        named = ", ".join(suite.tasks[index].name for index in some)
        fetching = "" if offline else "fetching data and "
        with busy(f"{fetching}building requests of {named} ({some[-1] + 1} of {len(tasks)})"):
            _build([specs[index] for index in some], site)
    sets = {}
    for index, task in tasks:
        there = find_request_sets(places[index], _on_disk(suite, index), None)
        if there is None:
            raise OperatorError(
                f"{task.name} was built, but {places[index]} does not hold it: is the work folder shared?"
            )
        sets[task.name] = there
    return sets


def _build(specs: Sequence[BuildSpec], site: Site) -> None:
    """Build in one process; if one of several entries fails, build each in its own, so that the error names that task."""
    try:
        evaljobs_says(site, "build", given=[spec.model_dump_json() for spec in specs])
    except CommandError as error:
        if len(specs) > 1:
            for spec in specs:
                _build([spec], site)
            return
        name = specs[0].suite.tasks[specs[0].entry].name
        why = str(error).rpartition("OperatorError: ")[2]  # the last line of a traceback
        raise OperatorError(f"{name} could not be built: {why}") from error
