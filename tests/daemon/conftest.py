"""What the daemon's tests share: the machine's seeded world, and the toy evaluations of tests/integration."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
for parts in (TESTS / "machine", TESTS / "daemon"):
    if str(parts) not in sys.path:
        sys.path.append(str(parts))


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


toys = _module("toy_sites", TESTS / "integration" / "conftest.py")
toy_model = toys.toy_model

SUITE = """
name = "two"
include_path = ["{tasks}"]
batch_size = 8

[[task]]
name = "toy_choice"
[[task]]
name = "toy_sums"
limit = 24
"""


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of the two tasks, one run a task."""
    from pipeline import Case, lm_eval_run

    from evaljobs.lmeval import run

    run.quiet_environment(offline=True)
    results = {}
    for name, entry in (("toy_choice", {}), ("toy_sums", {"limit": 24})):
        case = Case(task=name, entry=entry, include_path=str(toys.TASKS), bootstrap=toys.BOOTSTRAP)
        results[name] = lm_eval_run(toy_model, case, 8).results["results"][name]
    return results


@pytest.fixture
def site(tmp_path: Path, toy_model: Path) -> Iterator[Any]:
    """A local site whose settings watch a folder of checkpoints, `run`, which is empty still."""
    suite = tmp_path / "two.toml"
    suite.write_text(SUITE.format(tasks=toys.TASKS))
    config = tmp_path / "evalspan.toml"
    watch = f'[watch]\nfolders = ["{tmp_path}/run"]\nsuite = "{suite}"\n'
    config.write_text(toys.CONFIG.format(bootstrap=toys.BOOTSTRAP) + watch)
    program = str(Path(sys.executable).parent / "evalspan")
    env = {**os.environ, "EVALSPAN_CONFIG": str(config), "EVALSPAN_CLUSTER_SLOTS": "2", "NO_COLOR": "1"}
    site = toys.Site(lambda a: [program, *a], env, tmp_path, toy_model, suite, [])
    yield site
    site.stop_redis()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    from loop_parts import small_disk

    yield from small_disk(tmp_path)
