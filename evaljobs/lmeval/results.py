"""Merges the results of suite entries into those of the evaluation. Pure, without lm-eval.

Rule: the merged value has the shape of lm-eval's own results.json, as if one run had named all
tasks. Called from the coordinator's `runtime.finalize` and from `scoring.score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Parts of lm-eval's results that map a task or group name to a value
# (lm_eval/evaluator_utils.py, _to_eval_results).
BY_NAME = (
    "results",
    "groups",
    "group_subtasks",
    "configs",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)
# lm-eval sorts these by name.
SORTED = ("configs", "versions", "n-shot", "higher_is_better")

VERSIONS = ("transformers_version", "lm_eval_version")


def merge_results(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One results value from the entries' score files, in the suite's order.

    Where two entries have one task with different results, the first keeps the name and the next is
    stored as "name#2", and so on. As in lm-eval, `groups` is present only where an entry has a group
    with an aggregate.
    """
    merged: dict[str, Any] = {part: {} for part in BY_NAME}
    for score, alias in zip(scores, merged_names(scores), strict=True):
        for part in BY_NAME:
            found = {alias[name]: value for name, value in score.get(part, {}).items()}
            if part == "group_subtasks":
                found = {group: [alias.get(one, one) for one in members] for group, members in found.items()}
            merged[part] |= {name: value for name, value in found.items() if name not in merged[part]}
    for part in SORTED:
        merged[part] = dict(sorted(merged[part].items()))
    if not merged["groups"]:
        del merged["groups"]
    if scores:
        merged |= {key: scores[0][key] for key in ("config", *VERSIONS) if key in scores[0]}
    return merged


def merged_names(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each entry's score file, task or group -> its name in the merged value."""
    merged: dict[str, Any] = {}  # name -> what lm-eval says of it
    found = []
    for score in scores:
        names = {name for part in BY_NAME for name in score.get(part, {})}
        said = {name: _said(score, name) for name in names}
        alias = {name: _free(name, said[name], merged) for name in names}
        merged |= {alias[name]: said[name] for name in names}
        found.append(alias)
    return found


def _said(score: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All that a score file says of a task or group. A task's alias is indented below its group."""
    said = {part: score[part][name] for part in BY_NAME if name in score.get(part, {})}
    said["results"] = {key: value for key, value in said.get("results", {}).items() if key != "alias"}
    return said


def _free(name: str, said: Mapping[str, Any], taken: Mapping[str, Any]) -> str:
    names = (name, *(f"{name}#{number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if taken.get(one, said) == said)
