"""Catalogue of suites, tasks and groups and their contents, for `evalspan ls` and `validate`.

Rule: answers within a second: counts and locations come from YAML files, local data and the Hugging Face cache. Whether a
task loads is up to `validate.check_tasks`. The trial interpreter describes lm-eval's own tasks once per version, in the work
folder's cache.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from coordinator.base.run_command import CommandError
from coordinator.decide.evaluation.job_specs import Site
from coordinator.errors import OperatorError
from coordinator.intake.source_keys import evaljobs_says
from evaljobs.contract.paths import task_catalogue
from evaljobs.contract.specs import SuiteSpec, TaskEntry
from evaljobs.lmeval.catalogue import FUNCTION, TaskDescription, cached_descriptions, describe_tasks
from evaljobs.lmeval.source_files import prepared_data
from evaljobs.lmeval.task_paths import LOADERS
from evaljobs.lmeval.task_yaml import index_of

DESCRIBE_SECONDS = 300  # longest time to describe lm-eval's 14,000 tasks
GROUPS = ("group", "tag")

Known = Mapping[str, TaskDescription]


def own_tasks(site: Site, lm_eval: str) -> dict[str, TaskDescription]:
    """Return lm-eval's own tasks, groups and tags. Raise OperatorError if the trial interpreter cannot list them."""
    place = task_catalogue(site.paths.cache, lm_eval)
    rows = cached_descriptions(place)
    if rows is None:
        try:
            evaljobs_says(site, "catalogue", str(site.paths.cache), seconds=DESCRIBE_SECONDS)
        except CommandError as error:
            said = f"lm-eval's tasks could not be listed by {site.trial_command[-1]}: {error}"
            raise OperatorError(said) from error
        rows = cached_descriptions(place) or {}
    return rows


def with_folders(known: Known, folders: Iterable[str | Path]) -> Known:
    """Add the tasks that these folders define; they take precedence."""
    return {**known, **describe_tasks(index_of(map(str, folders)))}


def matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a glob, or otherwise a substring, selects, sorted and ignoring case."""
    wanted = pattern.lower()
    if not any(c in wanted for c in "*?["):
        wanted = f"*{wanted}*"
    return sorted((name for name in names if fnmatchcase(name.lower(), wanted)), key=str.lower)


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Return the nearest names, for a message; "" if none is near."""
    near = difflib.get_close_matches(pattern.strip("*"), list(names), n=5, cutoff=0.5)
    return f" (nearest: {', '.join(near)})" if near else ""


def leaf_tasks(name: str, known: Known) -> list[str]:
    """Return the tasks of a task, group or tag, each once; unknown names are kept as they are."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in known and known[one].kind in GROUPS:
            waiting += reversed(known[one].members)
        else:
            found[one] = None
    return list(found)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A task of a suite: its few-shot examples, documents and data."""

    task: str
    tasks: int  # leaf tasks
    num_fewshot: int | None  # None: differs between leaf tasks
    documents: int | None  # None: unknown until the data are downloaded
    at_most: bool  # documents is a count of rows, or a limit; a function may leave some out
    kinds: tuple[str, ...]
    metrics: tuple[str, ...]
    data: str  # "local", "cached", "function" (made by code), "unknown", or "missing" (see `missing`)
    missing: tuple[str, ...] = ()  # data sets to fetch, or missing local files


def entry_holding(entry: TaskEntry, known: Known, env: Mapping[str, str]) -> Holding:
    """Return what an entry of a suite contains on this machine."""
    under = leaf_tasks(entry.name, known)
    tasks = [known[name] for name in under if name in known]
    shots = {task.num_fewshot if entry.num_fewshot is None else entry.num_fewshot for task in tasks}
    chosen = entry.samples or {}
    counts = [
        len({*chosen[name]}) if name in chosen else _documents(known[name], entry.limit, env)
        for name in under
        if name in known
    ]
    whole = len(tasks) == len(under) and all(count is not None for count in counts)
    missing = dict.fromkeys(name for task in tasks for name in _missing(task, env))
    places = {_place(task) for task in tasks} if len(tasks) == len(under) else {"unknown"}
    data = "missing" if missing else "unknown" if "unknown" in places else "/".join(sorted(places))
    return Holding(
        task=entry.name,
        tasks=len(under),
        num_fewshot=min(shots) if len(shots) == 1 else None,
        documents=sum(count or 0 for count in counts) if whole else None,
        at_most=any(task.filtered for task in tasks),
        kinds=tuple(dict.fromkeys(task.kind for task in tasks)),
        metrics=tuple(dict.fromkeys(metric for task in tasks for metric in task.metrics)),
        data=data,
        missing=tuple(missing),
    )


def suite_holdings(suite: SuiteSpec, own: Known, env: Mapping[str, str] = os.environ) -> list[Holding]:
    """Return what a suite's tasks contain. `own`: lm-eval's own tasks."""
    known = with_folders(own, suite.include_path)
    return [entry_holding(entry, known, env) for entry in suite.tasks]


def _place(task: TaskDescription) -> str:
    if task.files or (os.path.isabs(task.dataset) and os.path.exists(task.dataset)):  # noqa: PTH110, PTH117 (a private folder)
        return "local"
    if task.dataset.startswith(FUNCTION):
        return "function"
    return "unknown" if task.dataset in ("", *LOADERS) or "://" in task.dataset else "cached"


def _missing(task: TaskDescription, env: Mapping[str, str]) -> list[str]:
    """Return data of a task missing on this machine: files, or the Hub's data set."""
    place = _place(task)
    if place == "local":
        return [file for file in task.files if "://" not in file and not _matches(file)]
    return [task.dataset] if place == "cached" and not _prepared(task, env) else []


def _documents(task: TaskDescription, limit: float | None, env: Mapping[str, str]) -> int | None:
    rows = _lines(task.files) if task.files else _rows_cached(task, env) if _place(task) == "cached" else None
    if rows is None:
        return int(limit) if limit is not None and limit >= 1 else None
    if limit is None:
        return rows
    return min(rows, int(limit)) if limit >= 1 else math.ceil(rows * limit)


def _lines(files: Sequence[str]) -> int | None:
    """Count the lines of JSON-lines files; None for other files or if one is missing."""
    places = [match for file in files for match in _matches(file)]
    if not places or not all(place.suffix == ".jsonl" for place in places):
        return None
    with suppress(OSError):
        return sum(1 for place in places for line in place.read_bytes().splitlines() if line.strip())
    return None


def _matches(file: str) -> list[Path]:
    if Path(file).is_file():
        return [Path(file)]
    return [Path(match) for match in glob.glob(file, recursive=True)]  # noqa: PTH207 (a full pattern)


def _prepared(task: TaskDescription, env: Mapping[str, str]) -> list[Path]:
    """Return the dataset_info.json files that `datasets` keeps of a prepared data set's subset, newest last."""
    return sorted(
        prepared_data(task.dataset, env).glob(f"{glob.escape(task.subset) or '*'}*/*/*/dataset_info.json")
    )


def _rows_cached(task: TaskDescription, env: Mapping[str, str]) -> int | None:
    for info in reversed(_prepared(task, env)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(info.read_bytes())["splits"][task.split]["num_examples"])
    return None
