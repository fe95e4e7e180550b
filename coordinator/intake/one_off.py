"""The suite that an evaluation's options name: a suite as it is, a suite with other settings, or tasks without a file.

Rule: tasks become the very `SuiteSpec` that a file with the same values gives. So ids, reuse and resume hold, and the
same options mean the same evaluation. `as_toml` writes such a file, for a submission. Called by `coordinator.api`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from coordinator.config import toml
from coordinator.errors import OperatorError
from coordinator.intake import suites
from evaljobs.contract.paths import slug
from evaljobs.contract.specs import Mode, Record, SuiteSpec, TaskEntry
from evaljobs.lmeval.task_yaml import index_of

MOST_NAME = 40  # characters of the tasks' part of a suite's name
HIDDEN = (
    "token_budget",
    "seed",
    "apply_chat_template",
    "system_instruction",
    "fewshot_as_multiturn",
)  # see _suffix
PATTERN = "*?["  # characters of a pattern of task names
CHOOSE = "say --suite NAME or --tasks NAME,NAME, or set [watch] suite in evalspan.toml"


PathLike = str | Path


class SuiteSettings(TypedDict, total=False):
    """Settings of a suite that a call may replace; each has the meaning that it has in a suite file."""

    limit: float | None  # documents of each task, or a share below 1
    num_fewshot: int | None  # examples in each prompt
    batch_size: int | str | None  # a number, or "auto"
    gen_kwargs: Mapping[str, Any] | None  # generation settings of each task
    include_path: Sequence[PathLike] | PathLike  # folders of task YAMLs, from the current folder
    apply_chat_template: bool | str | None  # True, or a template's name
    system_instruction: str | None  # system message of each prompt
    fewshot_as_multiturn: bool | None  # few-shot examples as turns of the conversation
    seed: int | None  # one seed for all generators
    mode: Mode | None  # "exact" or "fast"
    token_budget: int | str | None  # tokens of a forward pass in fast mode, or "auto"


class SuiteOptions(Record):
    """What the options of a command, or the arguments of a call, say of the suite. None: not said.

    `limit`: documents of each task, or a share below 1. `batch_size`, `token_budget`: a number, or
    "auto". The fields from `mode` on mean what they mean in a suite file.
    """

    suite: str | None = None  # name or file
    tasks: tuple[str, ...] = ()  # lm-eval tasks, groups, tags, or YAML files, in place of `suite`
    limit: int | float | None = None
    num_fewshot: int | None = None
    gen_kwargs: dict[str, Any] | None = None
    batch_size: int | str | None = None
    token_budget: int | str | None = None
    mode: Mode | None = None
    include_path: tuple[str, ...] = ()
    seed: int | None = None
    apply_chat_template: bool | str | None = None
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None

    @property
    def folders(self) -> list[str]:
        """Full paths of the folders of task YAMLs."""
        return [str(Path(folder).expanduser().resolve()) for folder in self.include_path]

    @property
    def changed(self) -> bool:
        """Is it more than the name or file of a suite?"""
        return bool(self.model_dump(exclude={"suite"}, exclude_defaults=True))

    def words(self) -> list[str]:
        """Options of the command line that mean the same."""
        words = []
        for field, value in self.model_dump(exclude_defaults=True).items():
            option = f"--{field.replace('_', '-')}"
            match value:
                case True:
                    words += [option]
                case dict():
                    words += [option, json.dumps(value)]
                case tuple() if field == "include_path":
                    words += [word for each in value for word in (option, each)]
                case tuple():
                    words += [option, ",".join(value)]
                case False:
                    words += [f"{option}=false"]
                case float():
                    words += [option, number(value)]
                case _:
                    words += [option, str(value)]
        return words


def suite_options(
    suite: PathLike | SuiteOptions | None, tasks: Sequence[str] | str, more: SuiteSettings
) -> SuiteOptions:
    """Arguments of a call as options. `tasks`: names, or "a,b". OperatorError names an argument of another type."""
    if isinstance(suite, SuiteOptions):
        if tasks or any(value is not None for value in more.values()):
            raise OperatorError(
                "suite: a SuiteOptions holds the other settings of the suite: put them into it"
            )
        return suite
    folders = more.get("include_path", ())
    data = {
        **more,
        "suite": None if suite is None else str(suite),
        "tasks": tuple(tasks.split(",") if isinstance(tasks, str) else tasks) if tasks else (),
        "include_path": tuple(map(str, [folders] if isinstance(folders, PathLike) else folders)),
    }
    try:
        return SuiteOptions.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            known = [*SuiteOptions.model_fields]
            raise OperatorError(
                f"no argument {first['loc'][0]!r}; {toml.did_you_mean(str(first['loc'][0]), known)}"
            ) from error
        raise OperatorError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from error


def suite_of(options: SuiteOptions, default: str | None = None) -> SuiteSpec:
    """The suite that `options` name; `default`: where they name none. OperatorError in one line."""
    if options.tasks and options.suite is not None:
        raise OperatorError(
            "--tasks names tasks of lm-eval and --suite a suite of them: give one of the two, "
            "or list the tasks in a suite file"
        )
    if options.tasks:
        return _with(_of_tasks(options), options)
    named = options.suite if options.suite is not None else default
    if named is None:
        raise OperatorError(f"no suite and no tasks are named: {CHOOSE}")
    suite = suites.load_suite(named)
    return _with(suite.model_dump(mode="json", exclude_none=True), options) if options.changed else suite


def _of_tasks(options: SuiteOptions) -> dict[str, Any]:
    """A suite of the tasks that sets nothing else, as a `SuiteSpec` is dumped."""
    folders: list[str] = []
    tasks: list[dict[str, Any]] = []
    shipped, own = _shipped(), index_of(options.folders)
    names = list(dict.fromkeys(map(_checked_name, options.tasks)))
    for name in names:
        known = None if name in own else shipped.get(name)
        if known is not None:
            new = (f for f in known[0].include_path if f not in (*folders, *options.folders))
            folders = [*new, *folders]
        tasks.append({"name": name, **({"judge": True} if known is not None and known[1].judge else {})})
    data = {"name": _name_of(options.tasks), "include_path": folders, "tasks": tasks}
    return data | {"apply_chat_template": False}


def _with(suite: dict[str, Any], options: SuiteOptions) -> SuiteSpec:
    """`suite`, as a `SuiteSpec` is dumped, with the settings that `options` say."""
    data = suite | _of_a_suite(options)
    if options.mode == "exact" and options.token_budget is None:
        data.pop("token_budget", None)  # of the suite's fast mode
    data["task"] = [task | _of_a_task(options) for task in data.pop("tasks")]
    # of two definitions the later folder's counts
    data["include_path"] = [*suite["include_path"], *options.folders]
    data["name"] += _suffix(options, suite)
    return suites.checked(data, _option, None)


def _checked_name(text: str) -> str:
    """A task's name, or the full path of a YAML file."""
    if text.endswith((".yaml", ".yml")):
        path = Path(text).expanduser().resolve()
        if not path.is_file():
            raise OperatorError(f"--tasks: no file {path}")
        return str(path)
    if any(char in text for char in PATTERN):
        raise OperatorError(
            f"--tasks: {text!r} is a pattern: name each task or group (`evalspan ls tasks {text!r}` lists them)"
        )
    if not text:
        raise OperatorError("--tasks: a name is empty; names are separated by one comma")
    return text


