"""Scores as short lines: the values of a task as its file appears, and the main metric of each task.

Rule: the main metric of a task is the first that lm-eval lists for it. Called by `status` and the live screen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from coordinator.evaluation.state import EntryState
from coordinator.report.learning_curves import ScoreValue, scores_of
from evaljobs.contract.folded import read_bytes


class Scores:
    """The scores of tasks as their files appear; each file is read once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ScoreValue, ...]] = {}

    def of(self, entry: EntryState) -> tuple[ScoreValue, ...]:
        """Values of a scored entry: its groups' where it has groups, else its tasks'."""
        if not entry.result_file:
            return ()
        if entry.result_file not in self._read:
            results = read_results(Path(entry.result_file))
            if results is None:
                return ()
            self._read[entry.result_file] = _groups_or_tasks(results)
        return self._read[entry.result_file]

    def keep(self, files: Collection[str]) -> None:
        """Forget the scores of all other files."""
        self._read = {file: scores for file, scores in self._read.items() if file in files}


def read_results(file: Path) -> dict[str, Any] | None:
    """lm-eval's results in a file; None where it is not there, or storage is away for a moment."""
    try:
        found = json.loads(read_bytes(file))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _groups_or_tasks(results: Mapping[str, Any]) -> tuple[ScoreValue, ...]:
    """Values of groups, and of the tasks that no group holds."""
    groups: Mapping[str, Any] = results.get("groups") or {}
    if not groups:
        return scores_of(results)
    below = {name for members in (results.get("group_subtasks") or {}).values() for name in members}
    top = {g: values for g, values in groups.items() if g not in below}
    alone = {t: v for t, v in (results.get("results") or {}).items() if t not in below and t not in groups}
    return scores_of({**results, "results": alone, "groups": top or groups})


def main_scores(file: Path) -> tuple[ScoreValue, ...]:
    """The main metric of each group, and of each task without a group, in a results file; empty without one."""
    results = read_results(file)
    return first_of_each(_groups_or_tasks(results)) if results is not None else ()


def first_of_each(scores: Iterable[ScoreValue]) -> tuple[ScoreValue, ...]:
    """The main metric of each task."""
    found: dict[str, ScoreValue] = {}
    for score in scores:
        found.setdefault(score.task, score)
    return tuple(found.values())


def value_in_words(score: ScoreValue) -> str:
    """Metric, value and standard error."""
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    return f"{score.measure} {score.value:.4f}{error}"


def in_brief(score: ScoreValue) -> str:
    """Task, metric and value: an error is in the report."""
    return f"{score.task} {score.metric} {score.value:.4f}"
