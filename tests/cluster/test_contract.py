"""One contract for every cluster: local processes, the fake, a real Slurm by its commands and by pyslurm."""

from __future__ import annotations

import importlib.util
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from dev_cluster.api import Cluster as Site
from support.fake_cluster import FakeCluster, fake_node
from support.slurm_options import slurm_options

from coordinator.cluster import Cluster, Job, JobState, RefusedError
from coordinator.cluster.local import NODE, LocalCluster
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_pyslurm import SlurmApi


@dataclass
class Place:
    """A cluster under test, where its jobs may write, and what it holds."""

    cluster: Cluster
    folder: Path
    node: str
    slots: int
    tick: Callable[[], None] = lambda: None  # lets the time of a fake go by
    real: bool = True  # does it run processes?


def fake_place(folder: Path) -> Place:
    """The fake, on which a `sleep` lasts for ever and everything else no time."""
    fleet = [
        fake_node("n1", gpus=2, cpus=8, memory_mb=64_000),
        fake_node("n2", gpus=2, cpus=8, memory_mb=64_000),
    ]
    cluster = FakeCluster(fleet=fleet, seconds=lambda job, _: math.inf if "sleep" in job.argv[-1] else 0.0)
    return Place(cluster, folder, "n1", 2, tick=lambda: cluster.advance(1.0), real=False)


def slurm_place(make: Callable[[SlurmOptions], Cluster], real: Site, env: Mapping[str, str]) -> Place:
    """A real Slurm, as an ordinary user of its submit side."""
    options = slurm_options(
        partition="gpu",
        cpu_partition="cpu",
        token=f"evalspan:{uuid.uuid4().hex[:8]}",
        command_prefix=tuple(real.user_argv(["x"])[:-1]),
        env={**real.user_env, **env},
    )
    folder = Path(real.user_dir) / uuid.uuid4().hex[:8]
    real.run_as_user(["mkdir", "-p", str(folder)], check=True)
    return Place(make(options), folder, real.gpu_nodes[0], 2)


def pyslurm_place(request: pytest.FixtureRequest) -> Place:
    spec = importlib.util.find_spec("pyslurm")
    if spec is None or spec.origin is None:
        pytest.skip("pyslurm is not installed: it builds on Slurm 25.11 alone")
    real: Site = request.getfixturevalue("slurm_site")
    path = f"{Path(spec.origin).parents[1]}:{real.user_env['PYTHONPATH']}"
    try:
        return slurm_place(SlurmApi, real, {"PYTHONPATH": path})
    except RefusedError as error:
        pytest.skip(str(error))


