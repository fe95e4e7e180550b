"""Laws of `scripts/dev-cluster`: what it prints, what it refuses, and that nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster import procs, registry
from dev_cluster.api import REPO, Cluster
from dev_cluster.testing import wait_until

pytestmark = pytest.mark.slurm
# The system's interpreter where it is new enough: the script may need nothing from a venv.
SYSTEM = "/usr/bin/python3"
SMALL = ("--nodes", "1", "--gpus", "1", "--cpu-nodes", "0", "--cpus", "4")


def tool(*argv: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    new = (
        subprocess.run(
            [SYSTEM, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False
        ).returncode
        == 0
    )
    python = SYSTEM if new else sys.executable
    line = [*before, python, str(REPO / "scripts" / "dev-cluster"), *argv]
    return subprocess.run(line, check=False, text=True, capture_output=True, timeout=240)


@pytest.fixture
def name(machine: None) -> Iterator[str]:
    name = f"cli-{os.getpid()}"
    yield name
    if registry.read(name) is not None:
        tool("down", "--name", name)


def test_up_status_down_leave_nothing(name: str) -> None:
    """After `down`, with a job and a command of the user still running: no process, mount, folder or port is left."""
    up = tool("up", "--name", name, *SMALL, "--json")
    assert up.returncode == 0, up.stderr
    shown = json.loads(up.stdout)
    assert [(node["name"], node["state"], node["gpus"]) for node in shown["nodes"]] == [("n1", "idle", 1)]
    assert f"export SLURM_CONF={shown['slurm_conf']}" in Path(shown["env_file"]).read_text()
    ran = tool("run", "--name", name, "--", "sbatch", "--parsable", "--wrap", "exec sleep 4321")
    assert ran.returncode == 0, ran.stderr
    tool("run", "--name", name, "--", "sh", "-c", "setsid sleep 4322 >/dev/null 2>&1 &")
    cluster = Cluster(record=_record(name))
    wait_until(lambda: bool(cluster.job_pids(ran.stdout.strip())), "the job runs")
    assert _ours(shown["slurm_conf"])
    text = tool("status", "--name", name).stdout
    assert "n1" in text
    assert "DEAD" not in text

    down = tool("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert _ours(shown["slurm_conf"]) == []
    assert shown["dir"] not in Path("/proc/self/mountinfo").read_text()
    assert not Path(shown["dir"]).exists()
    with socket.create_server(("0.0.0.0", shown["port"])):  # noqa: S104
        pass


def _record(name: str) -> registry.Record:
    record = registry.read(name)
    assert record is not None
    return record


def _ours(conf: str) -> list[int]:
    return [p.pid for p in procs.everyone() if procs.environment(p.pid).get("SLURM_CONF") == conf]


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_a_second_up_of_the_same_name_is_refused(plain: Cluster) -> None:
    """Run twice: exit 2, the way out named, the running cluster unharmed."""
    _refused(tool("up", "--name", plain.name, *SMALL), "there already", f"down --name {plain.name}")
    assert plain.run_as_user(["scontrol", "ping"]).returncode == 0


def test_a_filled_folder_is_refused_and_kept(name: str) -> None:
    """A --dir with something in it is never taken, for `down` would remove it."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        (folder / "mine").touch()
        _refused(tool("up", "--name", name, "--dir", str(folder), *SMALL), "not empty")
        assert (folder / "mine").exists()
    finally:
        shutil.rmtree(folder)


def test_an_ordinary_user_is_told_to_be_root(plain: Cluster) -> None:
    """Not root: exit 2 and what to do."""
    line = [SYSTEM, str(plain.repo / "scripts" / "dev-cluster"), "up"]
    _refused(plain.run_as_user(line), "needs root")


@pytest.mark.parametrize("missing", ["munged", "slurmctld"])
def test_a_missing_program_is_named_with_its_package(name: str, missing: str) -> None:
    """Without munge or Slurm: exit 2 and the apt command."""
    hide = f'mount --bind /dev/null {shutil.which(missing, path="/usr/sbin:/usr/bin")} && exec "$@"'
    _refused(
        tool("up", "--name", name, *SMALL, before=("unshare", "--mount", "sh", "-c", hide, "sh")),
        f"{missing} is missing",
        "apt-get install",
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--nodes", "0"), "--nodes"),
        (("--part-limits", "SOME"), "NO or ANY or ALL"),
        (("--dir", "/tmp/evalspan-x", "--private-shm"), "another --dir"),
    ],
)
def test_wrong_options_are_refused(name: str, options: tuple[str, ...], word: str) -> None:
    """Each wrong option: exit 2, one line, before anything is started."""
    _refused(tool("up", "--name", name, *options), word)
    assert registry.read(name) is None


def test_an_unknown_name_is_refused(machine: None) -> None:
    """`down` of what is not there: exit 2, the names that are."""
    _refused(tool("down", "--name", "unknown"), "no cluster named unknown")


def test_a_dead_test_run_leaves_no_cluster_for_the_next(name: str, plain: Cluster) -> None:
    """The cluster of a killed process is ended by `down --orphans`, which leaves that of a living one."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r})\n"
        "import os, signal\n"
        "from dev_cluster.api import dev_cluster\n"
        f"with dev_cluster(name={name!r}, nodes=1, gpus=1, cpu_nodes=0, cpus=4):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    root = _record(name).root
    done = tool("down", "--orphans")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert not root.exists()
    assert registry.read(name) is None
    assert plain.name not in done.stdout
    assert registry.read(plain.name) is not None
    assert plain.run_as_user(["scontrol", "ping"]).returncode == 0


@pytest.mark.parametrize("part", ["munged", "login", "slurmctld", "n1.unshare", "n1", "n3"])
def test_an_up_killed_halfway_is_undone_by_down(name: str, part: str) -> None:
    """SIGKILL to `up` right after any part started: `down` ends that part and all before it, and no other process."""
    record_file = Path(f"/run/evalspan-dev/{name}.json")
    line = [
        sys.executable,
        str(REPO / "scripts" / "dev-cluster"),
        "up",
        "--name",
        name,
        "--nodes",
        "3",
        "--cpu-nodes",
        "0",
    ]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        wait_until(record_file.exists, "the registration")
        record = _record(name)
        wait_until((record.layout.run / f"{part}.json").exists, f"the pid file of {part}")
        up.kill()
    assert tool("down", "--name", name).returncode == 0
    assert _ours(str(record.layout.slurm_conf)) == []
    assert not record.root.exists()


def test_the_machine_is_no_member_of_a_cluster(machine: None) -> None:
    """The list of a namespace's processes, which is made to be killed, is empty for the machine's own namespaces."""
    assert procs.members(os.getpid(), "pid") == []
    assert procs.members(os.getpid(), "mnt") == []
