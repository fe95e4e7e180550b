"""Names of jobs: one job, one name, whatever the nodes are called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.evaluation.records import JobName


@given(st.sets(st.text("ab-./é", min_size=1, max_size=90), min_size=2, max_size=6))
def test_different_nodes_have_different_job_names(nodes: set[str]) -> None:
    """Also where they share their first 40 characters, or hold what no file name may."""
    names = {str(JobName.of("e-12345678", "stage", node, 0)) for node in nodes}
    assert len(names) == len(nodes)
    assert max(map(len, names)) <= len("es-12345678-stage--a0") + 40


def test_short_names_stand_in_job_names_as_they_are() -> None:
    """`squeue` shows them."""
    assert str(JobName.of("e-12345678", "trial", "n17", 2)) == "es-12345678-trial-n17-a2"
