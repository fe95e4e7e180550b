"""Merges the results of suite entries into those of the evaluation. Pure, without lm-eval.

Rule: the merged value has the shape of lm-eval's own results.json, as if one run had named all
tasks. Called from the coordinator's `runtime.finalize` and from `scoring.score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaljobs.contract.columns import SUITE_MEAN

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


def add_suite_groups(
    results: dict[str, Any],
    suite: Sequence[tuple[str, str | None]],
    scores: Mapping[int, Mapping[str, Any]],
) -> None:
    """Add the groups of a suite to its merged results, as groups of lm-eval with one metric, `mean`.

    `suite`: name and group of each entry; `scores`: the score files of the scored ones, by index. The mean is over the
    group's entries, of each its first metric of which higher is better; entries that have none are left out. A group is
    left out while an entry has no score.
    """
    for group in dict.fromkeys(group for _, group in suite if group):
        members = [index for index, (_, its) in enumerate(suite) if its == group]
        if not scores.keys() >= set(members):
            continue
        values = [_first_value(scores[index], suite[index][0]) for index in members]
        known = [value for value in values if value is not None]
        if not known:
            continue
        row = {"alias": group, SUITE_MEAN: sum(known) / len(known)}
        results.setdefault("groups", {})[group] = row
        results["results"][group] = row
        names = [suite[index][0] for index in members]
        below = results["group_subtasks"]
        below |= {
            name: _tasks(scores[index])
            for index, name in zip(members, names, strict=True)
            if name not in below
        }
        below[group] = names


def _tasks(score: Mapping[str, Any]) -> list[str]:
    """Leaf tasks of an entry; none of one that is a leaf task itself."""
    leaves = [name for name in score["results"] if not score.get("group_subtasks", {}).get(name)]
    return leaves if len(leaves) > 1 else []


def _first_value(score: Mapping[str, Any], entry: str) -> float | None:
    """An entry's first metric of which higher is better; of a tag, which has no score, the mean over its tasks."""
    results: Mapping[str, Mapping[str, Any]] = score.get("results", {})
    if entry not in results or not any("," in key for key in results[entry]):
        values = [
            _first_value(score, task) for task in results if task != entry and "," in " ".join(results[task])
        ]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None
    higher: Mapping[str, bool] = score.get("higher_is_better", {}).get(entry, {})
    for key, value in results[entry].items():
        metric, _, which = key.partition(",")
        if (
            which
            and not metric.endswith("_stderr")
            and isinstance(value, int | float)
            and higher.get(metric, True)
        ):
            return float(value)
    return None


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
