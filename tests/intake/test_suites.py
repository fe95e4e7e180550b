"""Laws of suites: what is shipped loads, what is wrong is refused with its line."""

import json
from pathlib import Path

import pytest

from coordinator.intake import suites


@pytest.mark.parametrize("name", suites.names())
def test_every_shipped_suite_loads(name):
    """A shipped suite is valid, named like its file, and its folders are there."""
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.tasks
    assert all(Path(folder).is_dir() and Path(folder).is_absolute() for folder in suite.include_path)


def test_include_path_is_relative_to_the_suite_file(tmp_path):
    """From whatever folder it is read."""
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ninclude_path = ["tasks"]\n[[task]]\nname = "a"\nlimit = 0.5\n')
    assert suites.load_suite(path).include_path == (str(tmp_path / "tasks"),)


def test_quickstart_data_are_small_excerpts_with_their_notices():
    """At most 200 rows of a set, limits within the rows, and each set's licence text."""
    suite = suites.load_suite("quickstart")
    folder = Path(suite.include_path[0])
    notice = (folder / "NOTICE").read_text()
    for task in suite.tasks:
        rows = (folder / "data" / f"{task.name.removeprefix('quickstart_')}.jsonl").read_text().splitlines()
        assert all(json.loads(row) for row in rows)
        assert task.limit is not None
        assert task.limit <= len(rows) <= 200
        assert f"{task.name.removeprefix('quickstart_')}.jsonl" in notice
    assert notice.count("MIT License") == len(suite.tasks)
