"""Laws of the suite `portfolio` and of a suite's own groups."""

import pytest
from support.portfolio.place import place
from support.portfolio.rows import KINDS

from coordinator.errors import OperatorError
from coordinator.intake.suites import load_suite
from evaljobs.lmeval.results import add_suite_groups, merge_results
from priors.sizes import known_size

PORTFOLIO = load_suite("portfolio")


def score(name, tasks, *, aggregate=None, **lower):
    """A score file of an entry: its tasks' accuracy; `aggregate`: of a group; `lower`: metrics of which lower is better."""
    rows = {task: {"alias": task, **lower, "acc,none": value} for task, value in tasks.items()}
    better = {task: {key.partition(",")[0]: False for key in lower} for task in tasks}
    made = {"results": rows, "higher_is_better": better, "group_subtasks": {}}
    if aggregate is not None:
        made |= {"groups": {name: {"acc,none": aggregate}}, "group_subtasks": {name: sorted(tasks)}}
        made["results"][name] = made["groups"][name]
    return made


def test_a_group_of_a_suite_has_the_mean_of_its_entries():
    """Of each entry the first metric of which higher is better; of a tag the mean over its tasks."""
    scores = {
        0: score("one", {"one": 0.5}, **{"perplexity,none": 9.0}),
        1: score("many", {"a": 0.0, "b": 1.0}, aggregate=0.75),
        2: score("tag", {"c": 0.2, "d": 0.4}),
        3: score("alone", {"alone": 1.0}),
        4: {
            "results": {"pages": {"perplexity,none": 9.0}},
            "higher_is_better": {"pages": {"perplexity": False}},
        },
    }
    entries = ["one", "many", "tag", "alone", "pages", "folder/file.yaml", "failed"]
    scores[5] = score("file", {"e": 0.9})
    suite = list(zip(entries, ["g", "g", "g", None, "g", "a", "h"], strict=True))
    results = merge_results(list(scores.values()))
    add_suite_groups(results, suite, scores)
    assert results["groups"]["g"]["mean,none"] == pytest.approx((0.5 + 0.75 + 0.3) / 3)
    assert results["group_subtasks"]["g"] == ["one", "many", "c", "d", "pages"]
    # a task of lm-eval's has that name
    assert (results["results"]["a"]["acc,none"], results["groups"]["a#2"]["mean,none"]) == (0.0, 0.9)
    assert results["group_subtasks"]["a#2"] == ["e"]
    assert "h" not in results["groups"]  # an entry without a score: no mean of the others


def test_a_group_and_a_task_share_no_name(tmp_path):
    file = tmp_path / "twice.toml"
    file.write_text('name = "twice"\n[[task]]\nname = "mmlu"\n[[task]]\nname = "piqa"\ngroup = "mmlu"\n')
    with pytest.raises(OperatorError, match="'mmlu'"):
        load_suite(file)


def test_the_portfolio_holds_63_data_sets_with_groups_shots_and_sizes():
    assert len(PORTFOLIO.tasks) == 63
    assert all(
        task.group and task.num_fewshot is not None and known_size(task.name) for task in PORTFOLIO.tasks
    )


def test_lm_eval_builds_every_task_of_the_portfolio(tmp_path):
    """Each entry loads from rows of its own data sets, with as many examples as its suite says."""
    made = place((task.name for task in PORTFOLIO.tasks), tmp_path)
    read = {path for path, _ in made}
    assert read == {path for path in KINDS if path != "hails/agieval"} | {
        path for path in read if path.startswith("hails/agieval-")
    }
