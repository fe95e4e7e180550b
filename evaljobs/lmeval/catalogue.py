"""What tasks, groups and tags there are, what they hold, and whether lm-eval can load them, by their YAML files.

    python -m evaljobs catalogue CACHE    describes lm-eval's own tasks there, by version: reading them takes seconds
    python -m evaljobs tasks JSON         prints an `ResolvedNames` as a line of JSON: how lm-eval resolves the names of a suite

Rule: it reads YAML files, folders and the Hugging Face cache, loads no task and imports no function. Not checked: what is in
modules and data, which the build says, data sets of tasks that are Python classes, and metric scripts. Called from
`evaljobs.lmeval.run` and `coordinator.intake.catalogue`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.paths import task_catalogue
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import JobError, OperatorError
from evaljobs.lmeval import conversations, quiet_environment, task_paths
from evaljobs.lmeval.task_yaml import (
    Function,
    Index,
    TaskDefinition,
    defined_by,
    index_of,
    iterate_texts,
    merged_config,
    missing_include,
    names_in,
    parse_yaml,
    reachable_names,
)

FUNCTION = "!function"
# of a YAML without metric_list (lm_eval/api/registry.py, 0.4.13)
DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
MAX_NEAREST = 3
# arguments of load_dataset that do not select data
DATA_HANDLING_KEYS = ("split", "streaming", "keep_in_memory", "num_proc", "verification_mode", "save_infos", "trust_remote_code")  # fmt: skip


@dataclass(kw_only=True)
class TaskDescription(TaskDefinition):
    """A task, group or tag, with its contents."""

    kind: str  # a task's output type; "group", "tag", or "python" for a task that is a class
    metrics: tuple[str, ...] = ()
    num_fewshot: int = 0
    dataset: str = ""  # Hub id, folder, loader of `files`, or "!function" with its name
    subset: str = ""
    split: str = ""  # the split that is scored
    files: tuple[str, ...] = ()  # full paths or patterns of that split's local data
    filtered: bool = False  # a function chooses or makes the documents: rows are not documents


def describe_tasks(
    index: Index, read: Callable[[Path], dict[str, Any]] = parse_yaml
) -> dict[str, TaskDescription]:
    """Return name -> description of everything that an index defines. `read`: returns a YAML's own content."""
    return {
        name: _described(merged_config(Path(one.yaml), read=read), one.yaml)
        if one.yaml
        else TaskDescription(kind="tag", members=one.members)
        for name, one in index.items()
    }


def _described(config: Mapping[str, Any], file: str) -> TaskDescription:
    if "class" in config:
        return TaskDescription(kind="python", yaml=file)
    if "group" in config:
        return TaskDescription(kind="group", members=[*names_in(config.get("task"))], yaml=file)
    split = str(config.get("test_split") or config.get("validation_split") or "")
    shots = config.get("num_fewshot")
    kind = str(config.get("output_type") or "generate_until")
    dataset, files = _data(config, split)
    return TaskDescription(
        kind=kind,
        metrics=_metrics(config) or DEFAULT_METRICS.get(kind, ()),
        num_fewshot=shots if isinstance(shots, int) else 0,
        dataset=dataset,
        subset=str(config.get("dataset_name") or ""),
        split=split,
        files=files,
        filtered=config.get("process_docs") is not None,
        yaml=file,
    )


