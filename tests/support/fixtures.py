"""Fixtures of more than one folder: the tiny model, lm-eval's own results, a real Valkey, node memory, real clusters."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from dev_cluster import accounting, real_site
from dev_cluster.api import DevClusterError

from coordinator.runtime import service
from evaljobs.contract.paths import WorkPaths
from evaljobs.lmeval import quiet_environment
from evaljobs.queue import redis_client
from support import sites
from support.exactness import pipeline
from support.inputs import asking
from support.node_memory import NodeMemory
from support.served import served_work
from support.sites import cluster

MakeSite = Callable[..., sites.Site]


@pytest.fixture(scope="session")
def model_dir(toy_model):
    quiet_environment(offline=True)
    return toy_model


@pytest.fixture(scope="session")
def lm_eval_outcome(model_dir):
    known = {}

    def outcome(case, batch_size):
        key = f"{case!r}@{batch_size}"
        if key not in known:
            known[key] = pipeline.lm_eval_run(model_dir, case, batch_size)
        return known[key]

    return outcome


@pytest.fixture(scope="session")
def shared_work():
    """A work folder whose server serves the whole session: tests use evaluations of their own."""
    with served_work("redis") as made:
        yield made


@pytest.fixture
def client(shared_work):
    with redis_client.make_client(redis_client.read_address(shared_work.redis_address)) as made:
        yield made


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A prologue of trials by which jobs are forked from interpreters that have imported torch and lm-eval. Not for a test that
    looks at a job's command line, or where its processes end.
    """
    with asking.warm(tmp_path_factory.mktemp("warm")) as command:
        yield f'exec {command} "$@"\n'


@pytest.fixture
def work(tmp_path):
    """A work folder without a server."""
    return WorkPaths(tmp_path / "work")


@pytest.fixture
def open_umask():
    """One by which all users could write to what is made."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def open_folder():
    """A folder in which anybody may look; pytest's own are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def every_tick(monkeypatch):
    """A daemon looks at each tick, and what does not change for a tick has stopped changing."""
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(service, "STABLE_SECONDS", 0.0)


@pytest.fixture
def own_settings(tmp_path, monkeypatch, every_tick):
    """The command line has the settings that `Config()` has, but for a work folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVALSPAN_CONFIG", raising=False)
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def world(tmp_path):
    """A world of its own for each test, in real node memory."""
    root = Path(tempfile.mkdtemp(prefix="staging-test-", dir="/dev/shm"))
    (root / "foreign").write_text("not ours")
    try:
        yield NodeMemory(folder=tmp_path, root=root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def odd_cluster():
    """All oddities at once: private /dev/shm, whole nodes, no job without a GPU beside them."""
    shape = {"private_shm": True, "exclusive": True, "gpu_jobs_only": True}
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, **shape) as made:
        yield made


@pytest.fixture(scope="session")
def plain_cluster():
    """An ordinary site: two GPU nodes, one CPU node; mute nodes are noticed soon."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=5, grace_s=0) as made:
        yield made


@pytest.fixture(scope="session")
def strict_cluster():
    """Cgroups, accounts with limits, MaxTime one hour that is enforced, and n1 with 400 MiB. Its control groups, database and
    folder go with it.
    """
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))
    if not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    shape = {"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL", "small_mb": 400}
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=16, slurmd_timeout_s=5, **shape) as made:
        yield made
    assert not made.dir.exists()
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n*/uid_*"))


@pytest.fixture(scope="session")
def tight_cluster():
    """n1 has 400 MiB; every partition has MaxTime one hour."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, small_mb=400) as made:
        for partition in ("gpu", "spare", "cpu"):
            made.update(f"partitionname={partition}", "maxtime=60")
        yield made


@pytest.fixture
def watched(expected):
    """lm-eval's own results of the tasks of `site`."""
    return {task: expected[task] for task in sites.WATCHED}


@pytest.fixture
def site(tmp_path, toy_model, warm):
    """A local site whose settings watch a folder of checkpoints, `run`, which is empty still."""
    watch = f'[watch]\nfolders = ["{tmp_path}/run"]\nsuite = "{tmp_path}/toys.toml"\n'
    site = sites.local(tmp_path, toy_model, entries=sites.WATCHED, more=watch)
    site.env |= {"EVALSPAN_CLUSTER_SLOTS": "2", "EVALSPAN_TRIAL_PROLOGUE": warm}
    yield site
    site.end_workers()


@pytest.fixture
def make_site(toy_model, tmp_path):
    """The ordinary user's folder on a cluster, with the toy model, its suite and a config."""

    def make(cluster, *, more=""):
        return sites.on_cluster(cluster, tmp_path.name, toy_model, more='cpu_partition = "cpu"\n' + more)

    return make
