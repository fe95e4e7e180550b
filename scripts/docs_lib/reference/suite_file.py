"""docs/reference/suite-file.md: each key of a suite file, from the records that read it."""

from __future__ import annotations

from collections.abc import Mapping

from docs_lib.reference.settings import words
from docs_lib.reference.text import code, field_notes, first_upper, literal, page, plain, table

from coordinator.intake import suites
from evaljobs.contract.specs import Record, SuiteSpec

INTRO = """Each key of a suite file, as `--suite FILE` and `[watch] suites` take it. How to write one, with examples:
[suites and tasks](../evaluating/suites.md#write-a-suite-file). A key that is not named here is refused with its line."""


def suite_page() -> str:
    task = suites._Task  # noqa: SLF001 (what a file may hold, with its bounds, is defined there alone)
    file = suites._SuiteFile  # noqa: SLF001
    return page(
        "Suite file",
        INTRO,
        "## Keys of the suite",
        _table(file, field_notes(SuiteSpec) | field_notes(file)),
        "## Keys of a `[[task]]`",
        _table(task, field_notes(task)),
        "## Suites that are shipped",
        table(["suite", "tasks"], [[code(name), _tasks(name)] for name in suites.names()]),
    )


def _table(model: type[Record], notes: Mapping[str, str]) -> str:
    shapes = model.model_json_schema()
    rows = []
    for name, shape in shapes["properties"].items():
        text, _, without = notes[name].partition("; None: ")
        if name in shapes.get("required", ()):
            default = "must be given"
        else:
            default = literal(shape.get("default")) or plain(without) or "none"
        kind = "tables" if name == "task" else words(shape, shapes.get("$defs", {}))
        rows.append([code(name), kind, default, plain(first_upper(text)) + "."])
    return table(["key", "type", "default", "meaning"], rows)


def _tasks(suite: str) -> str:
    return ", ".join(code(task.name) for task in suites.load_suite(suite).tasks)