def _metrics(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("metric_list")
    named = [m.get("metric") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    return tuple(str(m).rpartition(".")[2] if isinstance(m, Function) else str(m) for m in named)


def _data(config: Mapping[str, Any], split: str) -> tuple[str, tuple[str, ...]]:
    """Return `dataset` and `files` of a `TaskDescription`."""
    named = config.get("dataset_kwargs")
    if isinstance(named, dict) and "data_files" in named:
        own = {**named, "data_files": list(_of_split(named["data_files"], split))}
        config = {**config, "dataset_kwargs": own}
    found, custom = task_paths.data_source(config), config.get("custom_dataset")
    dataset = found.hub or found.path or "" if custom is None else f"{FUNCTION} {custom}"
    return str(dataset), found.files


def _of_split(files: Any, split: str) -> Iterator[str]:
    """Yield texts of data_files that make a split; without splits, all of them."""
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


def cached_descriptions(place: Path) -> dict[str, TaskDescription] | None:
    """Read the descriptions in a cache's file; None if it has none."""
    try:
        rows: dict[str, Any] = json.loads(place.read_bytes())
        return {name: TaskDescription(**row) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def own_tasks(cache: Path | None) -> dict[str, TaskDescription]:
    """Describe lm-eval's own tasks, groups and tags, of the installation that this process would import."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None, "lm_eval is not installed"
    folder = Path(str(spec.origin)).parent / "tasks"
    place = None if cache is None else task_catalogue(cache, importlib.metadata.version("lm_eval"))
    found = cached_descriptions(place) if place is not None else None
    if found and next(one.yaml for one in found.values() if one.yaml).startswith(f"{folder}/"):
        return found
    read = functools.cache(parse_yaml)  # hundreds of YAMLs include one template
    found = describe_tasks(index_of([str(folder)], read), read)
    if place is not None:
        rows = {n: {key: value for key, value in asdict(one).items() if value} for n, one in found.items()}
        with contextlib.suppress(OSError):  # a full disk: the next call reads them again
            write_atomic(place, json.dumps(rows).encode())
    return found


def describe_own(arguments: Sequence[str]) -> int:
    """Run `python -m evaljobs catalogue CACHE`."""
    own_tasks(Path(arguments[0]))
    return 0


# --- the tasks of a suite ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # a job asks for each of its tasks, and a folder may hold thousands of YAMLs
def folder_index(include_path: tuple[str, ...]) -> Index:
    """Index the tasks, groups and tags of the folders. Raise OperatorError for a missing folder, or a name that is not text."""
    for folder in include_path:
        if not Path(folder).is_dir():
            raise OperatorError(f"include_path {folder} is not a folder: correct it in the suite file")
    return index_of(include_path, _with_names)


def _with_names(path: Path) -> dict[str, Any]:
    """Return a YAML's own content. Raise OperatorError if a name in it is not text, since lm-eval fails to sort all names."""
    config = parse_yaml(path)
    for key in ("task", "group", "tag"):
        value = config.get(key, "")
        for name in (value or ()) if key == "tag" and not isinstance(value, str) else [value]:
            if not isinstance(name, str | dict | list):
                raise OperatorError(
                    f"{path}: {key}: {json.dumps(name, default=str)} is not text, and with such a name in include_path "
                    "lm-eval loads no task: write it in quotes, or remove the file"
                )
    return config


def unknown_tasks(names: Sequence[str], known: Sequence[str]) -> dict[str, list[str]]:
    """Return names that lm-eval does not define, each with the nearest defined ones, best first."""
    there = set(known)
    return {
        name: difflib.get_close_matches(name, known, n=MAX_NEAREST, cutoff=0.5)
        for name in names
        if name not in there
    }


@dataclass(kw_only=True)
class ResolvedNames:
    """The names of a suite, sorted by what lm-eval can do with them."""

    unknown: dict[str, list[str]] = field(default_factory=dict)  # name -> nearest names
    unfit: dict[str, str] = field(default_factory=dict)  # task -> why it cannot run
    uncached: dict[str, str] = field(default_factory=dict)  # leaf task -> its missing data set
    files: list[str] = field(default_factory=list)  # local data: files, file patterns, folders


def print_resolved_names(arguments: Sequence[str]) -> int:
    """Run the check. The argument: keywords of `resolve_names`, as JSON."""
    quiet_environment(offline=True)
    os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
    try:
        answer = resolve_names(**json.loads(arguments[0]))
    except JobError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    return 0


def resolve_names(
    include_path: Sequence[str],
    names: Sequence[str],
    cache: str | None = None,
    *,
    chat: bool = False,
    no_likelihoods: str = "",
) -> ResolvedNames:
    """Return how lm-eval resolves these names or YAML files. `cache`: folder; `chat`: the suite applies a chat template.

    `no_likelihoods`: why tasks of likelihoods cannot run; "" where they can.

    Call it offline, as jobs run.
    """
    answer = ResolvedNames()
    files = {name: defined_by(Path(name)) for name in names if Path(name).is_file()}
    index: Index = {**folder_index(tuple(include_path)), **files}
    if not reachable_names(index, names) <= index.keys():
        index = {**own_tasks(Path(cache) if cache else None), **index}
    answer.unfit = {
        name: why
        for name in reachable_names(index, names)
        if name in index and (path := index[name].yaml) and (why := missing_include(Path(path)))
    }
    answer.unknown = unknown_tasks([n for n in names if n not in answer.unfit], list(index))
    cached: dict[str, bool] = {}
    whole = {name: one for name, one in index.items() if name not in answer.unfit}
    for name, config in _leaf_configs(whole, names).items():
        _look(answer, name, config, chat=chat, cached=cached)
        if no_likelihoods and config.get("output_type", "generate_until") != "generate_until":
            answer.unfit.setdefault(name, no_likelihoods)
    return answer


def _leaf_configs(index: Index, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return YAML configs of these names' leaf tasks, with their groups' settings."""
    from lm_eval.tasks._factory import GROUP_FIELD_NAMES  # noqa: PLC0415

    found: dict[str, Mapping[str, Any]] = {}

    def visit(item: Any, inherited: Mapping[str, Any], above: frozenset[str]) -> None:
        own = item if isinstance(item, dict) else {"task": item}
        name = str(own.get("group") or own.get("task"))
        entry = index.get(name)
        if name in above or (entry is None and own is not item):
            return
        inherited = {**inherited, **{key: own[key] for key in own if key not in ("group", "task")}}
        if entry is not None and not entry.yaml:
            for member in sorted(entry.members):
                visit(member, inherited, above | {name})
            return
        config = own if entry is None or not entry.yaml else merged_config(Path(entry.yaml))
        if "group" not in config:
            found[name] = {**config, **inherited}
            return
        listed = config.get("task")
        more = {key: value for key, value in config.items() if key not in GROUP_FIELD_NAMES}
        for member in listed if isinstance(listed, list) else []:
            visit(member, {**more, **inherited}, above | {name})

    for name in names:
        visit(name, {}, frozenset())
    return found


def _look(
    answer: ResolvedNames, name: str, config: Mapping[str, Any], *, chat: bool, cached: dict[str, bool]
) -> None:
    turns = conversations.unfit_reason(config, chat=chat)
    source = task_paths.Source() if "class" in config else task_paths.data_source(config)
    why = (
        (turns and f"it has further turns, but {turns}")
        or source.trouble
        or task_paths.missing_function(config)
        or unscorable_reason(config)
    )
    if why:
        answer.unfit.setdefault(name, why)
    if not source.trouble:
        answer.files += [file for file in source.files if file not in answer.files]
    if source.hub:
        key = json.dumps([source.hub, config.get("dataset_name"), dict(source.keywords)], default=str)
        if key not in cached:
            cached[key] = is_cached(source, config.get("dataset_name"))
        if not cached[key]:
            answer.uncached[name] = source.hub + task_paths.missing_file_message(config)


def unscorable_reason(config: Mapping[str, Any]) -> str:
    """Return an error about an output type or a metric that lm-eval lacks; "" if there is none."""
    from lm_eval.api.registry import metric_registry  # noqa: PLC0415
    from lm_eval.api.task import ALL_OUTPUT_TYPES  # noqa: PLC0415

    if "class" in config:
        return ""
    kind = config.get("output_type", "generate_until")
    if kind not in ALL_OUTPUT_TYPES:
        return f"output_type {kind!r} should be {', '.join(ALL_OUTPUT_TYPES[:-1])} or {ALL_OUTPUT_TYPES[-1]}"
    listed = config.get("metric_list")
    # the module of a function may register its own metrics
    registers = any(isinstance(value, Function) for _, value in iterate_texts(config))
    for each in listed if isinstance(listed, list) and config.get("process_results") is None else ():
        metric = each.get("metric") if isinstance(each, dict) else None
        if metric is None:
            return "metric_list: an entry names no metric"
        if isinstance(metric, Function) or each.get("hf_evaluate") is True or metric in metric_registry:
            continue
        if not registers:
            found = difflib.get_close_matches(str(metric), list(metric_registry.keys()))
            near = f" (nearest: {', '.join(found)})" if found else ""
            return (
                f"metric_list: lm-eval has no metric {metric!r}{near}; one of Hugging Face's evaluate "
                "library needs `hf_evaluate: true`, and `evalspan prepare` fetches it"
            )
    return ""


def is_cached(source: task_paths.Source, subset: str | None) -> bool:
    """Return whether `datasets` finds a hub data set offline; True on any other error."""
    import datasets  # noqa: PLC0415

    keywords = {key: value for key, value in source.keywords.items() if key not in DATA_HANDLING_KEYS}
    try:
        datasets.load_dataset_builder(source.path, name=subset, **keywords)
    except Exception as error:  # noqa: BLE001 (of many libraries; loading the task reports it)
        return not (isinstance(error, FileNotFoundError) or task_paths.not_cached_reason(error))
    return True
