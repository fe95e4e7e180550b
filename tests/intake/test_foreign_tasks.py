"""Laws of task lists of lighteval and inspect_evals: each maps to tasks that lm-eval has, or is refused by name."""

import tomllib
from pathlib import Path

import lm_eval
import pytest
from typer.testing import CliRunner

from coordinator.errors import OperatorError
from coordinator.intake.foreign_tasks import TABLE, read_task_list
from coordinator.intake.suites import load_suite
from coordinator.interface.cli import app
from evaljobs.lmeval.task_yaml import index_of

SUBSETS = {
    "anli_*": "r1",
    "arithmetic_*": "2da",
    "blimp_*": "causative",
    "headqa_*": "en",
    "mmlu_*": "anatomy",
}
LIST = """# ARC
leaderboard|arc:challenge|25
leaderboard|arc:challenge|25
leaderboard|mmlu:anatomy|5|0
gsm8k|4, sciq
inspect_evals/mmlu_5_shot
inspect_evals/hellaswag
"""


def test_each_task_of_the_table_is_one_of_lm_eval():
    """Of the lm-eval that is installed; a pattern stands for the subsets that both have."""
    known = index_of([str(Path(lm_eval.__file__).parent / "tasks")])
    table = tomllib.loads(TABLE.read_text())
    named = [
        one["task"] if isinstance(one, dict) else one for tool in table.values() for one in tool.values()
    ]
    tasks = {one.replace("*", SUBSETS[one]) if "*" in one else one for one in named}
    assert not tasks - known.keys()


def test_a_list_becomes_a_suite_with_its_examples(tmp_path):
    """lighteval's default is no example; inspect's tasks keep what lm-eval's YAML says. A task that is named twice is one."""
    file = tmp_path / "my list.txt"
    file.write_text(LIST)
    done = CliRunner().invoke(app, ["import-tasks", str(file)])
    suite = tmp_path / "suite.toml"
    suite.write_text(done.stdout)
    assert [(task.name, task.num_fewshot) for task in load_suite(suite).tasks] == [
        ("arc_challenge", 25),
        ("mmlu_anatomy", 5),
        ("gsm8k", 4),
        ("sciq", 0),
        ("mmlu", 5),
        ("hellaswag", None),
    ]


@pytest.mark.parametrize(
    "line", ["gsm8k|five", "lcb:codegeneration|0", "inspect_evals/gaia", "a|b|c|d|e", "x:y"]
)
def test_what_has_no_equal_is_refused_by_name(line, tmp_path):
    """Or, asked so, named on standard error."""
    assert read_task_list(line).unknown == [line]
    file = tmp_path / "list.txt"
    file.write_text(f"{line}\ngsm8k|4\n")
    refused = CliRunner().invoke(app, ["import-tasks", str(file)])
    assert isinstance(refused.exception, OperatorError)
    assert line in str(refused.exception)
    skipped = CliRunner().invoke(app, ["import-tasks", str(file), "--skip-unknown"])
    assert (skipped.exit_code, line in skipped.stderr, line in skipped.stdout) == (0, True, False)
