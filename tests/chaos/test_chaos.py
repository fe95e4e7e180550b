"""The table of faults on a whole evaluation, and how a campaign deals them (large ones: scripts/chaos, docs/benchmarks.md)."""

import pytest
from chaos_lib.campaign import PATIENCE_S, disturbed, kept
from chaos_lib.faults import FAULTS, deal
from chaos_lib.site import TASKS
from chaos_lib.site import place as make_place
from dev_cluster.api import unavailable
from hypothesis import given
from hypothesis import strategies as st
from support import toys

EVENTS = 50  # of an undisturbed run, about


@pytest.fixture(scope="module")
def place():
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with make_place() as made:
        yield made


@pytest.fixture(scope="module")
def expected(place):
    """lm-eval's own results of each task, one run a task."""
    return {"tiny": toys.expected(place.models[0], TASKS)}


@pytest.mark.slurm
@pytest.mark.model
@pytest.mark.timeout(2 * PATIENCE_S)  # a run that its patience ends says why
def test_scores_are_lm_evals_and_nothing_is_left(place, expected):
    """Each shard counted once, every digit the same; no job, no process, no weights in any node's memory. All other faults:
    `scripts/chaos`.
    """
    faults = ("node-killed-in-trial", "slurmd-killed", "redis-killed-and-wiped")
    faults += ("squeue-unknown-state", "worker-and-horse-killed")
    verdict = disturbed(place, faults, 1, expected, EVENTS)
    assert verdict["broken"] == []
    assert "node-killed-in-trial" in verdict["struck"]


@given(
    names=st.lists(st.sampled_from(sorted(FAULTS)), unique=True),
    seed=st.integers(0, 1000),
    together=st.integers(1, 6),
)
def test_every_fault_is_dealt_once_and_none_meets_one_of_its_part(names, seed, together):
    """Runs are within their size, the same for the same seed, and alone where one is asked for."""
    runs = deal(names, seed, together)
    assert sorted(name for run in runs for name in run) == sorted(names)
    assert runs == deal(names, seed, together)
    for run in runs:
        parts = [part for name in run for part in FAULTS[name].breaks]
        assert len(run) <= together
        assert len(parts) == len(set(parts))
    assert together > 1 or [name for (name,) in runs] == names


def test_a_campaign_that_was_cut_off_keeps_its_finished_runs(tmp_path):
    """A row that was being written is no run."""
    file = tmp_path / "rows"
    assert kept(str(file)) == kept("") == []
    file.write_text('{"fault": "none", "seed": 0}\n{"fault": "clock-back", "seed": 3}\n{"fault": "clo')
    for _ in range(2):
        assert [(row["fault"], row["seed"]) for row in kept(str(file))] == [("none", 0), ("clock-back", 3)]
        with file.open("a") as more:
            more.write('{"fault": "again"')
