"""A real Valkey and a real HTTP endpoint; each test has its own evaluation and endpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import served_work

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "exactness"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from endpoint import Endpoint, serving  # noqa: E402

from evaljobs.contract.paths import WorkPaths  # noqa: E402
from evaljobs.contract.specs import JudgeJob, JudgeOptions  # noqa: E402


@pytest.fixture(scope="session")
def redis_work() -> Iterator[WorkPaths]:
    with served_work("judges") as made:
        yield made


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as made:
        yield made


@pytest.fixture
def job(endpoint: Endpoint, redis_work: WorkPaths, tmp_path: Path) -> JudgeJob:
    """A judge at the endpoint; the endpoint's own port keeps its caps apart from other tests'."""
    options = JudgeOptions(url=endpoint.url, model="judge-1", timeout_seconds=60, retries=2)
    return JudgeJob(
        options=options, redis_file=str(redis_work.redis_address), cache_dir=str(tmp_path / "cache")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "evaluation"
    made.mkdir()
    return made
