"""What the chaos tests share: one cluster, and lm-eval's own scores of what is evaluated on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chaos_lib import site
from dev_cluster.api import unavailable
from support import toys


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
    return toys.expected(place.model, site.TASKS)
