"""Laws of docs/reference: each page is what the code says now, and nothing in it lacks a description."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer
from docs_lib.reference import FOLDER, PAGES, stale
from docs_lib.reference.exits import script_codes
from docs_lib.reference.files import entries
from support.toys import config_text, suite_text

import evalspan
from coordinator.cli import EVERY, GROUPS, MORE, app
from coordinator.config.schema import settings
from coordinator.config.template import text_of
from evaljobs.contract.paths import WorkPaths

ROOT = Path(__file__).resolve().parents[2]


def test_each_page_of_the_reference_is_what_the_code_says():
    assert stale() == [], "`scripts/docs reference` writes these pages again"


@pytest.mark.parametrize("name", PAGES)
def test_each_row_of_the_reference_says_what_it_means(name):
    """The last cell of a table, which holds the meaning, is empty nowhere."""
    rows = [line for line in (FOLDER / name).read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if re.search(r"\|\s+\|$", row)] == []


@pytest.mark.parametrize("name", PAGES)
def test_no_code_in_a_table_has_a_bar(name):
    """A forge takes the escape before it away, the site shows it."""
    rows = [line for line in (FOLDER / name).read_text().splitlines() if line.startswith("|")]
    assert [code for row in rows for code in re.findall(r"`[^`]*`", row) if "|" in code] == []


def test_each_setting_has_a_text():
    assert [location for location, _ in settings() if not text_of(location)] == []


def test_each_command_ends_with_a_code_that_the_reference_knows():
    """No command exits with a bare number: the codes and their meanings stand in one place."""
    bare = []
    for file in (ROOT / "coordinator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.Exit", "sys.exit"}:
                bare += [
                    f"{file}:{node.lineno}"
                    for each in node.args
                    if isinstance(each, ast.Constant) and each.value
                ]
    assert bare == []
    assert set(MORE) <= {name for names in GROUPS.values() for name in names}
    assert len(EVERY) == len(set(EVERY))


def test_each_script_that_users_start_says_its_exit_codes():
    assert script_codes().get("", []) == []


def test_each_command_and_option_has_a_help_text():
    root = typer.main.get_command(app)
    silent = []
    for name, command in root.commands.items():
        for each in (command, *getattr(command, "commands", {}).values()):
            silent += [f"{name} {p.name}" for p in each.params if not p.help and p.name != "help"]
            silent += [] if each.help else [name]
    assert silent == []


def test_each_path_of_a_work_folder_is_in_the_page_of_files():
    """A file that two processes agree on is an entry, and a folder holds one."""
    work = WorkPaths("work")
    places = [*vars(work).values(), *vars(work.evaluation("ID")).values()]
    known = entries()
    starts = [each.pattern.replace("WORK_DIR", "work") for each in known]
    assert [
        str(place)
        for place in places
        if not any(each.matches(str(place)) for each in known)
        and not any(start.startswith(f"{place}/") for start in starts)
    ] == []


@pytest.mark.model
def test_each_file_of_a_real_evaluation_is_in_the_page_of_files(toy_model, tmp_path):
    """Also those that a command leaves and a running daemon would have taken."""
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    config, suite = tmp_path / "evalspan.toml", tmp_path / "suite.toml"
    suite.write_text(suite_text("toys", {"toy_choice": {"limit": 4}, "toy_programs": {"limit": 2}}))
    evalspan.evaluate(toy_model, suite, limit=4, config=config)
    evalspan.submit(toy_model, suite, limit=2, config=config)
    evalspan.notify(toy_model, 1, work_dir=tmp_path / "work")
    assert evalspan.flush()
    files = [file for file in (tmp_path / "work").rglob("*") if not file.is_dir()]
    names = [file.relative_to(tmp_path).as_posix() for file in files]
    known = entries()
    assert len({each.pattern for each in known for name in names if each.matches(name)}) > 20
    assert [name for name in names if not any(each.matches(name) for each in known)] == []
