"""`python -m evaljobs tasks`: which tasks of a suite lm-eval defines and can load.

Rule: the answer is one `Answer` as a line of JSON on stdout, for the coordinator. It reads YAML
files, folders and the Hugging Face cache; it loads no task and imports no function. Not checked: what is in modules and data, which the build says, data sets of tasks that are Python classes, and metric scripts.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.errors import JobError
from evaljobs.lmeval import catalogue, conversations, run, task_paths
from evaljobs.lmeval.task_yaml import (
    Defined,
    Function,
    Index,
    defined_by,
    merged_config,
    missing_include,
    reached,
    texts,
)

# arguments of load_dataset that do not select data
HANDLING = ("split", "streaming", "keep_in_memory", "num_proc", "verification_mode", "save_infos", "trust_remote_code")  # fmt: skip


@dataclass(kw_only=True)
class Answer:
    """The names of a suite, sorted by what lm-eval can do with them."""

    unknown: dict[str, list[str]] = field(default_factory=dict)  # name -> nearest names
    unfit: dict[str, str] = field(default_factory=dict)  # task -> why it cannot run
    uncached: dict[str, str] = field(default_factory=dict)  # leaf task -> its missing data set
    files: list[str] = field(default_factory=list)  # local data: files, file patterns, folders


def main(arguments: Sequence[str]) -> int:
    """The argument: keywords of `ask`, as JSON."""
    run.quiet_environment(offline=True)
    os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
    try:
        answer = ask(**json.loads(arguments[0]))
    except JobError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    return 0


def ask(
    include_path: Sequence[str], names: Sequence[str], cache: str | None = None, *, chat: bool = False
) -> Answer:
    """How lm-eval resolves these names or YAML files. `cache`: folder; `chat`: the suite applies a chat template.

    Call it offline, as jobs run.
    """
    answer = Answer()
    files = {name: defined_by(Path(name)) for name in names if Path(name).is_file()}
    index = {**run.folder_index(tuple(include_path)), **files}
    if not reached(index, names) <= index.keys():
        index = {**_own_index(Path(cache) if cache else None), **index}
    answer.unfit = {
        name: why
        for name in reached(index, names)
        if name in index and (path := index[name].path) is not None and (why := missing_include(path))
    }
    answer.unknown = run.unknown_tasks([n for n in names if n not in answer.unfit], list(index))
    cached: dict[str, bool] = {}
    whole = {name: one for name, one in index.items() if name not in answer.unfit}
    for name, config in _leaf_configs(whole, names).items():
        _look(answer, name, config, chat=chat, cached=cached)
    return answer


def _own_index(cache: Path | None = None) -> dict[str, Defined]:
    """lm-eval's own tasks, groups (without their members) and tags."""
    return {
        name: Defined(Path(one.yaml)) if one.yaml else Defined(None, list(one.members))
        for name, one in catalogue.own_tasks(cache).items()
    }


def _leaf_configs(index: Index, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """YAML configs of these names' leaf tasks, with their groups' settings."""
    from lm_eval.tasks._factory import GROUP_FIELD_NAMES  # noqa: PLC0415

    found: dict[str, Mapping[str, Any]] = {}

    def visit(item: Any, inherited: Mapping[str, Any], above: frozenset[str]) -> None:
        own = item if isinstance(item, dict) else {"task": item}
        name = str(own.get("group") or own.get("task"))
        entry = index.get(name)
        if name in above or (entry is None and own is not item):
            return
        inherited = {**inherited, **{key: own[key] for key in own if key not in ("group", "task")}}
        if entry is not None and entry.path is None:
            for member in sorted(entry.members):
                visit(member, inherited, above | {name})
            return
        config = own if entry is None or entry.path is None else merged_config(entry.path)
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
    answer: Answer, name: str, config: Mapping[str, Any], *, chat: bool, cached: dict[str, bool]
) -> None:
    turns = conversations.unfit(config, chat=chat)
    source = task_paths.Source() if "class" in config else task_paths.source(config)
    why = (
        (turns and f"it has further turns, but {turns}")
        or source.trouble
        or task_paths.missing_function(config)
        or unscorable(config)
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
            answer.uncached[name] = source.hub + task_paths.nor_beside(config)


def unscorable(config: Mapping[str, Any]) -> str:
    """The message for an output type or a metric that lm-eval lacks; "" where there is none."""
    from lm_eval.api.registry import metric_registry  # noqa: PLC0415
    from lm_eval.api.task import ALL_OUTPUT_TYPES  # noqa: PLC0415

    if "class" in config:
        return ""
    kind = config.get("output_type", "generate_until")
    if kind not in ALL_OUTPUT_TYPES:
        return f"output_type {kind!r} should be {', '.join(ALL_OUTPUT_TYPES[:-1])} or {ALL_OUTPUT_TYPES[-1]}"
    listed = config.get("metric_list")
    # the module of a function may register metrics of its own
    registers = any(isinstance(value, Function) for _, value in texts(config))
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
    """Whether `datasets` finds a hub data set offline; True where another error comes up."""
    import datasets  # noqa: PLC0415

    keywords = {key: value for key, value in source.keywords.items() if key not in HANDLING}
    try:
        datasets.load_dataset_builder(source.path, name=subset, **keywords)
    except Exception as error:  # noqa: BLE001 (of many libraries; loading the task reports it)
        return not (isinstance(error, FileNotFoundError) or run.not_cached(error))
    return True
