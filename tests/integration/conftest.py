"""Whole evaluations by the command line: a tiny model on toy tasks, on this machine and on a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS.parent / "scripts", TESTS / "exactness"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from dev_cluster.api import Cluster, dev_cluster, unavailable  # noqa: E402

from coordinator.services.redis_server import RedisServer  # noqa: E402
from evaljobs.contract.paths import WorkPaths  # noqa: E402

TASKS = TESTS / "exactness" / "tasks"
SUITE = """
name = "toys"
include_path = ["{tasks}"]
batch_size = 8

[[task]]
name = "toy_choice"
[[task]]
name = "toy_sums"
limit = 24
[[task]]
name = "toy_pages"
[[task]]
name = "toy_programs"
"""
NAMES = ("toy_choice", "toy_sums", "toy_pages", "toy_programs")
LIMITS = {"toy_sums": 24}
BOOTSTRAP = 100


@dataclass
class Site:
    """Where `evalspan` is run: how to start it, and folders that its jobs see."""

    argv: Callable[[list[str]], list[str]]
    env: dict[str, str]
    folder: Path
    model: Path
    suite: Path
    options: list[str]
    cluster: Cluster | None = None
    work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.folder / "work"

    def command(self, *arguments: str) -> list[str]:
        return self.argv([*arguments, "--work-dir", str(self.work)])

    def evaluate(self, *more: str) -> list[str]:
        return self.command(
            "eval", str(self.model), "--suite", str(self.suite), "--json", *self.options, *more
        )

    def run(self, command: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pause_a_trial(self, after: int) -> None:
        """Have one trial stand still (SIGSTOP) once it has written so many records, with a shard in hand (`pausing`)."""
        path = [str(TESTS / "integration" / "pausing"), *filter(None, [self.env.get("PYTHONPATH")])]
        more = {"PAUSE_FILE": str(self.folder / "paused"), "PAUSE_AFTER": str(after)}
        self.env |= {"PYTHONPATH": os.pathsep.join(path), **more}

    def paused(self) -> int | None:
        """Pid of the trial that stands still, once one does."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / "paused").read_text())
            place = Path(f"/proc/{pid}")
            ours = str(self.work) in (place / "cmdline").read_text()  # a pid may have been given anew
            if ours and (place / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
        return None

    def stop_redis(self) -> None:
        """And its workers: a coordinator that is told to end while jobs live leaves them what they need."""
        if (pid := self.paused()) is not None:  # a test that failed before it let it go on
            os.kill(pid, signal.SIGCONT)
        for release in self.work.glob("*/release"):
            (release / "workers").touch()
        RedisServer(WorkPaths(self.work)).stop()

    def root(self) -> Path:
        (found,) = (p.parent for p in self.work.glob("*/evaluation.json"))
        return found

    def results(self) -> dict[str, Any]:
        return json.loads((self.root() / "results.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model

    sys.path.insert(0, str(TASKS))
    try:
        import rows
    finally:
        sys.path.pop(0)
    return tiny_model.make(tmp_path_factory.mktemp("toys") / "tiny", rows.corpus())


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of each task, one run a task."""
    from pipeline import Case, lm_eval_run

    from evaljobs.lmeval import run as harness

    harness.quiet_environment(offline=True)
    results = {}
    for name in NAMES:
        entry = {"limit": LIMITS[name]} if name in LIMITS else {}
        case = Case(task=name, entry=entry, include_path=str(TASKS), bootstrap=BOOTSTRAP)
        results[name] = lm_eval_run(toy_model, case, 8).results["results"][name]
    return results


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, slurmd_timeout_s=10, grace_s=0) as cluster:
        yield cluster


CONFIG = """
[trial]
threads = 1
device = "cpu"
memory_mb = 2000
[metric]
bootstrap_iters = {bootstrap}
workers = 1
memory_mb = 2000
[cluster]
poll_seconds = 1.0
"""


@pytest.fixture
def local_site(tmp_path: Path, toy_model: Path) -> Iterator[Site]:
    config = tmp_path / "evalspan.toml"
    config.write_text(CONFIG.format(bootstrap=BOOTSTRAP))
    suite = tmp_path / "toys.toml"
    suite.write_text(SUITE.format(tasks=TASKS))
    program = str(Path(sys.executable).parent / "evalspan")
    env = {**os.environ, "EVALSPAN_CONFIG": str(config)}
    site = Site(lambda a: [program, *a], env, tmp_path, toy_model, suite, ["--slots", "2"])
    yield site
    site.stop_redis()


@pytest.fixture
def slurm_site(slurm_cluster: Cluster, toy_model: Path, tmp_path: Path) -> Site:
    """The ordinary user's side of a real Slurm; model, suite and work folder are the user's own."""
    cluster = slurm_cluster
    folder = Path(cluster.user_dir) / tmp_path.name
    cluster.run_as_user(["mkdir", "-p", str(folder)], check=True)
    texts = {
        "evalspan.toml": CONFIG.format(bootstrap=BOOTSTRAP),
        "toys.toml": SUITE.format(tasks=Path(cluster.repo) / "tests" / "exactness" / "tasks"),
    }
    for name, text in texts.items():
        cluster.run_as_user(["tee", str(folder / name)], input=text, check=True)
    cluster.run_as_user(["mkdir", "-p", str(folder / "tiny")], check=True)
    for file in toy_model.iterdir():  # the user cannot read root's temporary folders
        place = folder / "tiny" / file.name
        shutil.copyfile(file, place)
        place.chmod(0o644)
    env = {**cluster.user_env, "EVALSPAN_CONFIG": str(folder / "evalspan.toml"), "NO_COLOR": "1"}
    options = ["--cluster", "slurm", "--partition", "gpu"]

    def argv(arguments: list[str]) -> list[str]:
        return cluster.user_argv([str(cluster.python), "-m", "coordinator", *arguments], cwd=folder)

    return Site(argv, env, folder, folder / "tiny", folder / "toys.toml", options, cluster)
