"""`scripts/check --golden` compares, `scripts/check --golden --write-goldens` writes (README.md)."""

import pytest
from support.goldens import Goldens


def pytest_addoption(parser):
    parser.addoption("--write-goldens", action="store_true", help="write what is found as the new goldens")


@pytest.fixture
def goldens(request):
    return Goldens(write=request.config.getoption("--write-goldens", default=False))
