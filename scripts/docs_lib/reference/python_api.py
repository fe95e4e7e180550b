"""docs/reference/python.md: functions and records of `import evalspan`, from their signatures, docstrings and comments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from docs_lib.reference.text import code, field_notes, first_upper, page, plain, table
from pydantic import BaseModel

import evalspan
from coordinator import hook
from coordinator.errors import BugError, RetryError
from coordinator.intake.one_off import SuiteSettings
from coordinator.report.learning_curves import ScoreValue

INTRO = """Functions and records of `import evalspan`. How to use them, with examples: [evalspan from Python](../evaluating/python.md)
and [the training hook](../training/hook.md)."""


def python_page() -> str:
    names = [name for name in evalspan.__all__ if inspect.isfunction(getattr(evalspan, name))]
    of_hook = [name for name in names if getattr(evalspan, name).__module__ == hook.__name__]
    calls = [name for name in names if name not in of_hook]
    records = [evalspan.Results, ScoreValue, evalspan.Submission, evalspan.Progress, SuiteSettings]
    errors = [evalspan.EvalspanError, evalspan.OperatorError, RetryError, BugError]
    parts = ["## Functions for evaluations", "They need the packages of evalspan."]
    for name in calls:
        parts += _function(name)
    parts += ["## Functions for training scripts", "They need the standard library alone."]
    for name in of_hook:
        parts += _function(name)
    parts.append("## Records")
    for record in records:
        parts += _record(record)
    parts += ["## Errors", table(["error", "meaning"], [[_of(e), plain(e.__doc__ or "")] for e in errors])]
    return page("Python", INTRO, *parts)


def _of(error: type[Exception]) -> str:
    public = error.__name__ in evalspan.__all__
    base = error.__bases__[0].__name__
    return code(f"{'evalspan.' if public else ''}{error.__name__}({base})")


def _function(name: str) -> Iterator[str]:
    function: Callable[..., Any] = getattr(evalspan, name)
    signature = inspect.signature(function)
    yield f"### `evalspan.{name}`"
    yield f"Returns {code(str(signature.return_annotation))}."
    yield plain(function.__doc__ or "")
    rows = []
    for each in signature.parameters.values():
        rest = each.kind is each.VAR_KEYWORD
        by = {each.KEYWORD_ONLY: "by name", each.VAR_KEYWORD: "by name"}.get(each.kind, "by place or name")
        default = "" if rest else "must be given" if each.default is each.empty else code(repr(each.default))
        rows.append([code(f"**{each.name}" if rest else each.name), code(str(each.annotation)), default, by])
    yield table(["argument", "type", "default", "given"], rows)


def _record(record: type) -> Iterator[str]:
    public = "evalspan." if record.__name__ in evalspan.__all__ else ""
    yield f"### `{public}{record.__name__}`"
    yield plain(record.__doc__ or "")
    notes = field_notes(record)
    rows = [
        [code(name), code(getattr(kind, "__forward_arg__", kind)), plain(first_upper(notes.get(name, "")))]
        for name, kind in inspect.get_annotations(record).items()
        if name != "model_config" and not name.startswith("_")
    ]
    yield table(["field", "type", "meaning"], rows)
    yield (
        table(["method or property", "what it is"], _members(record)) if issubclass(record, BaseModel) else ""
    )


def _members(record: type) -> list[list[str]]:
    """Its own properties and methods that have a docstring."""
    found = []
    for name, value in vars(record).items():
        wrapped = value.fget if isinstance(value, property) else value
        if not name.startswith(("_", "model_")) and inspect.isfunction(wrapped) and wrapped.__doc__:
            called = name if isinstance(value, property) else f"{name}()"
            found.append([code(called), plain(wrapped.__doc__)])
    return found
