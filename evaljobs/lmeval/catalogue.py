"""What tasks, groups and tags hold, by their YAML files: kind, metrics, data, members.

Rule: reads YAML files, loads no task. `python -m evaljobs catalogue CACHE` keeps the description of
lm-eval's own tasks in the cache folder, by version. `coordinator.intake.catalogue` describes the
folders of a suite by the same function.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaljobs.contract.paths import task_catalogue
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.source_files import LOADERS
from evaljobs.lmeval.task_paths import REMOTE, full_path, source
from evaljobs.lmeval.task_yaml import Function, Index, merged_config, parsed

FUNCTION = "!function"
# of a YAML without metric_list (lm_eval/api/registry.py, 0.4.13)
DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}


@dataclass(frozen=True, kw_only=True)
class Described:
    """A task, or a group or tag with the names of its members."""

    kind: str  # a task's output type; "group", "tag", or "python" for a task that is a class
    metrics: tuple[str, ...] = ()
    num_fewshot: int = 0
    dataset: str = ""  # Hub id, folder, loader of `files`, or "!function" with its name
    subset: str = ""
    split: str = ""  # the split that is scored
    files: tuple[str, ...] = ()  # full paths or patterns of that split's local data
    filtered: bool = False  # a function chooses or makes the documents: rows are not documents
    members: tuple[str, ...] = ()
    yaml: str = ""


def describe(index: Index) -> dict[str, Described]:
    """Name -> description of all that an index defines."""
    read = functools.lru_cache(parsed)  # hundreds of YAMLs include one template
    found = {}
    for name, entry in index.items():
        if entry.path is None:
            found[name] = Described(kind="tag", members=tuple(entry.members))
        else:
            found[name] = described(merged_config(entry.path, read=read), entry.path)
    return found


def described(config: Mapping[str, Any], file: Path) -> Described:
    if "class" in config:
        return Described(kind="python", yaml=str(file))
    if "group" in config:
        return Described(kind="group", members=tuple(_members(config.get("task"))), yaml=str(file))
    split = str(config.get("test_split") or config.get("validation_split") or "")
    shots = config.get("num_fewshot")
    kind = str(config.get("output_type") or "generate_until")
    dataset, files = _data(config, split)
    return Described(
        kind=kind,
        metrics=_metrics(config) or DEFAULT_METRICS.get(kind, ()),
        num_fewshot=shots if isinstance(shots, int) else 0,
        dataset=dataset,
        subset=str(config.get("dataset_name") or ""),
        split=split,
        files=tuple(files),
        filtered=config.get("process_docs") is not None,
        yaml=str(file),
    )


def _members(listed: Any) -> Iterator[str]:
    """Names in a group's `task:`; a group that is defined inside it stands for its own members."""
    if isinstance(listed, str):
        yield listed
    elif isinstance(listed, list):
        for one in listed:
            yield from _members(one)
    elif isinstance(listed, dict):
        yield from _members(listed.get("task") or listed.get("group"))


def _metrics(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Metric names; those of functions by the function's name."""
    listed = config.get("metric_list")
    named = [m.get("metric") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    return tuple(str(m).rpartition(".")[2] if isinstance(m, Function) else str(m) for m in named)


def _data(config: Mapping[str, Any], split: str) -> tuple[str, list[str]]:
    """`dataset` and `files` of a `Described`."""
    found = source(config, LOADERS)
    path, keywords = config.get("dataset_path"), config.get("dataset_kwargs")
    named = keywords if isinstance(keywords, dict) else {}
    texts = list(_of_split(named.get("data_files"), split))
    if config.get("custom_dataset") is not None:  # beside the YAML, or else the function's argument
        files = [str(full_path(text)) for text in texts]
        return f"{FUNCTION} {config['custom_dataset']}", [file for file in files if file in found.files]
    if path is None:
        return "", []
    if found.hub or any(mark in str(path) for mark in REMOTE):
        return str(path), []  # data_files are inside that data set
    if path in LOADERS:
        inside = named.get("data_dir")
        if not isinstance(inside, str | None):
            return str(path), []
        if inside and not named.get("data_files"):
            return str(path), [str(full_path(inside))]
        within, dataset = full_path(inside) if inside else None, str(path)
    else:
        within = full_path(path)
        dataset = str(within if within.exists() else path)
    return dataset, [_file(text, within) for text in texts]


def _file(text: str, within: Path | None) -> str:
    if any(mark in text for mark in REMOTE):
        return text
    return str(full_path(text)) if within is None else os.path.normpath(within / text)


def _of_split(files: Any, split: str) -> Iterator[str]:
    """Texts of data_files that make a split; without splits, all of them."""
    if isinstance(files, str):
        yield files
    elif isinstance(files, list):
        for one in files:
            if isinstance(one, dict):
                yield from _of_split(one.get("path"), split) if one.get("split") == split else ()
            else:
                yield from _of_split(one, split)
    elif isinstance(files, dict):
        yield from _of_split(files.get(split), split)


def main(arguments: Sequence[str]) -> int:
    """Describe lm-eval's own tasks; argument: the cache folder."""
    from evaljobs.lmeval import run, task_index  # noqa: PLC0415

    run.quiet_environment(offline=True)
    os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
    (cache,) = map(Path, arguments)
    known = describe(task_index.default_index(cache))
    rows = {name: {key: value for key, value in asdict(one).items() if value} for name, one in known.items()}
    write_atomic(task_catalogue(cache, importlib.metadata.version("lm_eval")), json.dumps(rows).encode())
    return 0
