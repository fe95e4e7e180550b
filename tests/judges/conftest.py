"""A real Valkey and a real HTTP endpoint; each test has its own evaluation and endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.endpoint import Endpoint, serving
from support.served import served_work

from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import JudgeJob, JudgeOptions


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
