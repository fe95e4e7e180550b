"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.simulated.parts import record

from coordinator.cluster import RefusedError
from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.config.schema import ClusterConfig, Config
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster
from coordinator.runtime.wiring import cluster_of


def test_a_refusal_while_no_node_takes_jobs_names_the_nodes_and_their_states() -> None:
    nodes = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
    cluster = FakeCluster(fleet=nodes)
    cluster.fail("check", RefusedError("Requested node configuration is not available"), times=9)
    with pytest.raises(
        OperatorError, match=r"no node with GPUs can be used now: n1, n2 are drained \(new driver\)"
    ):
        check_cluster(cluster, record(1))


def test_several_clusters_in_one_listing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`squeue` would print one table for each, and no job would ever be found again."""
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CLUSTERS", "east,west")
    config = Config(work_dir=tmp_path, cluster=ClusterConfig(kind="slurm"))
    with pytest.raises(OperatorError, match="SLURM_CLUSTERS names several clusters"):
        cluster_of(config)
    monkeypatch.setenv("SLURM_CLUSTERS", "east")
    assert isinstance(cluster_of(config), SlurmCli)
