"""The suite of an evaluation: named, from a file, or tasks without a file, with settings that override its own.

Rule: a file, the options of a command and the arguments of a call are tables with the same keys, merged here and checked once
as a `SuiteSpec`. Tasks on the command line are thus exactly the suite of a file with the same values: ids, reuse and resume
apply. Unknown keys are refused; paths in a file are relative to it. Shipped suites are in `evaljobs/suites`, since jobs on
nodes read their tasks and data. `validate` checks that lm-eval has the tasks.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict

from coordinator.decide.evaluation.records import TOKEN_BUDGET
from coordinator.errors import OperatorError
from coordinator.site.config import toml
from evaljobs.contract.paths import expand_home, slug
from evaljobs.contract.specs import Mode, ScreenOptions, SuiteSpec, TaskEntry
from evaljobs.lmeval.task_yaml import index_of

FAST_ENGINES = ("hf", "hf-auto", "huggingface")  # lm-eval's names for its transformers class
BUDGET_IS_FAST = 'only mode = "fast" has a token budget: omit token_budget, or set that mode'
CHOOSE_ADVICE = "pass --suite NAME or --tasks NAME,NAME, or set [watch] suite in evalspan.toml"
MOST_NAME = 40  # length of the tasks' part of a suite's name
PATTERN_CHARACTERS = "*?["
OF_TASKS = ("limit", "num_fewshot", "gen_kwargs", "samples", "metadata", "every")  # settings of each task
HIDDEN_SETTINGS = (
    "token_budget",
    "seed",
    "apply_chat_template",
    "system_instruction",
    "fewshot_as_multiturn",
)  # see _suffix

PathLike = str | Path


class SuiteSettings(TypedDict, total=False):
    """Settings of a suite that a call may replace; each has the same meaning as in a suite file."""

    limit: float | None  # documents of each task, or a share below 1
    num_fewshot: int | None  # examples in each prompt
    gen_kwargs: Mapping[str, Any] | None  # generation settings of each task
    samples: Mapping[str, Sequence[int]] | None  # leaf task -> its documents, from 0
    metadata: Mapping[str, Any] | None  # added to each task's own
    every: int | None  # 1: each task is asked, whatever its `every` says
    batch_size: int | str | None  # a number, or "auto"
    token_budget: int | str | None  # tokens per forward pass in fast mode, or "auto"
    mode: Mode | None  # "exact" or "fast"
    include_path: Sequence[PathLike] | PathLike  # folders of task YAMLs, relative to the current folder
    seed: int | None  # seed of all generators
    apply_chat_template: bool | str | None  # True, or a template's name
    system_instruction: str | None  # system message of each prompt
    fewshot_as_multiturn: bool | None  # few-shot examples as turns of the conversation


# --- settings from a call or a command line
# -----------------------------------------------------------------------------------


def suite_choice(suite: PathLike | None, tasks: Sequence[str] | str, more: SuiteSettings) -> dict[str, Any]:
    """Return the given parts of the suite. `tasks`: names, or "a,b". Raise OperatorError for an unknown setting."""
    known = list(SuiteSettings.__annotations__)
    if unknown := [key for key in more if key not in known]:
        raise OperatorError(f"no argument {unknown[0]!r}; {toml.did_you_mean(unknown[0], known)}")
    folders = more.get("include_path", ())
    said = {
        "suite": None if suite is None else str(suite),
        "tasks": tasks.split(",") if isinstance(tasks, str) and tasks else list(tasks),
        **more,
        "include_path": [str(folder) for folder in ([folders] if isinstance(folders, PathLike) else folders)],
    }
    return {key: value for key, value in said.items() if value not in (None, [])}


def option_words(said: Mapping[str, Any]) -> list[str]:
    """Return equivalent command-line options. `said`: from `suite_choice`."""
    found: list[str] = []
    for key, value in said.items():
        option = f"--{key.replace('_', '-')}"
        match value:
            case True:
                found += [option]
            case False:
                found += [f"{option}=false"]
            case list() if key == "include_path":
                found += [word for each in value for word in (option, each)]
            case list():
                found += [option, ",".join(value)]
            case Mapping():
                found += [option, json.dumps(value)]
            case _:
                found += [option, format_number(value) if isinstance(value, float) else str(value)]
    return found


def suite_of(said: Mapping[str, Any], default: str | None = None) -> SuiteSpec:
    """Return the suite that `said` (from `suite_choice`) names; `default`: used if it names none. Raise OperatorError."""
    named, tasks = said.get("suite"), said.get("tasks")
    if tasks and named is not None:
        raise OperatorError(
            "--tasks names tasks of lm-eval and --suite a suite of them: give one of the two, "
            "or list the tasks in a suite file"
        )
    settings = {key: value for key, value in said.items() if key not in ("suite", "tasks")}
    folders = [str(expand_home(folder).resolve()) for folder in settings.get("include_path", ())]
    if folders:
        settings["include_path"] = folders
    if tasks:
        return _with(_of_tasks(tasks, folders), settings, named=False)
    named = default if named is None else named
    if named is None:
        raise OperatorError(f"no suite and no tasks are named: {CHOOSE_ADVICE}")
    suite = load_suite(named)
    return _with(suite.model_dump(mode="json", exclude_none=True), settings) if settings else suite


def _with(suite: dict[str, Any], settings: dict[str, Any], *, named: bool = True) -> SuiteSpec:
    """Return `suite`, a dumped `SuiteSpec`, with these settings. `named`: it has its own name, which stands for its folders."""
    if "limit" in settings:
        settings["limit"] = _limit(settings["limit"])
    for key in settings.keys() & {"batch_size", "token_budget"}:
        settings[key] = _count(str(settings[key]), key)
    data = suite | settings
    if settings.get("mode") == "exact" and "token_budget" not in settings:
        data.pop("token_budget", None)  # from the suite's fast mode
    if "mode" in settings:
        data.pop("screen", None)
    of_tasks = {key: data.pop(key) for key in OF_TASKS if key in settings}
    data["task"] = [task | of_tasks for task in data.pop("tasks")]
    # of two definitions, the later folder's counts
    data["include_path"] = [*suite["include_path"], *settings.get("include_path", ())]
    data["name"] += _suffix(settings, suite, named=named)
    return _checked(data, _option, None)


def _of_tasks(named: Sequence[str], own_folders: Sequence[str]) -> dict[str, Any]:
    """Return a suite of the tasks with no other settings, as a dumped `SuiteSpec`."""
    # task of evalspan's own -> the shipped suite with its folder, and its entry there
    loaded = [suite for suite in map(load_suite, suite_names()) if suite.include_path]
    shipped = {task.name: (suite, task) for suite in loaded for task in suite.tasks}
    own = index_of(own_folders)
    folders: list[str] = []
    tasks: list[dict[str, Any]] = []
    for name in dict.fromkeys(map(_checked_name, named)):
        known = None if name in own else shipped.get(name)
        if known is not None:
            new = (f for f in known[0].include_path if f not in (*folders, *own_folders))
            folders = [*new, *folders]
        tasks.append({"name": name, **({"judge": True} if known is not None and known[1].judge else {})})
    return {
        "name": _name_of(named),
        "include_path": folders,
        "tasks": tasks,
        "apply_chat_template": False,
    }


def _checked_name(text: str) -> str:
    """Return a task's name, or the full path of a YAML file."""
    if text.endswith((".yaml", ".yml")):
        path = expand_home(text).resolve()
        if not path.is_file():
            raise OperatorError(f"--tasks: no file {path}")
        return str(path)
    if any(char in text for char in PATTERN_CHARACTERS):
        raise OperatorError(
            f"--tasks: {text!r} is a pattern: name each task or group (`evalspan ls tasks {text!r}` lists them)"
        )
    if not text:
        raise OperatorError("--tasks: a name is empty; names are separated by one comma")
    return text


