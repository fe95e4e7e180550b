"""What the chaos tests share: one cluster, and lm-eval's own scores of what is evaluated on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS.parent / "scripts", TESTS / "exactness"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from chaos_lib import site  # noqa: E402
from dev_cluster.api import unavailable  # noqa: E402

ENTRIES: dict[str, dict[str, Any]] = {"toy_choice": {}, "toy_sums": {"limit": 24}, "toy_programs": {}}


@pytest.fixture(scope="session")
def place() -> Iterator[site.Place]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with site.place() as made:
        yield made


@pytest.fixture(scope="session")
def expected(place: site.Place) -> dict[str, Any]:
    """lm-eval's own results of each task, one run a task."""
    from pipeline import Case, lm_eval_run

    from evaljobs.lmeval import run

    run.quiet_environment(offline=True)
    tasks = str(TESTS / "exactness" / "tasks")
    return {
        name: lm_eval_run(
            place.model, Case(task=name, entry=entry, include_path=tasks, bootstrap=100), 8
        ).results["results"][name]
        for name, entry in ENTRIES.items()
    }
