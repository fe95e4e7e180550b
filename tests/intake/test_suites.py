"""Laws of suites: what is shipped loads, what is wrong is refused with its line."""

import json
from pathlib import Path

import pytest

from coordinator.intake import suites


@pytest.fixture
def suite_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", suites.names())
def test_every_shipped_suite_loads(name):
    """A shipped suite is valid, named like its file, and its folders are there."""
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.tasks
    assert all(Path(folder).is_dir() and Path(folder).is_absolute() for folder in suite.include_path)


def test_a_file_says_all_that_a_suite_has(suite_file, tmp_path):
    """Every key arrives; include_path is relative to the file, from whatever folder it is read."""
    (tmp_path / "tasks").mkdir()
    path = suite_file(
        'name = "mine"\ninclude_path = ["tasks"]\nbatch_size = "auto"\nseed = 7\napply_chat_template = true\n'
        'system_instruction = "Be brief."\nfewshot_as_multiturn = false\n'
        '[[task]]\nname = "a"\nnum_fewshot = 5\nlimit = 0.5\n[[task]]\nname = "b"\nlimit = 10\n'
        "gen_kwargs = { max_gen_toks = 8, until = ['x'] }\n"
    )
    suite = suites.load_suite(path)
    assert suite.include_path == (str(tmp_path / "tasks"),)
    assert (suite.batch_size, suite.seed, suite.apply_chat_template) == ("auto", 7, True)
    assert (suite.system_instruction, suite.fewshot_as_multiturn) == ("Be brief.", False)
    assert [(t.name, t.num_fewshot, t.limit) for t in suite.tasks] == [("a", 5, 0.5), ("b", None, 10)]
    assert suite.tasks[1].gen_kwargs == {"max_gen_toks": 8, "until": ["x"]}


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