def _limit(said: object) -> int | float:
    match said:
        case int() | float() if said >= 1 and float(said).is_integer():
            return int(said)  # lm_eval reads `--limit 10` as 10.0
        case float() if 0 < said < 1:
            return said
    shown = f"{said:g}" if isinstance(said, int | float) else repr(said)
    raise OperatorError(f"--limit is a number of documents, or a share below 1, not {shown}")


def _count(text: str, key: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) == 0:
        raise OperatorError(f'--{key.replace("_", "-")} is a positive number or "auto", not {text!r}')
    return int(text)


def _option(location: toml.Location) -> str:
    """Return the option that set a value of the suite."""
    named = [str(part) for part in location if not isinstance(part, int)]
    if named[:2] in ([], ["task"], ["task", "name"]):
        return "--tasks"
    return f"--{(named[1] if named[0] == 'task' else named[0]).replace('_', '-')}"


def _name_of(tasks: Sequence[str]) -> str:
    """Return the name of a suite of tasks: readable, at most about 60 characters."""
    every = [Path(n).stem if n.endswith((".yaml", ".yml")) else n for n in dict.fromkeys(tasks)]
    text, shown = every[0][:MOST_NAME], 1
    while shown < len(every) and len(text) + 1 + len(every[shown]) <= MOST_NAME:
        text, shown = f"{text}-{every[shown]}", shown + 1
    return slug(f"{text}-and-{len(every) - shown}-more" if shown < len(every) else text)


