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

    Where two entries share a name (one task with different settings), the first keeps it and the
    next is stored as "name#2", and so on. As in lm-eval, `groups` is present only where an entry
    has a group with an aggregate.
    """
    merged: dict[str, Any] = {part: {} for part in BY_NAME}
    for score in scores:
        names = {name for part in BY_NAME for name in score.get(part, {})}
        taken = {name for part in BY_NAME for name in merged[part]}
        alias = {name: _free(name, taken) for name in names}
        for part in BY_NAME:
            merged[part] |= {alias[name]: value for name, value in score.get(part, {}).items()}
    for part in SORTED:
        merged[part] = dict(sorted(merged[part].items()))
    if not merged["groups"]:
        del merged["groups"]
    if scores:
        merged |= {key: scores[0][key] for key in ("config", *VERSIONS) if key in scores[0]}
    return merged


def _free(name: str, taken: set[str]) -> str:
    names = (name, *(f"{name}#{number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if one not in taken)
