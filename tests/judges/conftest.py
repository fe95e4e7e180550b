"""A real HTTP endpoint; each test has its own evaluation and endpoint."""

import pytest
from support.endpoint import serving

from evaljobs.contract.specs import JudgeConfig, JudgeJob


@pytest.fixture
def endpoint():
    with serving() as made:
        yield made


@pytest.fixture
def job(endpoint, tmp_path):
    options = JudgeConfig(url=endpoint.url, model="judge-1", timeout_seconds=60, retries=2)
    return JudgeJob(options=options, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "evaluation"
    made.mkdir()
    return made
