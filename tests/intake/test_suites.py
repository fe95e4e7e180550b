"""Laws of suites: what is shipped loads; options make the suite that a file with the same values is; modes."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api import submitting
from coordinator.decide.evaluation.records import Inputs, evaluation_id
from coordinator.intake import suites
from coordinator.intake.inbox import Notice
from coordinator.intake.suites import option_words, suite_choice, suite_of
from coordinator.intake.validate import settings_passed_over
from coordinator.site.config.schema import Config
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, SuiteSpec, TaskEntry

TASK_OF_FILE = """[[task]]
name = "{}"
num_fewshot = 5
limit = 10
gen_kwargs = {{ temperature = 0.5, until = ["x"] }}
"""


def test_tasks_are_the_suite_of_a_file_with_the_same_values(tmp_path):
    """To the last field but the name's last part; so ids, reuse and resume are the same."""
    each = {"limit": 10.0, "num_fewshot": 5, "gen_kwargs": {"temperature": 0.5, "until": ["x"]}}
    whole = {"batch_size": 8, "seed": 7, "system_instruction": "Answer."}
    tasks = ("hellaswag", "arc_easy", "hellaswag")
    settings = {"apply_chat_template": True, **each, **whole, "batch_size": "8"}
    made = suite_of(suite_choice(None, tasks, settings))
    assert re.fullmatch(r"hellaswag-arc_easy-limit10-5shot-chat-[0-9a-f]{6}", made.name)
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": made.name, **whole}.items()]
    text = "\n".join([*lines, "apply_chat_template = true", *map(TASK_OF_FILE.format, tasks[:2])])
    (tmp_path / "s.toml").write_text(text)
    assert made == suites.load_suite(tmp_path / "s.toml")


def test_options_replace_what_a_suite_says_of_each_task():
    """And its name says so, where that sets its scores apart; without options it is the suite itself."""
    plain = suites.load_suite("core")
    assert suite_of({"suite": "core"}) == suite_of({}, "core") == plain
    few = suite_of({"suite": "core", "limit": 4})
    assert few.name == "core-limit4"
    assert few.tasks == tuple(task.model_copy(update={"limit": 4}) for task in plain.tasks)
    sized = suite_of({"suite": "core", "batch_size": 2})
    assert sized == plain.model_copy(update={"batch_size": 2})
    options = {"suite": "core", "token_budget": "4096", "mode": "fast"}
    fast = suite_of(options)
    assert (fast.mode, fast.token_budget, fast.name[:10]) == ("fast", 4096, "core-fast-")
    assert option_words(options) == ["--suite", "core", "--token-budget", "4096", "--mode", "fast"]
    assert suite_of({"suite": "core", "mode": "exact"}).name == "core"


@pytest.mark.parametrize("named", [{"suite": "core"}, {"tasks": ("arc_easy",)}])
def test_settings_that_change_scores_change_the_name(named):
    """So a one-off never stands for a point of the suite's own series; the setting that a suite has changes nothing."""
    more = [
        *({"gen_kwargs": {"temperature": n}} for n in (1, 2)),
        *({"apply_chat_template": template} for template in (True, "tool_use")),
        *({"limit": n} for n in (1234567, 1234568)),
        {"seed": 1},
        {"system_instruction": "Answer."},
    ]
    made = {suite_of({**named, **each}).name for each in ({}, *more)}
    assert len(made) == 1 + len(more)
    assert suite_of({**named, "apply_chat_template": False}) == suite_of(named)


def test_a_task_of_a_shipped_suite_brings_its_folder_and_its_judge_and_a_users_folder_comes_after(tmp_path):
    """Of two definitions of a task lm-eval takes the later folder's; evalspan's own tasks stay known."""
    (tmp_path / "mine.yaml").write_text("task: quickstart_arc\n")
    own, talks = (suites.load_suite(name).include_path for name in ("quickstart", "mt_bench"))
    made = suite_of({"tasks": ["quickstart_mmlu", "mt_bench"], "include_path": [tmp_path]})
    assert set(made.include_path[:-1]) == {*own, *talks}
    assert made.include_path[-1] == str(tmp_path)
    assert [t.judge for t in made.tasks] == [False, True]
    changed = suite_of({"suite": "quickstart", "include_path": [tmp_path]})
    assert changed.include_path == (*own, str(tmp_path))
    assert changed.name != "quickstart"