def _shipped() -> dict[str, tuple[SuiteSpec, TaskEntry]]:
    """Task of evalspan's own -> the shipped suite that has its folder, and its entry there."""
    loaded = [suite for suite in map(suites.load_suite, suites.names()) if suite.include_path]
    return {task.name: (suite, task) for suite in loaded for task in suite.tasks}


def _of_a_task(options: SuiteOptions) -> dict[str, Any]:
    limit = options.limit
    if limit is not None and limit >= 1 and float(limit).is_integer():
        limit = int(limit)  # lm_eval reads `--limit 10` as 10.0
    elif limit is not None and not 0 < limit < 1:
        raise OperatorError(f"--limit is a number of documents, or a share below 1, not {limit:g}")
    said = {"limit": limit, "num_fewshot": options.num_fewshot, "gen_kwargs": options.gen_kwargs}
    return {key: value for key, value in said.items() if value is not None}


def _of_a_suite(options: SuiteOptions) -> dict[str, Any]:
    fields = {"mode", "seed", "apply_chat_template", "system_instruction", "fewshot_as_multiturn"}
    said = options.model_dump(include=fields, exclude_none=True)
    for field in ("batch_size", "token_budget"):
        if (value := getattr(options, field)) is not None:
            said[field] = _count(str(value), field)
    return said


