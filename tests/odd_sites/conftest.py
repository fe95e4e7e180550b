"""Sites on which a precursor is of no use: real clusters, and the toy evaluation of tests/integration."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PLACE = Path(__file__).resolve().parents[1] / "integration" / "conftest.py"
_spec = importlib.util.spec_from_file_location("evalspan_toy_sites", _PLACE)
assert _spec is not None
assert _spec.loader is not None
toys = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = toys  # its dataclass looks its own module up
_spec.loader.exec_module(toys)

from dev_cluster.api import Cluster, dev_cluster, unavailable  # noqa: E402

toy_model = toys.toy_model
expected = toys.expected
MakeSite = Callable[..., Any]


@pytest.fixture(scope="session")
def odd_cluster() -> Iterator[Cluster]:
    """All oddities at once: private /dev/shm, whole nodes, no job without a GPU beside them."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(
        nodes=2, gpus=2, cpu_nodes=1, private_shm=True, exclusive=True, gpu_jobs_only=True
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def plain_cluster() -> Iterator[Cluster]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tight_cluster() -> Iterator[Cluster]:
    """n1 has 400 MiB; every partition has MaxTime one hour."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, small_mb=400) as cluster:
        for partition in ("gpu", "spare", "cpu"):
            argv = ["scontrol", "update", f"partitionname={partition}", "maxtime=60"]
            subprocess.run(argv, check=True, env=cluster.env, timeout=60)
        yield cluster


@pytest.fixture
def make_site(toy_model: Path, tmp_path: Path) -> MakeSite:
    """The ordinary user's folder on a cluster, with the toy model, its suite and a config."""

    def make(cluster: Cluster, *, more: str = "") -> Any:
        folder = Path(cluster.user_dir) / tmp_path.name
        cluster.run_as_user(["mkdir", "-p", str(folder / "tiny")], check=True)
        config = toys.CONFIG.format(bootstrap=toys.BOOTSTRAP) + 'cpu_partition = "cpu"\n' + more
        suite = toys.SUITE.format(tasks=Path(cluster.repo) / "tests" / "exactness" / "tasks")
        for name, text in {"evalspan.toml": config, "toys.toml": suite}.items():
            cluster.run_as_user(["tee", str(folder / name)], input=text, check=True)
        for file in toy_model.iterdir():  # the user cannot read root's temporary folders
            place = folder / "tiny" / file.name
            shutil.copyfile(file, place)
            place.chmod(0o644)
        env = {**cluster.user_env, "EVALSPAN_CONFIG": str(folder / "evalspan.toml"), "NO_COLOR": "1"}
        options = ["--cluster", "slurm", "--partition", "gpu"]

        def argv(arguments: list[str]) -> list[str]:
            return cluster.user_argv([str(cluster.python), "-m", "coordinator", *arguments], cwd=folder)

        return toys.Site(argv, env, folder, folder / "tiny", folder / "toys.toml", options, cluster)

    return make
