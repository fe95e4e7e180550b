"""What tasks, groups and tags hold, by their YAML files: kind, metrics, data, members.

Rule: reads YAML files, loads no task, imports no lm_eval. The description of lm-eval's own tasks, of which reading takes
seconds, is kept in the cache folder, by version. Called from `task_index` and `coordinator.intake.catalogue`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaljobs.contract.paths import task_catalogue
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.task_paths import source
from evaljobs.lmeval.task_yaml import Function, Index, index_of, merged_config, names_in, parsed

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


def describe(index: Index, read: Callable[[Path], dict[str, Any]] = parsed) -> dict[str, Described]:
    """Name -> description of all that an index defines. `read`: gives a YAML's own content."""
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
        return Described(kind="group", members=tuple(names_in(config.get("task"))), yaml=str(file))
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
        files=files,
        filtered=config.get("process_docs") is not None,
        yaml=str(file),
    )


def _metrics(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Metric names; those of functions by the function's name."""
    listed = config.get("metric_list")
    named = [m.get("metric") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    return tuple(str(m).rpartition(".")[2] if isinstance(m, Function) else str(m) for m in named)


def _data(config: Mapping[str, Any], split: str) -> tuple[str, tuple[str, ...]]:
    """`dataset` and `files` of a `Described`."""
    named = config.get("dataset_kwargs")
    if isinstance(named, dict) and "data_files" in named:
        own = {**named, "data_files": list(_of_split(named["data_files"], split))}
        config = {**config, "dataset_kwargs": own}
    found, custom = source(config), config.get("custom_dataset")
    dataset = found.hub or found.path or "" if custom is None else f"{FUNCTION} {custom}"
    return str(dataset), found.files


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


# --- lm-eval's own ----------------------------------------------------------------------------------------------------


def kept(place: Path) -> dict[str, Described] | None:
    """The descriptions in a cache's file; None where it has none that can be read."""
    try:
        rows: dict[str, Any] = json.loads(place.read_bytes())
        return {name: Described(**row) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def own_tasks(cache: Path | None) -> dict[str, Described]:
    """lm-eval's own tasks, groups and tags, of the installation that this process would import."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None, "lm_eval is not installed"
    folder = Path(str(spec.origin)).parent / "tasks"
    place = None if cache is None else task_catalogue(cache, importlib.metadata.version("lm_eval"))
    found = kept(place) if place is not None else None
    if found and next(one.yaml for one in found.values() if one.yaml).startswith(f"{folder}/"):
        return found
    read = functools.cache(parsed)  # hundreds of YAMLs include one template
    found = describe(index_of([str(folder)], read), read)
    if place is not None:
        rows = {n: {key: value for key, value in asdict(one).items() if value} for n, one in found.items()}
        with contextlib.suppress(OSError):  # a full disk: the next call reads them again
            write_atomic(place, json.dumps(rows).encode())
    return found


def main(arguments: Sequence[str]) -> int:
    """`python -m evaljobs catalogue CACHE`."""
    own_tasks(Path(arguments[0]))
    return 0