def _count(text: str, field: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) == 0:
        raise OperatorError(f'--{field.replace("_", "-")} is a positive number or "auto", not {text!r}')
    return int(text)


def _option(location: toml.Location) -> str:
    """The option that set a value of the suite."""
    named = [str(part) for part in location if not isinstance(part, int)]
    if named[:2] in ([], ["task"], ["task", "name"]):
        return "--tasks"
    return f"--{(named[1] if named[0] == 'task' else named[0]).replace('_', '-')}"


def _name_of(tasks: Sequence[str]) -> str:
    """The name of a suite of tasks: readable, at most about 60 characters."""
    names = [Path(n).stem if n.endswith((".yaml", ".yml")) else n for n in dict.fromkeys(tasks)]
    text, shown = names[0][:MOST_NAME], 1
    while shown < len(names) and len(text) + 1 + len(names[shown]) <= MOST_NAME:
        text, shown = f"{text}-{names[shown]}", shown + 1
    return slug(f"{text}-and-{len(names) - shown}-more" if shown < len(names) else text)


def _suffix(options: SuiteOptions, before: Mapping[str, Any]) -> str:
    """What sets the scores of these options apart from those of the suite `before`, in a name.

    A digest stands for the settings that have no word of their own.
    """
    settings, more = _of_a_task(options), _of_a_suite(options)
    limit = f"-limit{number(settings['limit'])}" if "limit" in settings else ""
    shots = f"-{options.num_fewshot}shot" if options.num_fewshot is not None else ""
    hidden = {key: more[key] for key in HIDDEN if key in more and more[key] != before.get(key)}
    if hidden.get("apply_chat_template") is True:  # "-chat" says it
        del hidden["apply_chat_template"]
    chosen = options.gen_kwargs
    if chosen is not None and any(task.get("gen_kwargs") != chosen for task in before["tasks"]):
        hidden["gen_kwargs"] = chosen
    if options.include_path and not options.tasks:
        hidden["include_path"] = options.folders
    digest = hashlib.sha256(json.dumps(hidden, sort_keys=True).encode()).hexdigest()[:6]
    mode = f"-{options.mode}" if (options.mode or "exact") != (before.get("mode") or "exact") else ""
    chat = "-chat" if options.apply_chat_template else ""
    return f"{limit}{shots}{mode}{chat}{f'-{digest}' if hidden else ''}"


def number(value: float) -> str:
    """All digits of a number; a whole one without a point."""
    return str(int(value)) if float(value).is_integer() else str(value)


# --- the suite as a file ---------------------------------------------------------------------------------------------


def file_name(suite: SuiteSpec) -> str:
    """A name of its file that the content decides."""
    digest = hashlib.sha256(suite.model_dump_json().encode()).hexdigest()[:8]
    return f"{slug(suite.name)}-{digest}.toml"


def as_toml(suite: SuiteSpec) -> str:
    """A suite file that loads as this suite. OperatorError for a value that TOML cannot hold."""
    data = suite.model_dump(mode="json", exclude_none=True)
    tasks = data.pop("tasks")
    lines = [*_lines(data)]
    for task in tasks:
        lines += ["", "[[task]]", *_lines(task)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{key} = {toml.as_toml(value)}"
