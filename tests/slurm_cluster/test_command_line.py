"""Laws of `scripts/dev-cluster`: what it prints, what it refuses, and that nothing is left."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster import procs, registry
from dev_cluster.api import REPO, Cluster, unavailable
from dev_cluster.testing import wait_until
from support.goldens import deep

pytestmark = pytest.mark.slurm
# The system's interpreter where it is new enough: the script may need nothing from a venv.
SYSTEM = "/usr/bin/python3"
SMALL = ("--nodes", "1", "--gpus", "1", "--cpu-nodes", "0", "--cpus", "4")


def tool(*argv, before=()):
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
def name():
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    name = f"cli-{os.getpid()}"
    yield name
    if registry.read(name) is not None:
        tool("down", "--name", name)


def test_up_status_down_leave_nothing(name):
    """After `down`, with a job and a command of the user still running: no process, mount, folder or port is left."""
    up = tool("up", "--name", name, *SMALL)
    assert up.returncode == 0, up.stderr
    record = _record(name)
    conf = str(record.layout.slurm_conf)
    assert f"export SLURM_CONF={conf} " in up.stdout
    assert f"export SLURM_CONF={conf}\n" in record.layout.env_file.read_text()
    ran = tool("run", "--name", name, "--", "sbatch", "--parsable", "--wrap", "exec sleep 4321")
    assert ran.returncode == 0, ran.stderr
    tool("run", "--name", name, "--", "sh", "-c", "setsid sleep 4322 >/dev/null 2>&1 &")
    cluster = Cluster(record=record)
    wait_until(lambda: bool(cluster.job_pids(ran.stdout.strip())), "the job runs")
    assert _ours(conf)
    said = [f"{name}: all daemons run", f"  export SLURM_CONF={conf}", "  n1    mixed"]
    assert tool("status", "--name", name).stdout.splitlines() == said

    down = tool("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert _ours(conf) == []
    assert str(record.root) not in Path("/proc/self/mountinfo").read_text()
    assert not record.root.exists()
    with socket.create_server(("0.0.0.0", record.base_port)):  # noqa: S104
        pass


def _record(name):
    record = registry.read(name)
    assert record is not None
    return record


def _ours(conf):
    return [p.pid for p in procs.everyone() if procs.environment(p.pid).get("SLURM_CONF") == conf]


def _refused(done, *words):
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


# options of `up`, and what the line names
WRONG = {
    "--nodes 0": "--nodes",
    "--part-limits SOME": "NO or ANY or ALL",
}


def test_what_cannot_be_is_refused_in_one_line_before_anything_is_started(name, plain_cluster):
    """Exit code 2. A name that is taken or unknown, a program
    that is missing, an ordinary user, wrong options."""
    up = ("up", "--name", name, *SMALL)
    for options, word in WRONG.items():
        _refused(tool("up", "--name", name, *options.split()), word)
    _refused(tool("down", "--name", "unknown"), "no cluster named unknown")
    again = tool("up", "--name", plain_cluster.name, *SMALL)
    _refused(again, "there already", f"down --name {plain_cluster.name}")
    as_user = [SYSTEM, str(plain_cluster.repo / "scripts" / "dev-cluster"), "up"]
    _refused(plain_cluster.run_as_user(as_user), "needs root")
    assert plain_cluster.run_as_user(["scontrol", "ping"]).returncode == 0
    for missing in ("munged", "slurmctld"):
        hide = f'mount --bind /dev/null {shutil.which(missing, path="/usr/sbin:/usr/bin")} && exec "$@"'
        done = tool(*up, before=("unshare", "--mount", "sh", "-c", hide, "sh"))
        _refused(done, f"{missing} is missing", "apt-get install")
    assert registry.read(name) is None


def test_a_dead_test_run_leaves_no_cluster_for_the_next(name, plain_cluster):
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
    assert plain_cluster.name not in done.stdout
    assert registry.read(plain_cluster.name) is not None
    assert plain_cluster.run_as_user(["scontrol", "ping"]).returncode == 0


@pytest.mark.parametrize(
    "part", ["login", "n1.unshare", *(pytest.param(x, marks=deep) for x in ("munged", "n3"))]
)
def test_an_up_killed_halfway_is_undone_by_down(name, part):
    """SIGKILL to `up` right after any part started: `down` ends that part and all before it, and no other process: the list of
    a namespace's processes, which is made to be killed, is empty for the machine's own."""
    assert procs.members(os.getpid(), "pid") == procs.members(os.getpid(), "mnt") == []
    record_file = Path(f"/run/evalspan-dev/{name}.json")
    shape = ["--nodes", "3", "--cpu-nodes", "0"]
    line = [sys.executable, str(REPO / "scripts" / "dev-cluster"), "up", "--name", name, *shape]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        wait_until(record_file.exists, "the registration")
        record = _record(name)
        wait_until((record.layout.run / f"{part}.json").exists, f"the pid file of {part}")
        up.kill()
    assert tool("down", "--name", name).returncode == 0
    assert _ours(str(record.layout.slurm_conf)) == []
    assert not record.root.exists()
