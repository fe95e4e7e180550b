"""Development clusters for fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dev_cluster.api import Cluster, dev_cluster, unavailable


@contextmanager
def cluster(**shape: Any) -> Iterator[Cluster]:
    """A real Slurm of this shape; the test is skipped where none can be started."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with dev_cluster(**shape) as made:
        yield made
