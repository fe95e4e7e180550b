"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated.parts import record

from coordinator.cluster import RefusedError
from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster


def test_an_evaluation_is_accepted_while_no_node_takes_jobs() -> None:
    """It waits, as `sbatch` would; a refusal that no node is the reason for is one all the same."""
    nodes = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
    cluster = FakeCluster(fleet=nodes)
    cluster.fail("check", RefusedError("Requested node configuration is not available"), times=9)
    check_cluster(cluster, record(1))
    cluster.fail("check", RefusedError("invalid partition specified: nope"), times=9)
    with pytest.raises(OperatorError, match="invalid partition"):
        check_cluster(cluster, record(1))
