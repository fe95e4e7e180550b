"""Laws of suites: what is shipped loads, and runs without a suite file are what a file with the same values is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import api
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.intake import one_off, suites
from coordinator.intake.one_off import SuiteOptions, suite_options
from coordinator.intake.validate import passed_over
from evaljobs.contract.specs import SuiteSpec, TaskEntry

FILE = """
name = "hellaswag-arc_easy-limit10-5shot"
batch_size = 8
seed = 7
apply_chat_template = true
system_instruction = "Answer."
[[task]]
name = "hellaswag"
num_fewshot = 5
limit = 10
gen_kwargs = { temperature = 0.5, until = ["x"] }
[[task]]
name = "arc_easy"
num_fewshot = 5
limit = 10
gen_kwargs = { temperature = 0.5, until = ["x"] }
"""
SAME: dict[str, Any] = {
    "tasks": ("hellaswag", "arc_easy", "hellaswag"),
    "limit": 10.0,
    "num_fewshot": 5,
    "batch_size": "8",
    "seed": 7,
    "apply_chat_template": True,
    "system_instruction": "Answer.",
    "gen_kwargs": {"temperature": 0.5, "until": ["x"]},
}


def test_tasks_are_the_suite_of_a_file_with_the_same_values(tmp_path):
    """To the last field but the name's last part; so ids, reuse and resume are the same."""
    file = tmp_path / "s.toml"
    made = one_off.suite_of(SuiteOptions(**SAME))
    assert re.fullmatch(r"hellaswag-arc_easy-limit10-5shot-chat-[0-9a-f]{6}", made.name)
    file.write_text(FILE.replace("hellaswag-arc_easy-limit10-5shot", made.name))
    assert made == suites.load_suite(file)


def test_options_replace_what_a_suite_says_of_each_task():
    """And its name says so, where that sets its scores apart; without options it is the suite itself."""
    plain = suites.load_suite("core")
    assert one_off.suite_of(SuiteOptions(suite="core")) == plain
    assert one_off.suite_of(SuiteOptions(), "core") == plain
    few = one_off.suite_of(SuiteOptions(suite="core", limit=4))
    assert few.name == "core-limit4"
    assert [t.limit for t in few.tasks] == [4] * len(plain.tasks)
    assert [t.num_fewshot for t in few.tasks] == [t.num_fewshot for t in plain.tasks]
    sized = one_off.suite_of(SuiteOptions(suite="core", batch_size=2))
    assert sized == plain.model_copy(update={"batch_size": 2})


@pytest.mark.parametrize("named", [{"suite": "core"}, {"tasks": ("arc_easy",)}])
def test_settings_that_change_scores_change_the_name(named):
    """So a one-off never stands for a point of the suite's own series; the setting that a suite has changes nothing."""
    more = [
        {"gen_kwargs": {"temperature": 1}},
        {"gen_kwargs": {"temperature": 2}},
        {"seed": 1},
        {"system_instruction": "Answer."},
        {"apply_chat_template": "tool_use"},
        {"apply_chat_template": True},
        {"limit": 1234567},
        {"limit": 1234568},
    ]
    made = {one_off.suite_of(SuiteOptions(**named, **each)).name for each in ({}, *more)}
    assert len(made) == 1 + len(more)
    plain = one_off.suite_of(SuiteOptions(**named))
    assert one_off.suite_of(SuiteOptions(**named, apply_chat_template=False)) == plain


def test_a_folder_of_the_user_comes_after_the_suites_own(tmp_path):
    """Of two definitions of a task lm-eval takes the later folder's; evalspan's own tasks stay known."""
    (tmp_path / "mine.yaml").write_text("task: quickstart_arc\n")
    kept = one_off.suite_of(SuiteOptions(tasks=("quickstart_mmlu",), include_path=(str(tmp_path),)))
    assert kept.include_path == (*suites.load_suite("quickstart").include_path, str(tmp_path))
    changed = one_off.suite_of(SuiteOptions(suite="quickstart", include_path=(str(tmp_path),)))
    assert changed.include_path == kept.include_path
    assert changed.name != "quickstart"


@given(st.floats(1e-6, 1e9) | st.integers(1, 10**9))
def test_the_suggested_command_means_the_same_limit(limit):
    (word,) = SuiteOptions(limit=limit).words()[1:]
    assert float(word) == limit


