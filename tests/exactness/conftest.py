"""A tiny model for all of these tests, and lm-eval's own results on it, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exactness import pipeline

from evaljobs.lmeval import run


@pytest.fixture(scope="session")
def model_dir(toy_model: Path) -> Path:
    run.quiet_environment(offline=True)
    return toy_model


@pytest.fixture(scope="session")
def lm_eval_outcome(model_dir: Path) -> Callable[[pipeline.Case, int], pipeline.Outcome]:
    known: dict[str, pipeline.Outcome] = {}

    def outcome(case: pipeline.Case, batch_size: int) -> pipeline.Outcome:
        key = f"{case!r}@{batch_size}"
        if key not in known:
            known[key] = pipeline.lm_eval_run(model_dir, case, batch_size)
        return known[key]

    return outcome
