"""Laws of nodes whose Gres names no GPU type: their jobs name the GPUs, and predictions are for those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.loops import another, coordinator_on, until
from support.simulated.parts import record

from coordinator.evaluation.state import NodeUse
from coordinator.planning.make_plan import hardware_of
from coordinator.runtime import gpu_names
from evaljobs.contract.outcomes import Staged
from evaljobs.contract.storage import write_outcome
from evaljobs.staging.capacity import gpu_name

A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("nodes", "hardware"),
    [
        ([NodeUse(name="n1", lanes=1)], "gpu"),
        ([NodeUse(name="n1", lanes=1), NodeUse(name="n2", lanes=1, gpu_name=A100)], A100),
        ([NodeUse(name="n1", lanes=1, gpu_type="h100")], "h100"),
        ([NodeUse(name="local", lanes=1, gpu_type="cpu-slot")], "cpu"),
    ],
)
def test_a_gpu_without_a_type_is_never_predicted_as_a_cpu(nodes: list[NodeUse], hardware: str) -> None:
    assert hardware_of(nodes) == hardware


def test_a_job_without_gpus_reads_their_name_from_the_driver(tmp_path: Path) -> None:
    folder = tmp_path / "0000:07:00.0"
    folder.mkdir()
    (folder / "information").write_text(f"Model: \t\t {A100}\nIRQ:   \t\t 139\nGPU UUID: \t GPU-1\n")
    assert gpu_name(tmp_path) == A100
    assert gpu_name(tmp_path / "no-driver") == ""


@pytest.mark.parametrize("typed", [False, True])
def test_the_name_that_a_precursor_reports_is_kept_for_later_evaluations(tmp_path: Path, typed: bool) -> None:
    """Where Gres has a type, that one stays the key, and nothing is kept."""
    gres = "a100" if typed else ""
    cluster = FakeCluster(fleet=[replace(fake_node("n1", gpus=2), gpu_type=gres)])
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record())
    coordinator.tick()
    (precursor,) = (j for j in cluster.submitted if j.purpose == "stage")
    staged = Staged(
        name=precursor.name, node="n1", path="/s", rung="shm", bytes=1, storage_bytes=1, seconds=1, gpu_name=A100
    )  # fmt: skip
    write_outcome(running.paths, staged)
    coordinator.tick()
    assert hardware_of(running.state.nodes.by_name.values()) == (gres or A100)
    path = coordinator.performer.site.paths.gpu_names
    gpu_names.keep(path, running.state)
    assert gpu_names.read(path) == ({} if typed else {"n1": A100})
    coordinator.cancel(running.state.evaluation_id, "done with")
    for job in cluster.members:
        job.state = "CANCELLED"
    later = coordinator.accept(another(record(), 1))
    until(coordinator, lambda: bool(later.state.nodes.by_name))
    assert later.state.nodes.by_name["n1"].gpu_type == (gres or A100)
