"""One contract for every cluster: local processes, the fake, a real Slurm by its commands and by pyslurm."""

from __future__ import annotations

import importlib.util
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.fake_cluster import FakeCluster, fake_node
from support.slurm_options import on_site

from coordinator.site.cluster import Cluster, Job, RefusedError
from coordinator.site.cluster.local import NODE, LocalCluster
from coordinator.site.cluster.slurm_cli import SlurmApi, SlurmCli


@dataclass
class Place:
    """A cluster under test, where its jobs may write, and what it holds."""

    cluster: Cluster
    folder: Path
    node: str
    slots: int
    tick: Callable[[], None] = lambda: None  # lets the time of a fake go by
    real: bool = True  # does it run processes?


def fake_place(folder):
    """The fake, on which a `sleep` lasts for ever and everything else no time."""
    fleet = [fake_node(name, gpus=2, cpus=8, memory_mb=64_000) for name in ("n1", "n2")]
    cluster = FakeCluster(fleet=fleet, seconds=lambda job, _: math.inf if "sleep" in job.argv[-1] else 0.0)
    return Place(cluster, folder, "n1", 2, tick=lambda: cluster.advance(1.0), real=False)


def slurm_place(kind, real, path=""):
    """A real Slurm, as an ordinary user of its submit side. `path`: for the user's Python."""
    folder = Path(real.user_dir) / uuid.uuid4().hex[:8]
    real.run_as_user(["mkdir", "-p", str(folder)], check=True)
    env = {**real.user_env, "PYTHONPATH": f"{path}:{real.user_env['PYTHONPATH']}"}
    return Place(kind(on_site(real, env=env)), folder, real.gpu_nodes[0], 2)


@pytest.fixture(
    params=["local", "fake", *(pytest.param(n, marks=pytest.mark.slurm) for n in ("slurm", "pyslurm"))]
)
def place(request, tmp_path):
    if request.param == "local":
        return Place(LocalCluster(tmp_path / "jobs", slots=2, gpus=[]), tmp_path, NODE, 2)
    if request.param == "fake":
        return fake_place(tmp_path)
    if request.param == "slurm":
        return slurm_place(SlurmCli, request.getfixturevalue("plain_cluster"))
    spec = importlib.util.find_spec("pyslurm")
    if spec is None or spec.origin is None:
        pytest.skip("pyslurm is not installed: it builds on Slurm 25.11 alone")
    try:
        return slurm_place(
            SlurmApi, request.getfixturevalue("plain_cluster"), str(Path(spec.origin).parents[1])
        )
    except RefusedError as error:
        pytest.skip(str(error))


def job(place, script, **more):
    name = f"es-test-{uuid.uuid4().hex[:8]}"
    log = str(place.folder / f"{name}.%i")
    asked = {
        "name": name,
        "argv": ("sh", "-c", script),
        "log": log,
        "memory_mb": 100,
        "time_limit_seconds": 600,
    }
    return Job(**{**asked, **more})


def wait(place, work, law):
    """The states of the job once `law` holds for them."""
    states = []

    def holds():
        place.tick()
        states[:] = sorted((s for s in place.cluster.jobs() if s.name == work.name), key=lambda s: s.index)
        return law(states)

    wait_until(holds, f"the law of {work.argv}, but {states}")
    return states


def log(work, index=0):
    place = Path(work.log.replace("%i", str(index)))
    return place.read_bytes().decode() if place.exists() else ""


def only_real(place):
    if not place.real:
        pytest.skip("the fake runs no processes")


def ended(states):
    return bool(states) and all(s.phase == "ended" for s in states)


def test_a_submitted_job_is_found_by_its_name_until_it_has_ended(place):
    """The name we gave is how a job is found again; its end is seen. Each member of an array is listed and knows its index;
    a check submits nothing.
    """
    work, checked = job(place, "echo member $EVALSPAN_INDEX", count=3), job(place, "true", gpus=1)
    place.cluster.check(checked)
    job_id = place.cluster.submit(work)
    states = wait(place, work, lambda s: len(s) == 3 and ended(s))
    assert [(s.job_id, s.index) for s in states] == [(job_id, i) for i in range(3)]
    assert {s.state for s in states} <= {"COMPLETED", "COMPLETING"}  # Slurm: over, its node not yet swept
    assert [log(work, i) for i in range(3) if place.real] == [f"member {i}\n" for i in range(3) if place.real]
    assert not [s for s in place.cluster.jobs() if s.name == checked.name]


