"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated.parts import record

from coordinator.cluster import RefusedError
from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster


def test_a_refusal_while_no_node_takes_jobs_names_the_nodes_and_their_states() -> None:
    nodes = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
    cluster = FakeCluster(fleet=nodes)
    cluster.fail("check", RefusedError("Requested node configuration is not available"), times=9)
    with pytest.raises(
        OperatorError, match=r"no node with GPUs can be used now: n1, n2 are drained \(new driver\)"
    ):
        check_cluster(cluster, record(1))


def test_a_partition_without_gpus_is_refused_with_what_lists_the_others() -> None:
    with pytest.raises(OperatorError, match=r"no node of the partition has GPUs: .*--partition .*sinfo"):
        check_cluster(FakeCluster(fleet=[fake_node("c1", gpus=0)]), record(1))
