"""A real HTTP endpoint; each test has its own evaluation and endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.endpoint import Endpoint, serving

from evaljobs.contract.specs import JudgeJob, JudgeOptions


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as made:
        yield made


@pytest.fixture
def job(endpoint: Endpoint, tmp_path: Path) -> JudgeJob:
    options = JudgeOptions(url=endpoint.url, model="judge-1", timeout_seconds=60, retries=2)
    return JudgeJob(options=options, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "evaluation"
    made.mkdir()
    return made