def test_a_job_gets_its_arguments_and_the_variables_that_are_named(place, monkeypatch):
    """Blanks, quotes, dollars, line breaks and odd bytes arrive unchanged. Of the submitter's variables: modules arrive,
    tokens and unnamed ones do not; a judge's key reaches jobs that name it.
    """
    only_real(place)
    odd = "a b'c\"d$HOME\r\n`e` \\ %j é"
    mine = ("MODULEPATH", "BASH_FUNC_module%%", "HF_TOKEN", "OPENAI_API_KEY", "UNNAMED")
    for name in mine:
        monkeypatch.setenv(name, "() {  :\n}")
    argv = ("bash", "-c", 'printf "%s\\0" "$1"; exec cat /proc/self/environ', "x", odd)
    jobs = [job(place, "", argv=argv, secrets=given, env={"ODD": odd}) for given in ((), ("OPENAI_API_KEY",))]
    for work in jobs:
        place.cluster.submit(work)
    for work in jobs:
        wait(place, work, ended)
        argument, *words = log(work).split("\0")
        found = dict(word.partition("=")[::2] for word in words)
        assert set(mine) & found.keys() == {"MODULEPATH", "BASH_FUNC_module%%", *work.secrets}
        assert {"PATH", "HOME"} <= found.keys()
        assert (argument, found["ODD"], "SLURM_JWT" in found) == (odd, odd, False)


def test_gpus_bound_how_many_run_at_once(place):
    """Members beyond the node's GPUs wait. A job runs on the node that it names, also where other nodes are free; its times
    are known.
    """
    work = job(place, "sleep 600", count=3, gpus=1, node=place.node)
    job_id = place.cluster.submit(work)
    states = wait(place, work, lambda s: sum(x.phase == "running" for x in s) == 2)
    assert [s.phase for s in states].count("pending") == 1
    running = [s for s in states if s.phase == "running"]
    assert {(s.job_id, s.node) for s in running} == {(job_id, place.node)}
    assert all(s.submitted_at is not None and s.started_at is not None for s in running)
    free = next(n for n in place.cluster.nodes() if n.name == place.node)
    assert (free.gpus, free.gpus_free) == (2, 0)
    place.cluster.cancel([job_id])
    wait(place, work, ended)


def test_cancelling_ends_what_was_named_and_nothing_else(place):
    """A member, a whole job, and ids that are gone already. A name submitted twice is two jobs: the cluster does not choose
    between twins; the caller that asked twice sees both and does.
    """
    work = job(place, "sleep 600", count=2)
    first, second = place.cluster.submit(work), place.cluster.submit(work)
    states = wait(place, work, lambda s: len(s) == 4 and all(x.phase == "running" for x in s))
    assert {s.job_id for s in states} == {first, second}
    place.cluster.cancel([f"{first}_0"])
    states = wait(place, work, lambda s: sum(x.phase == "ended" for x in s) == 1)
    assert {(s.job_id, s.index): s.phase for s in states}[first, 0] == "ended"
    place.cluster.cancel([first])
    wait(place, work, lambda s: all(x.phase == ("ended" if x.job_id == first else "running") for x in s))
    place.cluster.cancel([second])
    wait(place, work, ended)
    place.cluster.cancel([first, "987654"])


def test_sigterm_reaches_the_process_itself(place):
    """Cancelling gives the job a chance to hand back what it holds."""
    only_real(place)
    trap = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    work = job(place, trap, argv=("bash", "-c", trap))
    job_id = place.cluster.submit(work)
    wait(place, work, lambda _: "ready" in log(work))
    place.cluster.cancel([job_id])
    wait(place, work, ended)
    wait_until(lambda: "told" in log(work), "it was told")


def test_what_never_fits_is_refused_in_the_clusters_own_words(place):
    """More GPUs than any node has, and a node that is not there: refused, and nothing submitted."""
    for bad in (job(place, "true", gpus=99), job(place, "true", node="nowhere")):
        with pytest.raises(RefusedError):
            place.cluster.check(bad)
        with pytest.raises(RefusedError):
            place.cluster.submit(bad)
        assert all(s.phase == "ended" for s in place.cluster.jobs() if s.name == bad.name)