@pytest.fixture(
    params=[
        "local",
        "fake",
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("pyslurm", marks=pytest.mark.slurm),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(LocalCluster(tmp_path / "jobs", slots=2, gpus=[]), tmp_path, NODE, 2)
        return
    if request.param == "fake":
        yield fake_place(tmp_path)
        return
    if request.param == "slurm":
        yield slurm_place(SlurmCli, request.getfixturevalue("slurm_site"), {})
        return
    yield pyslurm_place(request)


def job(place: Place, script: str, **more: object) -> Job:
    defaults: dict[str, object] = {
        "name": f"es-test-{uuid.uuid4().hex[:8]}",
        "argv": ("sh", "-c", script),
        "log": str(place.folder / "log.%i.txt"),
        "memory_mb": 100,
        "time_limit_seconds": 600,
    }
    return Job(**{**defaults, **more})  # type: ignore[arg-type]


def wait(
    place: Place, name: str, law: Callable[[list[JobState]], bool], seconds: float = 120
) -> list[JobState]:
    """The states of the job called `name` once `law` holds for them."""
    end = time.monotonic() + seconds
    while True:
        place.tick()
        states = sorted((s for s in place.cluster.jobs() if s.name == name), key=lambda s: s.index)
        if law(states):
            return states
        assert time.monotonic() < end, f"not within {seconds} s: {states}"
        time.sleep(0.1)


def only_real(place: Place) -> None:
    if not place.real:
        pytest.skip("the fake runs no processes")


def ended(states: list[JobState]) -> bool:
    return bool(states) and all(s.phase == "ended" for s in states)


def test_a_submitted_job_is_found_by_its_name_until_it_has_ended(place: Place) -> None:
    """The name we gave is how a job is found again; its end is seen."""
    work = job(place, "true")
    job_id = place.cluster.submit(work)
    states = wait(place, work.name, ended)
    assert [(s.job_id, s.index) for s in states] == [(job_id, 0)]
    assert states[0].state in {"COMPLETED", "COMPLETING"}  # Slurm: over, its node not yet swept


def test_every_member_of_an_array_is_listed_and_knows_its_index(place: Place) -> None:
    """A job with count n is one submission and n members; EVALSPAN_INDEX tells each which it is."""
    work = job(place, "echo member $EVALSPAN_INDEX", count=3)
    place.cluster.submit(work)
    states = wait(place, work.name, lambda s: len(s) == 3 and ended(s))
    assert [s.index for s in states] == [0, 1, 2]
    for index in range(3 if place.real else 0):
        assert (place.folder / f"log.{index}.txt").read_text() == f"member {index}\n"


def test_environment_and_arguments_arrive_as_they_were_given(place: Place) -> None:
    """Blanks, quotes, dollars, line breaks and odd bytes in argv and env reach the job unchanged; so does its log."""
    only_real(place)
    odd = "a b'c\"d$HOME\r\n`e` \\ %j é"
    work = job(place, "", argv=("sh", "-c", 'printf "%s|%s" "$1" "$ODD"', "x", odd), env={"ODD": odd})
    place.cluster.submit(work)
    wait(place, work.name, ended)
    assert (place.folder / "log.0.txt").read_bytes().decode() == f"{odd}|{odd}"


def test_a_job_sees_the_variables_that_are_named_and_the_secret_that_it_was_given(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the submitter's: modules arrive, tokens and unnamed variables do not. A judge's key reaches jobs that name it."""
    only_real(place)
    mine = ("MODULEPATH", "BASH_FUNC_module%%", "HF_TOKEN", "OPENAI_API_KEY", "UNNAMED")
    for name in mine:
        monkeypatch.setenv(name, "() {  :\n}")
    for given in ((), ("OPENAI_API_KEY",)):
        log = place.folder / f"{len(given)}.txt"
        argv = ("cat", "/proc/self/environ")
        work = job(place, "", argv=argv, secrets=given, log=str(log), env={"TRIAL_ENV": "own"})
        place.cluster.submit(work)
        wait(place, work.name, ended)
        found = dict(word.partition("=")[::2] for word in log.read_text().split("\0"))
        assert set(mine) & found.keys() == {"MODULEPATH", "BASH_FUNC_module%%", *given}
        assert {"PATH", "HOME"} <= found.keys()
        assert (found["TRIAL_ENV"], "SLURM_JWT" in found) == ("own", False)


def test_gpus_bound_how_many_run_at_once(place: Place) -> None:
    """Members beyond the node's GPUs wait."""
    work = job(place, "sleep 600", count=3, gpus=1, node=place.node)
    job_id = place.cluster.submit(work)
    states = wait(place, work.name, lambda s: sum(x.phase == "running" for x in s) == 2)
    assert [s.phase for s in states].count("pending") == 1
    assert {s.node for s in states if s.phase == "running"} == {place.node}
    free = next(n for n in place.cluster.nodes() if n.name == place.node)
    assert (free.gpus, free.gpus_free) == (2, 0)
    place.cluster.cancel([job_id])
    wait(place, work.name, ended)


def test_cancelling_ends_what_was_named_and_nothing_else(place: Place) -> None:
    """A member, a whole job, and ids that are gone already."""
    work = job(place, "sleep 600", count=2)
    job_id = place.cluster.submit(work)
    wait(place, work.name, lambda s: len(s) == 2 and all(x.phase == "running" for x in s))
    place.cluster.cancel([f"{job_id}_0"])
    states = wait(place, work.name, lambda s: s[0].phase == "ended")
    assert states[1].phase == "running"
    place.cluster.cancel([job_id])
    wait(place, work.name, ended)
    place.cluster.cancel([job_id, "987654"])


def test_sigterm_reaches_the_process_itself(place: Place) -> None:
    """Cancelling gives the job a chance to hand back what it holds."""
    only_real(place)
    trap = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    work = job(place, trap, argv=("bash", "-c", trap))
    job_id = place.cluster.submit(work)

    def log() -> str:
        return "".join(p.read_text() for p in place.folder.glob("log.*.txt"))

    wait(place, work.name, lambda _: "ready" in log())
    place.cluster.cancel([job_id])
    wait(place, work.name, ended)
    end = time.monotonic() + 60
    while "told" not in log():
        assert time.monotonic() < end, log()
        time.sleep(0.1)


def test_what_never_fits_is_refused_in_the_clusters_own_words(place: Place) -> None:
    """More GPUs than any node has, and a node that is not there: refused, and nothing submitted."""
    for bad in (job(place, "true", gpus=99), job(place, "true", node="nowhere")):
        with pytest.raises(RefusedError):
            place.cluster.check(bad)
        with pytest.raises(RefusedError):
            place.cluster.submit(bad)
        assert all(s.phase == "ended" for s in place.cluster.jobs() if s.name == bad.name)


def test_a_job_runs_on_the_node_that_it_names_and_nowhere_else(place: Place) -> None:
    """Also where other nodes are free; its times are known, and it waits until it has started."""
    work = job(place, "sleep 600", node=place.node)
    job_id = place.cluster.submit(work)
    (state,) = wait(place, work.name, lambda s: bool(s) and s[0].phase == "running")
    assert (state.job_id, state.node) == (job_id, place.node)
    assert state.submitted_at is not None
    assert state.started_at is not None
    place.cluster.cancel([job_id])
    wait(place, work.name, ended)


def test_a_name_submitted_twice_is_two_jobs(place: Place) -> None:
    """The cluster does not choose between twins; the caller that asked twice sees both and does."""
    work = job(place, "sleep 600")
    ids = {place.cluster.submit(work), place.cluster.submit(work)}
    states = wait(place, work.name, lambda s: len(s) == 2)
    assert {s.job_id for s in states} == ids
    place.cluster.cancel(sorted(ids))
    wait(place, work.name, ended)


def test_a_check_submits_nothing(place: Place) -> None:
    work = job(place, "true", gpus=1)
    place.cluster.check(work)
    assert not [s for s in place.cluster.jobs() if s.name == work.name]
