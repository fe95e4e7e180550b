"""Task lists of lighteval and of inspect_evals as a suite of lm-eval's tasks, by the table `foreign_tasks.toml`.

Rule: a task maps where lm-eval has one task or group on the same data set; prompts and metrics are lm-eval's, so scores are not
those of the other tool. What has no equal is named, never passed over. Called from: `evalspan import-tasks`.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".toml")
INSPECT = "inspect_evals/"  # begins a task's name in inspect


@dataclass(slots=True)
class TaskList:
    """What a list names: entries of a suite, and lines that have no equal."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def read_task_list(text: str) -> TaskList:
    """Read a list with a task a line, or several between commas.

    lighteval writes `SUITE|TASK|SHOTS`, `TASK|SHOTS` or `TASK`; inspect writes `inspect_evals/TASK`.
    """
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    lines = (line.partition("#")[0] for line in text.splitlines())
    found = TaskList()
    for typed in (word.strip() for line in lines for word in line.split(",")):
        if not typed:
            continue
        entry = _inspect_task(typed, table) if typed.startswith(INSPECT) else _lighteval_task(typed, table)
        if entry is None:
            found.unknown.append(typed)
        elif entry not in found.tasks:
            found.tasks.append(entry)
    return found


def _inspect_task(typed: str, table: dict[str, Any]) -> dict[str, Any] | None:
    known = table["inspect_evals"].get(typed.removeprefix(INSPECT))
    if isinstance(known, dict):
        return {"name": known["task"], "num_fewshot": known["num_fewshot"]}
    return None if known is None else {"name": known}


def _lighteval_task(typed: str, table: dict[str, Any]) -> dict[str, Any] | None:
    """Its examples are those that the line says; lighteval's default is none."""
    parts = typed.split("|")
    name, shots = parts if len(parts) == 2 else (parts[1], parts[2]) if len(parts) > 2 else (typed, "0")
    group, _, subset = name.partition(":")
    known = table["lighteval"].get(name) or table["lighteval"].get(f"{group}:*", "").replace("*", subset)
    return {"name": known, "num_fewshot": int(shots)} if known and shots.isdecimal() else None


def suite_text(name: str, tasks: list[dict[str, Any]]) -> str:
    """Return the text of a suite file."""
    rows = [
        "\n[[task]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in task.items())
        for task in tasks
    ]
    return f"name = {json.dumps(name)}\n{''.join(rows)}"