def _suffix(settings: Mapping[str, Any], before: Mapping[str, Any], *, named: bool) -> str:
    """Return a name suffix that distinguishes scores of these settings from those of the suite `before`.

    Settings without a word of their own are covered by a digest.
    """
    limit = f"-limit{format_number(settings['limit'])}" if "limit" in settings else ""
    shots = f"-{settings['num_fewshot']}shot" if "num_fewshot" in settings else ""
    mode = settings.get("mode", before.get("mode", "exact"))
    hidden = {
        key: settings[key] for key in HIDDEN_SETTINGS if key in settings and settings[key] != before.get(key)
    }
    if hidden.get("apply_chat_template") is True:  # "-chat" says it
        del hidden["apply_chat_template"]
    for key in ("gen_kwargs", "samples", "metadata"):
        more = settings.get(key)
        if more is not None and any(task.get(key) != more for task in before["tasks"]):
            hidden[key] = more
    if named and "include_path" in settings:
        hidden["include_path"] = settings["include_path"]
    digest = hashlib.sha256(json.dumps(hidden, sort_keys=True).encode()).hexdigest()[:6]
    other_mode = f"-{mode}" if mode != before.get("mode", "exact") else ""
    chat = "-chat" if settings.get("apply_chat_template") else ""
    return f"{limit}{shots}{other_mode}{chat}{f'-{digest}' if hidden else ''}"


def format_number(value: float) -> str:
    """Format all digits of a number; integers without a point."""
    return str(int(value)) if float(value).is_integer() else str(value)


# --- names and files -----------------------------------------------------------------------------------------------


def suite_folder() -> Path:
    return Path(str(resources.files("evaljobs"))) / "suites"


def suite_names() -> list[str]:
    return sorted(path.stem for path in suite_folder().glob("*.toml"))


def load_suite(name_or_file: str | Path) -> SuiteSpec:
    """Load the suite of that name, or in that file (a name with a slash, or ending in ".toml").

    `include_path` becomes absolute. Raise OperatorError: no such suite (with the nearest names), no such file or folder, or a
    wrong key or value (with its line).
    """
    path = _find(str(name_or_file))
    data, text = toml.read_toml(path)
    return _checked(data, toml.file_locations(path, text), path)


