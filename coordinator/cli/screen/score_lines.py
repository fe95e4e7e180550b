"""Scores as short lines. Called by `status` and the live screen."""

from __future__ import annotations

from coordinator.report.learning_curves import ScoreValue


def value_in_words(score: ScoreValue) -> str:
    """Metric, value and standard error."""
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    return f"{score.measure} {score.value:.4f}{error}"


def in_brief(score: ScoreValue) -> str:
    """Task, metric and value: an error is in the report."""
    return f"{score.task} {score.metric} {score.value:.4f}"
