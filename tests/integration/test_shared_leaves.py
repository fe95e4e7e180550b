"""Suites whose entries have leaf tasks in common, by the command line: one inference of equal requests, lm-eval's scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.exactness.pipeline import TASKS, Case, Outcome, lm_eval_run
from support.toys import suite_text

from evaljobs.contract.storage import read_frames

pytestmark = pytest.mark.model

PARTS = {"toy_part_a": 20, "toy_part_b": 35}  # documents of each leaf task of `toy_group`


def of_lm_eval(model: Path, name: str, settings: dict[str, int]) -> Outcome:
    return lm_eval_run(model, Case(task=name, entry=dict(settings), include_path=str(TASKS)), 1)


def answered(site: Any) -> dict[str, int]:
    """Leaf task -> requests of it that were answered; a shard that two lanes answered counts once."""
    shards = {}
    for file in site.root().glob("responses/*.frames"):
        shards |= {(head.task, head.key, head.shard): head.responses for _, head in read_frames(file, 0)}
    return {task: sum(n for (of, *_), n in shards.items() if of == task) for task in PARTS}


@pytest.mark.parametrize(
    ("entries", "documents"),
    [
        ({"toy_group": {}, "toy_part_a": {}}, {"toy_part_a": 20, "toy_part_b": 35}),
        ({"toy_part_a": {"limit": 6}, "toy_group": {}}, {"toy_part_a": 26, "toy_part_b": 35}),
        (
            {"toy_group": {"num_fewshot": 2, "limit": 4}, "toy_part_a": {}},
            {"toy_part_a": 24, "toy_part_b": 4},
        ),
    ],
)
def test_each_entry_scores_as_its_own_lm_eval_command(
    local_site: Any, toy_model: Path, entries: dict[str, dict[str, int]], documents: dict[str, int]
) -> None:
    """A leaf task with equal settings is asked once, with other settings apart; results.json keeps both apart."""
    site = local_site
    site.suite.write_text(suite_text("toys", entries, batch_size=1))
    done = site.run(site.evaluate(), timeout=150)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for number, (name, settings) in enumerate(entries.items()):
        theirs = of_lm_eval(toy_model, name, settings)
        (file,) = site.root().glob(f"scores/{number:03d}-*.json")
        ours = json.loads(file.read_text())
        assert ours["results"] == theirs.results["results"]
        assert ours.get("groups") == theirs.results.get("groups")
        for task, samples in theirs.samples.items():
            (lines,) = site.root().glob(f"samples/samples_{task}_{number:03d}.jsonl")
            assert [json.loads(line) for line in lines.read_text().splitlines()] == samples
    assert answered(site) == {task: 4 * count for task, count in documents.items()}  # four endings each
    apart = any(entries.values())
    tasks = {"toy_group", *PARTS} | ({"toy_part_a#2"} if apart else set())
    assert results["results"].keys() == tasks
    assert results["evalspan"]["keys"].keys() == tasks - {"toy_group"}
