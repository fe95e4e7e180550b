"""Laws of `scripts/dev-cluster`: what it prints, what it refuses, and that nothing is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from dev_cluster import procs, registry
from dev_cluster.api import REPO, Cluster
from dev_cluster.testing import wait_until

pytestmark = pytest.mark.slurm
# The system's interpreter where it is new enough: the script may need nothing from a venv.
IS_NEW = ["/usr/bin/python3", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
PYTHON = sys.executable if subprocess.run(IS_NEW, check=False).returncode else IS_NEW[0]
SMALL = ("--nodes", "1", "--gpus", "1", "--cpu-nodes", "0", "--cpus", "4")
HIDE = 'mount --bind /dev/null "$(PATH=/usr/sbin:/usr/bin command -v {})" && exec "$@"'  # from what follows


def tool(*argv: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    line = [*before, PYTHON, str(REPO / "scripts" / "dev-cluster"), *argv]
    return subprocess.run(line, check=False, text=True, capture_output=True, timeout=240)


def record(name: str) -> registry.Record:
    found = registry.read(name)
    assert found is not None
    return found


def ours(conf: Path | str) -> list[int]:
    return [p.pid for p in procs.everyone() if procs.environment(p.pid).get("SLURM_CONF") == str(conf)]


@pytest.fixture
def name(plain: Cluster) -> Iterator[str]:
    """Of a cluster that goes with the test; the one beside it is unharmed."""
    name = f"cli-{os.getpid()}"
    yield name
    if registry.read(name) is not None:
        tool("down", "--name", name)
    assert plain.run_as_user(["scontrol", "ping"]).returncode == 0


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
    cluster = Cluster(record(name))
    wait_until(lambda: bool(cluster.job_pids(ran.stdout.strip())), "the job runs")
    assert ours(shown["slurm_conf"])
    text = tool("status", "--name", name).stdout
    assert "n1" in text
    assert "DEAD" not in text

    down = tool("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert ours(shown["slurm_conf"]) == []
    assert shown["dir"] not in Path("/proc/self/mountinfo").read_text()
    assert not Path(shown["dir"]).exists()
    with socket.create_server(("0.0.0.0", shown["port"])):  # noqa: S104
        pass


@pytest.mark.parametrize(
    ("without", "line", "says"),
    [
        ("", "up --nodes 0", "--nodes"),
        ("", "up --spare-mode SUSPEND", "REQUEUE or CANCEL"),
        ("", "up --dir /tmp/evalspan-x --private-shm", "another --dir"),
        ("", "up --venv /nowhere", "bin/python"),
        ("", "up --user root", "ordinary user"),
        ("", "up --name PLAIN", "there already: scripts/dev-cluster down --name PLAIN"),
        ("", "up --port TAKEN", "port TAKEN is taken"),
        ("", "up --dir FILLED", "not empty"),
        ("", "down --name unknown", "no cluster named unknown"),
        ("root", "up", "needs root"),
        ("munged", "up", "munged is missing: apt-get install"),
        ("slurmctld", "up", "slurmctld is missing: apt-get install"),
    ],
)
def test_what_cannot_be_is_refused(  # noqa: PLR0917 (fixtures, and a row)
    name: str, plain: Cluster, tmp_path: Path, without: str, line: str, says: str
) -> None:
    """Exit 2 and one line that names the way out, before anything is started; a folder with something in it stays."""
    (tmp_path / "mine").touch()
    before = ["unshare", "--mount", "sh", "-c", HIDE.format(without), "sh"] if without else []
    before = plain.user_argv([]) if without == "root" else before
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"PLAIN": plain.name, "TAKEN": str(taken.getsockname()[1]), "FILLED": str(tmp_path)}
        for word, value in values.items():
            line, says = line.replace(word, value), says.replace(word, value)
        command, *options = line.split()
        done = tool(command, "--name", name, *SMALL * (command == "up"), *options, before=before)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert (tmp_path / "mine").exists()
    assert registry.read(name) is None


def test_a_dead_test_run_leaves_no_cluster_for_the_next(name: str) -> None:
    """The cluster of a killed process is ended by `down --orphans`, which leaves that of a living one (`plain`)."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r})\n"
        "import os, signal\n"
        "from dev_cluster.api import dev_cluster\n"
        f"with dev_cluster(name={name!r}, nodes=1, gpus=1, cpu_nodes=0, cpus=4):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    root = record(name).root
    done = tool("down", "--orphans")
    assert (done.returncode, name in done.stdout) == (0, True), done.stderr
    assert not root.exists()
    assert registry.read(name) is None


@pytest.mark.parametrize("part", ["munged", "login", "slurmctld", "n1.unshare", "n1", "n3"])
def test_an_up_killed_halfway_is_undone_by_down(name: str, part: str) -> None:
    """SIGKILL to `up` right after any part started: `down` ends that part and all before it, and no other process."""
    line = [sys.executable, str(REPO / "scripts" / "dev-cluster"), "up", "--name", name]
    line += ["--nodes", "3", "--cpu-nodes", "0"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        wait_until(Path(f"/run/evalspan-dev/{name}.json").exists, "the registration")
        layout = record(name).layout
        wait_until((layout.run / f"{part}.json").exists, f"the pid file of {part}")
        up.kill()
    assert tool("down", "--name", name).returncode == 0
    assert ours(layout.slurm_conf) == []
    assert not layout.root.exists()


def test_the_machine_is_no_member_of_a_cluster() -> None:
    """The list of a namespace's processes, which is made to be killed, is empty for the machine's own namespaces."""
    assert procs.members(os.getpid(), "pid") == []
    assert procs.members(os.getpid(), "mnt") == []
