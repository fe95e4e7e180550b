"""A few of the campaign's faults, some at once, each at one seeded moment (all of them: scripts/chaos, docs/benchmarks.md)."""

from __future__ import annotations

from typing import Any

import pytest
from chaos_lib.evaluations import PATIENCE_S, disturbed
from chaos_lib.site import Place

# a run that its patience ends says why
pytestmark = [pytest.mark.slurm, pytest.mark.model, pytest.mark.timeout(2 * PATIENCE_S)]
EVENTS = 50  # of an undisturbed run, about


@pytest.mark.parametrize(
    "faults",
    [
        ("record-corrupted", "squeue-unknown-state", "worker-killed"),
        ("disk-full", "record-torn", "squeue-garbage"),
    ],
    ids="+".join,
)
def test_scores_are_lm_evals_and_nothing_is_left(
    faults: tuple[str, ...], place: Place, expected: dict[str, Any]
) -> None:
    """Each shard counted once, every digit the same; no job, no process, no weights in any node's memory."""
    verdict = disturbed(place, faults, 1, expected, EVENTS)
    assert verdict["broken"] == []
    assert verdict["struck"], "no fault found its moment"
