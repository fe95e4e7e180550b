"""A tiny model for all of these tests, and lm-eval's own results on it, each computed once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # pipeline and tiny_model are imported by name, also by scripts/bench_exactness

import pipeline  # noqa: E402
import tiny_model  # noqa: E402

from evaljobs.lmeval import run  # noqa: E402


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run.quiet_environment(offline=True)
    sys.path.insert(0, str(HERE / "tasks"))
    try:
        import rows
    finally:
        sys.path.pop(0)
    return tiny_model.make(tmp_path_factory.mktemp("tiny"), rows.corpus())


@pytest.fixture(scope="session")
def lm_eval_outcome(model_dir: Path) -> Callable[[pipeline.Case, int], pipeline.Outcome]:
    known: dict[str, pipeline.Outcome] = {}

    def outcome(case: pipeline.Case, batch_size: int) -> pipeline.Outcome:
        key = f"{case!r}@{batch_size}"
        if key not in known:
            known[key] = pipeline.lm_eval_run(model_dir, case, batch_size)
        return known[key]

    return outcome
