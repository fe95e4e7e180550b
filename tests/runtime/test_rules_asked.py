"""What a site does not give: a partition that Slurm lacks, and GPUs that do not hold the weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons import announce, daemon, refused, small, taken, until
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on

from coordinator.base import clock
from coordinator.cluster.slurm_rules import Hosting
from coordinator.config.schema import ClusterConfig, Config, NodesConfig, WatchConfig
from coordinator.evaluation.footprint import GB, GPU_RESERVE_BYTES
from coordinator.intake import pending
from coordinator.runtime.service import RULES_SECONDS, Service

# the commands' answers: settings, then partitions; each call is a line in `calls`
SCONTROL = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in *partition*) echo "PartitionName=gpu Default=YES State=UP" ;; *) echo "SelectType = select/cons_tres" ;; esac
"""


def test_a_wrong_partition_is_a_pending_checkpoints_reason_and_slurm_is_not_asked_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three questions at the first look, three after RULES_SECONDS, none between; nothing is accepted, and that the checkpoint
    changed since its last evaluation is not logged at each look.
    """
    caplog.set_level("INFO")
    before = daemon(tmp_path / "work")
    announce(before, small(tmp_path / "step-1"))
    before.tick()
    assert len(before.coordinator.running) == 1
    shutil.copytree(small(tmp_path / "later", seed=1), tmp_path / "step-1", dirs_exist_ok=True)
    calls, commands = tmp_path / "calls", tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(SCONTROL.format(calls=calls))
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    config = Config(
        cluster=ClusterConfig(kind="slurm", partition="nope"), watch=WatchConfig(roots=(tmp_path,))
    )
    ears = Service(coordinator_on(tmp_path / "work", FakeCluster(fleet=[])), config)
    announce(ears, tmp_path / "step-1")
    asked = []
    for seconds in (0.0, 2.0, RULES_SECONDS / 2, RULES_SECONDS + 1.0):
        monkeypatch.setattr(clock, "now", lambda seconds=seconds: now + seconds)
        ears.tick()
        asked.append(len(calls.read_text().splitlines()))
    assert asked == [3, 3, 3, 6]
    (waiting,) = pending.read(ears.paths, 0.0).waiting
    assert (
        waiting.why
        == "the cluster has no partition 'nope' (--partition, [cluster] partition); it has: gpu (default)"
    )
    assert not ears.coordinator.running
    assert "changed since" not in caplog.text


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