def test_a_notice_names_a_shipped_suite_beside_a_file_of_its_name(tmp_path, monkeypatch):
    """As the suite itself is found: a file is named with a slash, or by .toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "core").touch()
    spec = suites.load_suite("core")
    assert api._named(SuiteOptions(suite="core"), spec, Config()) == "core"
    assert api._named(SuiteOptions(suite="./s.toml"), spec, Config()) == str(tmp_path / "s.toml")


def test_a_task_of_a_shipped_suite_brings_its_folder_and_its_judge():
    """A user need not know where evalspan's own tasks lie."""
    made = one_off.suite_of(SuiteOptions(tasks=("quickstart_mmlu", "mt_bench")))
    folders = {*suites.load_suite("quickstart").include_path, *suites.load_suite("mt_bench").include_path}
    assert set(made.include_path) == folders
    assert [t.judge for t in made.tasks] == [False, True]


NAMES = st.text("abcdefgh_", min_size=1, max_size=60)


@given(st.lists(NAMES, min_size=1, max_size=200, unique=True), st.none() | st.integers(1, 999))
def test_a_name_is_readable_bounded_and_begins_with_the_first_task(tasks, limit):
    name = one_off.suite_of(SuiteOptions(tasks=tuple(tasks), limit=limit)).name
    assert name.startswith(tasks[0][:40])
    assert len(name) <= 80
    assert (limit is not None) == name.endswith(f"limit{limit}")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)  # of names
VALUES = st.recursive(
    TEXT | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TASKS = st.builds(
    TaskEntry,
    name=PLAIN,
    num_fewshot=st.none() | st.integers(0, 9),
    limit=st.none() | st.integers(1, 9) | st.floats(0.1, 0.9),
    gen_kwargs=st.none() | st.dictionaries(TEXT, VALUES, max_size=3),
    judge=st.booleans(),
    batch_size=st.none() | st.integers(1, 64),
)
BUDGETS = (
    st.just({})
    | st.just({"mode": "exact"})
    | st.integers(1, 9).map(lambda n: {"mode": "fast", "token_budget": n})
)
SUITES = st.builds(
    SuiteSpec,
    name=PLAIN,
    batch_size=st.integers(1, 64) | st.just("auto"),
    seed=st.none() | st.integers(0, 9),
    apply_chat_template=st.booleans() | TEXT,
    system_instruction=st.none() | TEXT,
    fewshot_as_multiturn=st.none() | st.booleans(),
    tasks=st.lists(TASKS, min_size=1, max_size=3, unique_by=lambda task: task.name).map(tuple),
).filter(lambda suite: suite.apply_chat_template is not False or not suite.fewshot_as_multiturn)
SUITES = st.builds(lambda suite, more: suite.model_copy(update=more), SUITES, BUDGETS)


@given(SUITES)
def test_a_suite_file_that_is_written_loads_as_the_same_suite(tmp_path, suite):
    """Whatever the texts hold: quotes, line ends, DEL, letters beyond ASCII."""
    file = Path(tmp_path) / "s.toml"
    file.write_bytes(one_off.as_toml(suite).encode())
    assert suites.load_suite(file) == suite


@given(SUITES, SUITES)
def test_only_equal_suites_have_one_file_name(one, other):
    assert (one_off.file_name(one) == one_off.file_name(other)) == (one == other)
    assert Path(one_off.file_name(one)).name == one_off.file_name(one)


def test_options_are_taken_whole_or_one_by_one():
    """Not both: the one would be lost beside the other."""
    chosen = SuiteOptions(tasks=("arc_easy",), limit=5)
    assert suite_options(chosen, (), {"limit": None}) is chosen
    assert suite_options(None, "arc_easy", {"limit": 5}) == chosen
    for more in ({"limit": 5}, {"batch_size": "auto"}):
        with pytest.raises(OperatorError, match="holds the other settings"):
            suite_options(chosen, (), more)


def test_a_broken_yaml_beside_the_suites_tasks_is_named_by_line(tmp_path: Path) -> None:
    """lm-eval passes it over without a word, and every other task of the folder is evaluated."""
    (tmp_path / "rivers.yaml").write_text("task: rivers\n")
    suite = SuiteSpec(name="s", include_path=(str(tmp_path),), tasks=(TaskEntry(name="rivers"),))
    assert passed_over(suite) == ""
    (tmp_path / "lakes.yaml").write_text("task: lakes\n  doc_to_text: {}\n")
    assert f"{tmp_path}/lakes.yaml: line 2, column 14: mapping values" in passed_over(suite)


# --- suite files ---------------------------------------------------------------------------------------------------


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
