"""Names of jobs: one job, one name, whatever the nodes are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated.parts import Faults
from support.simulated.world import World

from coordinator.evaluation.records import JobName

CLUSTER = "gpu-node-of-the-very-long-named-cluster-in-building-"


@given(st.sets(st.text("ab-./é", min_size=1, max_size=90), min_size=2, max_size=6))
def test_different_nodes_have_different_job_names(nodes: set[str]) -> None:
    """Also where they share their first 40 characters, or hold what no file name may."""
    names = {str(JobName.of("e-12345678", "stage", node, 0)) for node in nodes}
    assert len(names) == len(nodes)
    assert max(map(len, names)) <= len("es-12345678-stage--a0") + 40


def test_short_names_stand_in_job_names_as_they_are() -> None:
    """`squeue` shows them."""
    assert str(JobName.of("e-12345678", "trial", "n17", 2)) == "es-12345678-trial-n17-a2"


@pytest.mark.parametrize("seed", range(5))
def test_an_evaluation_ends_on_nodes_whose_names_differ_at_their_end_alone(seed: int) -> None:
    """Each of them stages and runs trials under names of its own, with failures and restarts as elsewhere."""
    world = World(seed, Faults(kill=0.02, restart=0.05), nodes=3)
    world.node_names = [f"{CLUSTER}{i:04d}" for i in range(1, 4)]
    world.run_to_scores()
    staged = {i.job.node: name for name, i in world.state.jobs.by_name.items() if i.job.purpose == "stage"}
    assert set(staged) == set(world.node_names)
