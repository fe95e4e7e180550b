"""The law of a campaign's dealing: each fault once a seed, and never two that break the same part in a run."""

from __future__ import annotations

from chaos_lib.faults import FAULTS, deal
from hypothesis import given
from hypothesis import strategies as st


@given(
    names=st.lists(st.sampled_from(sorted(FAULTS)), unique=True),
    seed=st.integers(0, 1000),
    together=st.integers(1, 6),
)
def test_every_fault_is_dealt_once_and_none_meets_one_of_its_part(
    names: list[str], seed: int, together: int
) -> None:
    """Runs are within their size, the same for the same seed, and alone where one is asked for."""
    runs = deal(names, seed, together)
    assert sorted(name for run in runs for name in run) == sorted(names)
    assert runs == deal(names, seed, together)
    for run in runs:
        parts = [part for name in run for part in FAULTS[name].breaks]
        assert len(run) <= together
        assert len(parts) == len(set(parts))
    if together == 1:
        assert [name for (name,) in runs] == names
