"""behaviours.csv: what a user loses if a test function's law breaks; no behaviour goes without a word. A golden changes by a decision
alone."""

import ast
import csv
import re
import subprocess

import pytest
from support.goldens import HERE

TESTS = HERE.parent


def functions(file):
    """Test functions of a file, methods as Class::function, a state machine's TestCase by its name."""
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef():
                yield from (f"{node.name}::{m.name}" for m in node.body if isinstance(m, ast.FunctionDef))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_each_behaviour_is_held_by_a_test_or_dropped_by_a_decision():
    """`now`: empty while the row's own test is there; else "held by PATH::FUNCTION" or "dropped: decision N"."""
    with (HERE / "behaviours.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    files = (*TESTS.rglob("test_*.py"), TESTS / "support" / "fixtures.py")  # a fixture looks at what is left
    there = {f"{f.relative_to(TESTS)}::{name}" for f in files for name in functions(f)}
    lost = [
        row
        for row in rows
        if (row["now"].removeprefix("held by ") if row["now"] else row["test"]) not in there
        and not re.match(r"dropped: (decision \d+|docs/decisions\.md, .)", row["now"])
    ]
    assert lost == []
    assert [row["test"] for row in rows] == sorted({row["test"] for row in rows})
    assert all(row["loss"] for row in rows)


def test_each_commit_that_changes_a_golden_names_a_decision():
    """A person who reads the history finds why a score, a field, a job or an exit code is another one."""
    words = ["git", "log", "--diff-filter=MD", "--format=%h %B%x00", "--", "*.json", "*/*.csv", ":!texts"]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone: the history is not here")
    unnamed = [
        m
        for m in done.stdout.split("\0")
        if m.strip() and not re.search(r"\bdecision \d|docs/decisions\.md, .", m, re.IGNORECASE)
    ]
    assert unnamed == []
