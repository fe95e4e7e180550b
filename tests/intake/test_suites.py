"""Laws of suites: what is shipped loads, what is wrong is refused with its line."""

import json
from pathlib import Path

import pytest

from coordinator.errors import OperatorError
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "s"\n[[task]]\nname = "a"\n[[task]]\nname = "b"\nlimt = 3\n', "line 6: [[task]] 2 has no key 'limt'"),
        ('name = "s"\ntasks = ["a"]\n', "line 2: the file has no key 'tasks'; did you mean 'task'?"),
        ('name = "s"\n[[task]]\nlimit = 3\n', "line 2: [[task]] 1 needs the key 'name'"),
        ('name = "s"\nbatch_size = 0\n[[task]]\nname = "a"\n', "line 2: 'batch_size' of the file"),
        ('name = "s"\nbatch_size = "big"\n[[task]]\nname = "a"\n', "or 'auto', not \"big\""),
        ('name = "s"\n[[task]]\nname = "a"\nlimit = 1.5\n', "line 4: 'limit' of [[task]] 1"),
        ('name = "s"\n[[task]]\nname = "a"\n[[task]]\nname = "a"\n', "line 5: task 'a' stands twice"),
        ('name = "s"\ninclude_path = ["no"]\n[[task]]\nname = "a"\n', "line 2: no folder"),
        ('name = "s"\nfewshot_as_multiturn = true\n[[task]]\nname = "a"\n', "line 2: few-shot examples become turns"),
        ('name = "s"\n', "needs the key 'task'"),
    ],
)  # fmt: skip
def test_a_wrong_suite_names_line_and_key(suite_file, text, says):
    """One line: file, line, key, and what to write instead."""
    path = suite_file(text)
    with pytest.raises(OperatorError) as caught:
        suites.load_suite(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_all_wrong_keys_of_a_file_are_named(suite_file):
    """One is explained; the others are named, and a list is not blamed for its member."""
    path = suite_file('nam = "s"\n[[task]]\nname = "a"\nlimit = -1\nshots = 3\n')
    with pytest.raises(OperatorError, match=r"no key 'shots'.* \(also wrong: 'name', 'limit', 'nam'\)$"):
        suites.load_suite(path)


def test_an_unknown_suite_names_the_nearest():
    """A typing error is answered with the nearest name."""
    with pytest.raises(OperatorError, match=r"no suite named 'quikstart' \(nearest: quickstart\)"):
        suites.load_suite("quikstart")
    with pytest.raises(OperatorError, match=r"no suite named 'nosuch' \(shipped: code, core, "):
        suites.load_suite("nosuch")
    with pytest.raises(OperatorError, match=r"no suite file \./none\.toml"):
        suites.load_suite("./none.toml")


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
