"""docs/reference/exit-codes.md: codes of the commands from `ExitCode`, those of scripts from the comments at their heads."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from docs_lib.reference.text import ROOT, code, field_notes, first_upper, page, plain, table

from coordinator.cli import EVERY, GROUPS, MORE
from coordinator.errors import ExitCode

INTRO = """What a command of evalspan ends with, and what to do then. A message on standard error stands beside each code but
0."""
SHARED = "_python.sh"  # runs the commands that say no codes of their own


def exits_page() -> str:
    notes = field_notes(ExitCode)
    rows = []
    for each in ExitCode:
        meaning, _, remedy = notes[each.name].rpartition(" | ")
        commands = [f"`{name}`" for names in GROUPS.values() for name in names if each in MORE.get(name, {})]
        rows.append(
            [
                str(int(each)),
                plain(first_upper(meaning)),
                plain(first_upper(remedy)),
                "each" if each in EVERY else ", ".join(commands),
            ]
        )
    own = [
        [code(name), str(int(each)), plain(first_upper(said))]
        for name, codes in MORE.items()
        for each, said in codes.items()
    ]
    scripts = [
        [", ".join(map(code, names)), plain(first_upper(said))] for said, names in script_codes().items()
    ]
    return page(
        "Exit codes",
        INTRO,
        "## Exit codes of `evalspan`",
        table(["exit code", "meaning", "what to do", "commands"], rows),
        "## What an exit code means for one command",
        table(["command", "exit code", "meaning"], own),
        "## Exit codes of scripts",
        table(["script", "exit codes"], scripts),
    )


def script_codes() -> dict[str, list[str]]:
    """Exit codes in words -> the scripts that have them; those that run a module share theirs."""
    said: dict[str, list[str]] = {}
    of_modules = _codes(ROOT / "scripts" / SHARED)
    for file in sorted((ROOT / "scripts").iterdir()):
        if file.is_file() and file.suffix != ".py" and not file.name.startswith("_"):
            text = _codes(file) or (of_modules if f"/{SHARED}" in file.read_text(encoding="utf-8") else "")
            said.setdefault(text, []).append(f"scripts/{file.name}")
    return said


def _codes(script: Path) -> str:
    """What follows "Exit codes:" in the script's head comment, or in its docstring."""
    text = script.read_text(encoding="utf-8")
    if re.match(r"#!.*python", text):
        head = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = itertools.takewhile(
            lambda line: line.startswith("#") and not line.startswith("#SBATCH"), text.splitlines()
        )
        head = "\n".join(re.sub("^#!?/?", "", line) for line in lines)
    return " ".join(head.partition("Exit codes:")[2].split())
