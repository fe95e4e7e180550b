"""What all tests share: a real model, and drawn examples that are the same in every run, without a clock asserted.

`pytest --hypothesis-profile=explore` draws others each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import sites, toys

pytest_plugins = ["support.fixtures"]


# A temporary folder serves all examples of a test: each names its own files in it.
UNTIMED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("fixed", derandomize=True, **UNTIMED)
settings.register_profile("explore", **UNTIMED)
settings.load_profile("fixed")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Question: What is 2 + 3? Answer: 5. Q: How many eggs are left? A: Let's think step by step.",
    "def add(a, b):\n    return a + b\n\n\ndef total(numbers):\n    return sum(numbers)\n",
]


# Folders and files whose tests take longest, longest first: side by side, none of them is left for the end.
LONGEST = (
    "tests/integration/test_evaluation.py",
    "tests/chaos",
    "tests/odd_sites",
    "tests/doctor",
    "tests/slurm_cluster",
    "tests/integration",
    "tests/packaging",
    "tests/runtime/test_service.py",
    "tests/sandbox",
    "tests/simulation/test_simulation.py",
    "tests/evaluation/test_simulation.py",
    "tests/planning/test_planner_laws.py",
    "tests/scoring",
    "tests/lmeval",
    "tests/requests",
    "tests/exactness",
    "tests/judges",
    "tests/cluster",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((n for n, place in enumerate(LONGEST) if item.nodeid.startswith(place)), len(LONGEST))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Captured output without lone surrogates (of file names that are no UTF-8): xdist cannot send them to its controller."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a 2-layer Llama with random float32 weights and a tokenizer with chat template; seconds."""
    from support.exactness.tiny_model import make

    return make(tmp_path_factory.mktemp("tiny") / "tiny-llama", CORPUS * 20)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the toy evaluations."""
    return toys.toy_model(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of each toy task, one run a task."""
    return toys.expected(toy_model, sites.TOYS)