def _checked(data: Mapping[str, Any], where: toml.Where, path: Path | None) -> SuiteSpec:
    """Return the suite of a suite file's values. `path`: the file that relative paths start from; None: the current folder."""
    suite = toml.validate_table(SuiteSpec, data, where)
    _refuse_twins(suite.tasks, where)
    if all(task.every != 1 for task in suite.tasks):
        raise OperatorError(
            f"{where(('task', 0, 'every'))}: every task has `every` above 1, so most checkpoints would be asked nothing: "
            "omit it for one task"
        )
    if suite.fewshot_as_multiturn and suite.apply_chat_template is False:  # lm_eval refuses it as well
        raise OperatorError(
            f"{where(('fewshot_as_multiturn',))}: few-shot examples become turns only with a chat template: set apply_chat_template"
        )
    if suite.token_budget is not None and suite.mode == "exact":
        raise OperatorError(f"{where(('token_budget',))}: {BUDGET_IS_FAST}")
    if suite.token_budget == "auto" and suite.batch_size != "auto":  # noqa: S105 (no password)
        raise OperatorError(
            f'{where(("token_budget",))}: "auto" is found together with the batch size: '
            'set batch_size = "auto", too, or token_budget to a number'
        )
    if suite.screen is not None and suite.mode != "screen":
        raise OperatorError(
            f'{where(("screen",))}: [screen] is of mode = "screen": set that mode, or leave [screen] away'
        )
    if suite.mode == "screen" and suite.token_budget is not None:
        raise OperatorError(f"{where(('token_budget',))}: {BUDGET_IS_FAST}")
    for index, task in enumerate(suite.tasks):
        if task.samples and (task.limit is not None or suite.mode == "screen"):
            raise OperatorError(
                f'{where(("task", index, "samples"))}: samples name the documents: omit limit, and mode = "screen"'
            )
    folders = tuple(_folder(part, path, where) for part in suite.include_path)
    return suite.model_copy(update={"include_path": folders})


def suite_in_mode(suite: SuiteSpec, mode: Mode, engine: str) -> SuiteSpec:
    """Return the suite as an evaluation runs it: in its own mode, otherwise `mode` of the settings.

    Exact mode becomes mode None, so that ids of exact evaluations are unchanged since before there were modes. Raise
    OperatorError if the engine, or a setting of the suite, does not support the mode.
    """
    if suite.mode == "screen":
        return suite.model_copy(update={"screen": suite.screen or ScreenOptions()})
    how = suite.mode or mode
    if how == "exact":
        if suite.token_budget is not None:
            raise OperatorError(f"suite {suite.name}: {BUDGET_IS_FAST}")
        return suite.model_copy(update={"mode": None})
    if engine not in FAST_ENGINES:
        who = f"suite {suite.name}" if suite.mode else "[trial]"
        raise OperatorError(
            f'{who}: mode "fast" is for the engine "hf", and [trial] engine is {engine!r}, '
            'which shares contexts in its own way or not at all: set mode = "exact"'
        )
    budget = suite.token_budget or ("auto" if suite.batch_size == "auto" else TOKEN_BUDGET)
    return suite.model_copy(update={"mode": "fast", "token_budget": budget})


def _find(text: str) -> Path:
    if toml.is_file_name(text):
        path = expand_home(text)
        if not os.path.isfile(path):  # noqa: PTH113 (False in a private folder)
            raise OperatorError(
                f"no suite file {text}: give a TOML file, or one of {', '.join(suite_names())}"
            )
        return path.resolve()
    shipped = suite_folder() / f"{text}.toml"
    if text and shipped.is_file():
        return shipped
    near = difflib.get_close_matches(text, suite_names(), n=3, cutoff=0.6)
    known = f"nearest: {', '.join(near)}" if near else f"shipped: {', '.join(suite_names())}"
    raise OperatorError(
        f"no suite named {text!r} ({known}); a suite of your own is a file: --suite ./{text or 'my'}.toml"
    )


def _folder(part: str, suite: Path | None, where: toml.Where) -> str:
    path = ((suite.parent if suite else Path.cwd()) / expand_home(part)).resolve()
    if not os.path.isdir(path):  # noqa: PTH112 (False in a private folder)
        start = "suite file" if suite else "current folder"
        raise OperatorError(
            f"{where(('include_path',))}: no folder {path} (paths are relative to the {start})"
        )
    return str(path)


def _refuse_twins(tasks: Sequence[TaskEntry], where: toml.Where) -> None:
    """Refuse two entries, or an entry and a group, of one name: results are keyed by name, so one would overwrite the other."""
    seen: set[str] = set()
    for index, task in enumerate(tasks):
        if task.name in seen:
            raise OperatorError(
                f"{where(('task', index, 'name'))}: task {task.name!r} is listed twice; put the second into a suite of its own"
            )
        seen.add(task.name)
    for index, task in enumerate(tasks):
        if task.group in seen:
            raise OperatorError(
                f"{where(('task', index, 'group'))}: {task.group!r} is also a task of this suite: rename the group"
            )
