"""Merges the results of suite entries into those of the evaluation. Pure, without lm-eval.

Rule: the merged value has the shape of lm-eval's own results.json, as if one run had named all
tasks. Called from the coordinator's `runtime.finalize` and from `scoring.score`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
SORTED_SECTIONS = ("configs", "versions", "n-shot", "higher_is_better")

VERSION_KEYS = ("transformers_version", "lm_eval_version")


def merge_results(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the entries' score files into one results value, in the suite's order.

    If two entries have one task with different results, the first keeps the name and the next is stored as "name#2", and so
    on. As in lm-eval, `groups` is only present if an entry has a group with an aggregate.
    """
    merged: dict[str, Any] = {part: {} for part in BY_NAME}
    for score, alias in zip(scores, merged_names(scores), strict=True):
        for part in BY_NAME:
            found = {alias[name]: value for name, value in score.get(part, {}).items()}
            if part == "group_subtasks":
                found = {group: [alias.get(one, one) for one in members] for group, members in found.items()}
            merged[part] |= {name: value for name, value in found.items() if name not in merged[part]}
    for part in SORTED_SECTIONS:
        merged[part] = dict(sorted(merged[part].items()))
    if not merged["groups"]:
        del merged["groups"]
    if scores:
        merged |= {key: scores[0][key] for key in ("config", *VERSION_KEYS) if key in scores[0]}
    return merged


def add_suite_groups(
    results: dict[str, Any],
    suite: Sequence[tuple[str, str | None]],
    scores: Mapping[int, Mapping[str, Any]],
) -> None:
    """Add the groups of a suite to its merged results, as groups of lm-eval with one metric, `mean`.

    `suite`: name and group of each entry; `scores`: the score files of scored ones, by index. The mean is over the group's
    entries, using each one's first metric for which higher is better; entries without one are omitted. A group is omitted
    while an entry has no score, and is "name#2" if lm-eval has a task or group of its name.
    """
    merged = dict(zip(scores, merged_names(list(scores.values())), strict=True))
    for group in dict.fromkeys(group for _, group in suite if group):
        entries = [index for index, (_, its) in enumerate(suite) if its == group]
        if not scores.keys() >= set(entries):
            continue
        tops = {index: _tops(scores[index]) for index in entries}
        mean = _mean(_mean(_value(scores[index], name) for name in names) for index, names in tops.items())
        if mean is None:
            continue
        below = results["group_subtasks"]
        named = (group, *(f"{group}#{number}" for number in range(2, len(below) + 3)))
        name = next(one for one in named if one not in results["results"] and one not in below)
        row = {"alias": name, SUITE_MEAN: mean}
        results.setdefault("groups", {})[name] = row
        results["results"][name] = row
        below[name] = [merged[index][top] for index, names in tops.items() for top in names]


def _tops(score: Mapping[str, Any]) -> list[str]:
    """Return the top-level names of an entry: its task or group; for a tag its tasks."""
    groups: Mapping[str, Sequence[str]] = score.get("group_subtasks", {})
    inside = {name for members in groups.values() for name in members}
    return [name for name in {**groups, **score["results"]} if name not in inside]


def _value(score: Mapping[str, Any], name: str) -> float | None:
    """Return the first metric for which higher is better; for a group without metrics, the mean of its members."""
    higher: Mapping[str, bool] = score.get("higher_is_better", {}).get(name, {})
    rows = {k: v for k, v in score["results"].get(name, {}).items() if "," in k and "_stderr," not in k}
    for key, value in rows.items():
        if isinstance(value, int | float) and higher.get(key.partition(",")[0], True):
            return float(value)
    return (
        None if rows else _mean(_value(score, one) for one in score.get("group_subtasks", {}).get(name, ()))
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def merged_names(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return for each entry's score file, task or group -> its name in the merged value."""
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
    """Return everything that a score file has for a task or group. A task's alias is indented below its group."""
    said = {part: score[part][name] for part in BY_NAME if name in score.get(part, {})}
    said["results"] = {key: value for key, value in said.get("results", {}).items() if key != "alias"}
    return said


def _free(name: str, said: Mapping[str, Any], taken: Mapping[str, Any]) -> str:
    names = (name, *(f"{name}#{number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if taken.get(one, said) == said)
