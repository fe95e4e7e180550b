"""The smallest campaign of `scripts/chaos metrics` (docs/benchmarks.md has a large one's figures)."""

from __future__ import annotations

import pytest
from chaos_lib import metrics

pytestmark = pytest.mark.model


def test_kills_cost_no_verdict() -> None:
    """A worker and Redis (emptied, too) are killed at their work: every verdict once, as in an undisturbed run."""
    report = metrics.run(kills=2, seed=9, count=1, sets=1)
    assert report["holds"], report
    assert report["verdicts"] > 0
