"""Loads suites by name or file: TOML to a SuiteSpec.

Rule: a suite file is read strictly; paths in it are relative to the file. Shipped suites are in
`evaljobs/suites`, since jobs on nodes read their tasks and data. `validate` checks that lm-eval has
the tasks.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.config import toml
from coordinator.errors import OperatorError
from coordinator.evaluation.records import TOKEN_BUDGET
from evaljobs.contract.specs import Mode, Record, SuiteSpec, TaskEntry

FAST_ENGINES = ("hf", "hf-auto", "huggingface")  # lm-eval's names of its transformers class
# a name stands in lists, logs and file names; control characters command a terminal
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
BUDGET_IS_FAST = 'only mode = "fast" has a token budget: leave token_budget away, or set that mode'


class _Task(TaskEntry):
    """A task as written: `limit` is a number of documents, or a share below 1 (as in lm-eval)."""

    name: Name
    num_fewshot: Count | None = None
    limit: Positive | Share | None = None
    batch_size: Positive | None = None
    group: Name | None = None


class _SuiteFile(Record):
    """Keys of a suite file."""

    name: Name
    include_path: tuple[str, ...] = ()  # folders of task YAMLs, relative to the suite file
    batch_size: Positive | Literal["auto"] = 1
    seed: int | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    mode: Mode | None = None
    token_budget: Positive | Literal["auto"] | None = None
    # [[task]], one or more, in the order of reports
    task: Annotated[tuple[_Task, ...], Field(min_length=1)]


def folder() -> Path:
    return Path(str(resources.files("evaljobs"))) / "suites"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def load_suite(name_or_file: str | Path) -> SuiteSpec:
    """The suite of that name, or in that file (a name with a slash, or ending in ".toml").

    `include_path` comes back absolute. OperatorError: no such suite (with the nearest names), no
    such file or folder, or a wrong key or value (with its line).
    """
    path = _find(str(name_or_file))
    data, text = toml.read(path)
    return checked(data, toml.in_file(path, text), path)


def checked(data: Mapping[str, Any], where: toml.Where, path: Path | None) -> SuiteSpec:
    """The suite of a suite file's values. `path`: the file that its relative paths start from; None: the current folder."""
    suite = toml.check(_SuiteFile, data, where)
    _refuse_twins(suite, where)
    if suite.fewshot_as_multiturn and suite.apply_chat_template is False:  # as lm_eval refuses it
        raise OperatorError(
            f"{where(('fewshot_as_multiturn',))}: few-shot examples become turns by a chat template alone: set apply_chat_template"
        )
    if suite.token_budget is not None and suite.mode == "exact":
        raise OperatorError(f"{where(('token_budget',))}: {BUDGET_IS_FAST}")
    if suite.token_budget == "auto" and suite.batch_size != "auto":  # noqa: S105 (no password)
        raise OperatorError(
            f'{where(("token_budget",))}: "auto" is found together with the batch size: '
            'set batch_size = "auto", too, or token_budget to a number'
        )
    return SuiteSpec(
        **suite.model_dump(exclude={"include_path", "task"}),
        include_path=tuple(_folder(part, path, where) for part in suite.include_path),
        tasks=tuple(TaskEntry(**task.model_dump()) for task in suite.task),
    )


def settled(suite: SuiteSpec, mode: Mode, engine: str) -> SuiteSpec:
    """The suite as an evaluation runs it: in its own mode, else `mode` of the settings.

    Mode None is "exact" from here on, so that the ids of exact evaluations are those of before
    there were modes. OperatorError where the engine, or a setting of the suite, does not go with it.
    """
    chosen = suite.mode or mode
    if chosen == "exact":
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
        path = Path(text).expanduser()
        if not os.path.isfile(path):  # noqa: PTH113 (False in a private folder)
            raise OperatorError(f"no suite file {text}: give a TOML file, or one of {', '.join(names())}")
        return path.resolve()
    shipped = folder() / f"{text}.toml"
    if text and shipped.is_file():
        return shipped
    near = difflib.get_close_matches(text, names(), n=3, cutoff=0.6)
    known = f"nearest: {', '.join(near)}" if near else f"shipped: {', '.join(names())}"
    raise OperatorError(
        f"no suite named {text!r} ({known}); a suite of your own is a file: --suite ./{text or 'my'}.toml"
    )


def _folder(part: str, suite: Path | None, where: toml.Where) -> str:
    path = ((suite.parent if suite else Path.cwd()) / Path(part).expanduser()).resolve()
    if not os.path.isdir(path):  # noqa: PTH112 (False in a private folder)
        start = "suite file" if suite else "current folder"
        raise OperatorError(
            f"{where(('include_path',))}: no folder {path} (paths are relative to the {start})"
        )
    return str(path)


def _refuse_twins(suite: _SuiteFile, where: toml.Where) -> None:
    """Refuse two entries, or an entry and a group, of one name: results are keyed by name, so the second would overwrite."""
    seen: set[str] = set()
    for index, task in enumerate(suite.task):
        if task.name in seen:
            raise OperatorError(
                f"{where(('task', index, 'name'))}: task {task.name!r} stands twice; put the second into a suite of its own"
            )
        seen.add(task.name)
    for index, task in enumerate(suite.task):
        if task.group in seen:
            raise OperatorError(
                f"{where(('task', index, 'group'))}: {task.group!r} is a task of this suite, too: rename the group"
            )