def test_a_notice_names_a_shipped_suite_beside_a_file_of_its_name(tmp_path, monkeypatch):
    """As the suite itself is found: a file is named with a slash, or by .toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "core").touch()
    assert submitting._named({"suite": "core"}, Config()) == "core"
    assert submitting._named({"suite": "./s.toml"}, Config()) == str(tmp_path / "s.toml")


NAMES = st.text("abcdefgh_", min_size=1, max_size=60)


@given(
    st.lists(NAMES, min_size=1, max_size=200, unique=True),
    st.none() | st.integers(1, 999),
    st.floats(1e-6, 1e9),
)
def test_a_name_is_readable_and_bounded_and_the_suggested_command_means_the_same(tasks, limit, share):
    """It begins with the first task, and says the limit, to the last digit in the command."""
    name = suite_of({"tasks": tasks} if limit is None else {"tasks": tasks, "limit": limit}).name
    assert name.startswith(tasks[0][:40])
    assert len(name) <= 80
    assert (limit is not None) == name.endswith(f"limit{limit}")
    for given_limit in (limit or 1, share):
        (word,) = option_words({"limit": given_limit})[1:]
        assert float(word) == given_limit


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
    task=st.lists(TASKS, min_size=1, max_size=3, unique_by=lambda task: task.name).map(tuple),
).filter(lambda suite: suite.apply_chat_template is not False or not suite.fewshot_as_multiturn)
SUITES = st.builds(lambda suite, more: suite.model_copy(update=more), SUITES, BUDGETS)


@given(SUITES)
def test_a_notice_holds_a_suite_whatever_its_texts_hold(suite):
    """Quotes, line ends, DEL, letters beyond ASCII. Suites of one name that differ are two checkpoints to evaluate."""
    notice = Notice(checkpoint="/c", suite="s", spec=suite)
    assert Notice.model_validate_json(notice.model_dump_json()) == notice
    other = notice.model_copy(update={"spec": suite.model_copy(update={"seed": 77})})
    assert other.key != notice.key != notice.model_copy(update={"spec": None}).key


def test_a_broken_yaml_beside_the_suites_tasks_is_named_by_line(tmp_path):
    """lm-eval passes it over without a word, and every other task of the folder is evaluated."""
    (tmp_path / "rivers.yaml").write_text("task: rivers\n")
    suite = SuiteSpec(name="s", include_path=(str(tmp_path),), tasks=(TaskEntry(name="rivers"),))
    assert settings_passed_over(suite) == ""
    (tmp_path / "lakes.yaml").write_text("task: lakes\n  doc_to_text: {}\n")
    assert f"{tmp_path}/lakes.yaml: line 2, column 14: mapping values" in settings_passed_over(suite)


# --- suite files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suites.suite_names())
def test_every_shipped_suite_loads(name):
    """A shipped suite is valid, named like its file, and its folders are there."""
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.tasks
    assert all(Path(folder).is_dir() and Path(folder).is_absolute() for folder in suite.include_path)


def test_quickstart_data_are_small_excerpts_with_their_notices():
    """At most 200 rows of a set, limits within the rows, and each set's licence text."""
    suite = suites.load_suite("quickstart")
    folder = Path(suite.include_path[0])
    notice = (folder / "NOTICE").read_text()
    for task in suite.tasks:
        file = folder / "data" / f"{task.name.removeprefix('quickstart_')}.jsonl"
        rows = file.read_text().splitlines()
        assert all(json.loads(row) for row in rows)
        assert task.limit <= len(rows) <= 200
        assert file.name in notice
    assert notice.count("MIT License") == len(suite.tasks)


# --- modes ---------------------------------------------------------------------------------------------------------


CHECKPOINT = CheckpointSpec(source="/ckpts/step-100", digest="d" * 8, files=())
MODEL = ModelOptions(model_args={"dtype": "float32"})
TWO = (TaskEntry(name="a", num_fewshot=5), TaskEntry(name="b", limit=10, judge=True))
CORE = SuiteSpec(name="core", batch_size=8, seed=7, tasks=TWO)


def test_mode_budget_and_batch_sizes_of_tasks_are_part_of_the_id_where_a_suite_has_them():
    """A suite in exact mode has the id of one that names no mode."""
    exact = suites.suite_in_mode(CORE.model_copy(update={"mode": "exact"}), "fast", "hf")
    assert evaluation_id(CHECKPOINT, exact, MODEL, None, Inputs()) == evaluation_id(
        CHECKPOINT, CORE, MODEL, None, Inputs()
    )
    fast = suites.suite_in_mode(CORE, "fast", "hf")
    sized = {"tasks": (TWO[0].model_copy(update={"batch_size": 4}), TWO[1])}
    some = [fast, *(fast.model_copy(update=each) for each in (sized, {"token_budget": 4096}))]
    ids = [
        evaluation_id(CHECKPOINT, s, MODEL, None, Inputs())
        for s in (CORE, CORE.model_copy(update=sized), *some)
    ]
    assert len(set(ids)) == 5
    assert ["-fast-" in each for each in ids] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("text", "setting", "engine", "found"),
    [
        ("", "exact", "vllm", (None, None)),
        ("", "fast", "hf", ("fast", 8192)),
        ('mode = "exact"', "fast", "vllm", (None, None)),
        ('mode = "fast"', "exact", "hf", ("fast", 8192)),
        ('mode = "fast"\ntoken_budget = 100', "exact", "hf", ("fast", 100)),
        ('mode = "fast"\nbatch_size = "auto"', "exact", "hf", ("fast", "auto")),
    ],
)
def test_the_suites_own_mode_goes_before_the_setting(tmp_path, text, setting, engine, found):
    """Its token budget is said, or the default, or found with the batch size. Its folders are relative to its file."""
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\ninclude_path = ["tasks"]\n{text}\n[[task]]\nname = "a"\nlimit = 0.5\n')
    made = suites.suite_in_mode(suites.load_suite(path), setting, engine)
    assert (made.mode, made.token_budget) == found
    assert made.include_path == (str(tmp_path / "tasks"),)
