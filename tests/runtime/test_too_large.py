"""A daemon and weights that its nodes' GPUs do not hold: the notice is refused with what to set, and nothing is submitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.daemons import announce, daemon, refused, small, taken, until
from support.fake_cluster import fake_node

from coordinator.cluster.slurm_rules import Hosting
from coordinator.config.schema import Config, NodesConfig, WatchConfig
from coordinator.evaluation.footprint import GB, GPU_RESERVE_BYTES

TIGHT = (GPU_RESERVE_BYTES + 60) / GB  # a GPU that has 60 bytes for weights; the checkpoint has 100


def test_a_notice_of_weights_too_large_is_refused_and_a_larger_node_takes_them(tmp_path: Path) -> None:
    nodes = NodesConfig(gpu_memory_gb={"tight": TIGHT})
    config = Config(nodes=nodes, watch=WatchConfig(roots=(tmp_path,)))
    ears = daemon(tmp_path / "work", config)
    tight, unknown = replace(fake_node("n1"), gpu_type="tight"), fake_node("n2")
    ears._hosting = Hosting(listed=(tight,))
    announce(ears, small(tmp_path / "step-1"))
    ears.tick()
    (large,) = refused(ears)
    assert "a trial's 1 GPU does not hold them" in large.why
    assert "set [trial] gpus_per_trial = 2, which n1 has" in large.why
    assert not ears.coordinator.running
    ears._hosting = Hosting(listed=(tight, unknown))
    announce(ears, small(tmp_path / "step-2"))
    until(ears, lambda: taken(ears))
    assert taken(ears) == ["step-2"]
