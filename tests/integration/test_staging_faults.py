"""Node memory on a real Slurm when what watches over it dies: slurmd, the job with it, the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.api import Cluster
from dev_cluster.testing import sbatch, state, unfinished, wait_until

from coordinator.intake.checkpoint import inspect
from evaljobs.contract.outcomes import Cleared, Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import StageSpec
from evaljobs.contract.storage import read_record

pytestmark = pytest.mark.slurm
PAUSED = Path("tests") / "integration" / "paused.py"


def node_memory(cluster: Cluster, node: str) -> Path:
    """The node's own /dev/shm, seen from outside."""
    return Path("/proc") / str(cluster.node_pids(node)[0]) / "root" / "dev" / "shm"


def ours(cluster: Cluster, node: str) -> list[Path]:
    """What of evalspan's lies in the node's memory; a folder that goes while we look is gone."""
    walk = os.walk(node_memory(cluster, node))
    found = (Path(folder, name) for folder, folders, files in walk for name in (*folders, *files))
    return [place for place in found if "evalspan-" in str(place)]


def stopped(pids: list[int]) -> list[int]:
    """Those that a SIGSTOP holds."""
    held = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                held.append(pid)
    return held


class Precursors:
    """Jobs that stage the toy model, as the coordinator submits them."""

    def __init__(self, site: Any) -> None:
        self.site, self.cluster = site, site.cluster
        self.paths = EvaluationPaths(site.folder / "evaluation")
        self.checkpoint = inspect(site.model)
        for folder in self.paths.folders():
            self.cluster.run_as_user(["mkdir", "-p", str(folder)], check=True)
        (self.site.folder / "lease").touch()

    def submit(self, name: str, program: str) -> str:
        spec = StageSpec(
            name=name,
            evaluation_dir=str(self.paths.root),
            node="n1",
            checkpoint=self.checkpoint,
            lease_file=str(self.site.folder / "lease"),
        )
        place = self.paths.spec(name)
        place.write_text(spec.model_dump_json())
        return sbatch(
            self.cluster,
            f"cd {self.cluster.repo}; exec {self.cluster.python} {program} {place}",
            "-w", "n1", "--no-requeue", "--mem=500", "-o", str(self.paths.log(name)),
        )  # fmt: skip

    def staged(self, name: str) -> Staged:
        place = self.paths.outcome("staged", name)
        wait_until(place.exists, f"{name} has staged")
        return read_record(place, Staged)

    def release(self, name: str, job: str) -> Cleared:
        self.paths.release_file(name).touch()
        wait_until(lambda: self.paths.outcome("cleared", name).exists(), f"{name} has cleared")
        wait_until(lambda: state(self.cluster, job) in ("", "COMPLETED"), f"{job} has ended")
        return read_record(self.paths.outcome("cleared", name), Cleared)


def test_slurmd_killed_while_staging(slurm_site: Any) -> None:
    """slurmd dies alone: the precursor ends its copy and clears it when told. With its job: a successor copies all of it.

    Whatever half a copy was left, nothing of it is published, and nothing is left in the end.
    """
    cluster = slurm_site.cluster
    jobs = Precursors(slurm_site)
    size = jobs.checkpoint.bytes
    first = jobs.submit("first", str(PAUSED))
    wait_until(lambda: bool(stopped(cluster.job_pids(first))), "it copies")
    held = stopped(cluster.job_pids(first))
    cluster.kill_slurmd("n1")
    for pid in held:
        os.kill(pid, signal.SIGCONT)
    assert (jobs.staged("first").rung, jobs.staged("first").storage_bytes) == ("shm", size)
    cluster.start_node("n1")
    assert jobs.release("first", first).freed_bytes >= size
    assert ours(cluster, "n1") == []

    second = jobs.submit("second", str(PAUSED))
    wait_until(lambda: bool(stopped(cluster.job_pids(second))), "it copies")
    cluster.kill_slurmd("n1")
    for pid in cluster.node_pids("n1")[1:]:  # all but the node itself: its memory stays
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert any(p.name == "incoming" for p in ours(cluster, "n1"))
    assert not any(p.name == "manifest.json" for p in ours(cluster, "n1"))
    cluster.start_node("n1")
    cluster.run_as_user(["scancel", second])  # Slurm would find out by itself, a minute later
    third = jobs.submit("third", "-m evaljobs stage")
    assert (jobs.staged("third").rung, jobs.staged("third").storage_bytes) == ("shm", size)
    assert jobs.release("third", third).freed_bytes >= size
    assert ours(cluster, "n1") == []
    assert not jobs.paths.outcome("staged", "second").exists()
    gone = ("", "CANCELLED", "NODE_FAIL")  # the last where slurmd told of it before we did
    wait_until(lambda: state(cluster, second) in gone, "Slurm knows that the second is gone")


def outcomes(site: Any, kind: str) -> dict[str, dict[str, Any]]:
    """Outcomes of the site's one evaluation, by job."""
    found = (json.loads(p.read_text()) for p in site.work.glob(f"*/outcomes/*.{kind}.json"))
    return {outcome["name"]: outcome for outcome in found}


@pytest.mark.model
def test_coordinator_killed_between_staging_and_clearing(slurm_site: Any) -> None:
    """No coordinator comes back within the lease: the holders clear by themselves. Started again, it stages anew and clears in the end."""
    site, cluster = slurm_site, slurm_site.cluster
    site.env |= {"EVALSPAN_STAGE_LEASE_SECONDS": "3", "EVALSPAN_BORROW_MAX_NODES": "1"}
    killed = site.start(site.evaluate())
    wait_until(lambda: bool(outcomes(site, "staged")) or killed.poll() is not None, "it has staged")
    there = [place for node in cluster.gpu_nodes for place in ours(cluster, node)]
    killed.kill()
    killed.communicate()
    trials = [name for name in unfinished(cluster) if "-trial-" in name]
    if trials:  # that it came to submit: they shall not do all the work before the lease is over
        cluster.run_as_user(["scancel", f"--name={','.join(trials)}"], check=True)
    staged = outcomes(site, "staged")
    assert staged
    assert there
    wait_until(lambda: outcomes(site, "cleared").keys() >= staged.keys(), "the holders have cleared")
    assert all("was not renewed for 3 s" in c["reason"] for c in outcomes(site, "cleared").values())
    wait_until(lambda: not any(ours(cluster, node) for node in cluster.gpu_nodes), "node memory is empty")

    site.env["EVALSPAN_STAGE_LEASE_SECONDS"] = "900"
    again = site.start(site.evaluate())
    wait_until(lambda: len(outcomes(site, "staged")) > len(staged), "it has staged again")
    again.send_signal(signal.SIGINT)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 130, out + err
    assert outcomes(site, "cleared").keys() >= outcomes(site, "staged").keys()
    assert not any(ours(cluster, node) for node in cluster.gpu_nodes)
    assert unfinished(cluster) == []
