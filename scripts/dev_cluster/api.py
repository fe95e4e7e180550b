"""Development clusters: `with dev_cluster(nodes=2, gpus=4) as cluster: …`, and `up`, on which the command line stands.

Rule: `up` is whole or undone, and `Cluster.down` removes exactly what it made; the account it leaves (see CONTRIBUTING.md).
The cluster of `dev_cluster` goes when the block ends, and, where the process was killed before that, with the next
`dev_cluster()` on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dev_cluster import accounting, conf, daemons, procs, real_site, registry
from dev_cluster.cluster import DEFAULT_HOME, Cluster
from dev_cluster.registry import Record
from dev_cluster.site_view import Exposure, plan_view
from dev_cluster.spec import ClusterSpec, DevClusterError, Layout

__all__ = ["Cluster", "DevClusterError", "dev_cluster", "unavailable", "up"]

REPO = Path(__file__).resolve().parents[2]
USER = "evalspan-test"
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
TOOLS = dict.fromkeys(("slurmctld", "slurmd", "sbatch", "munged"), PACKAGES)
TOOLS |= dict.fromkeys(("unshare", "nsenter", "setpriv", "useradd", "mount"), "util-linux mount passwd")
# What job_container/tmpfs hides from a job.
PRIVATE = ("/tmp", "/dev/shm")
GPU_MAJOR = 240  # the kernel keeps 240 to 254 for local use; no driver answers

_numbers = itertools.count(1)


def check_machine() -> None:
    """Refuse early, with the way out."""
    if os.geteuid() != 0:
        raise DevClusterError(
            "a development cluster needs root (slurmd starts jobs as their user): run it with sudo"
        )
    for tool, packages in TOOLS.items():
        if shutil.which(tool, path=daemons.DAEMON_PATH) is None:
            raise DevClusterError(f"{tool} is missing: apt-get install --no-install-recommends {packages}")


def unavailable() -> str | None:
    """Why no cluster can be started here (for a test's skip), or None."""
    try:
        check_machine()
    except DevClusterError as error:
        return str(error)
    return None


@contextlib.contextmanager
def dev_cluster(*, name: str | None = None, **options: Any) -> Iterator[Cluster]:
    """A cluster for the length of the block; its name is unique unless given. Errors: DevClusterError.

    `options`: fields of `ClusterSpec` (nodes=4, gpus=8, cpu_nodes=2, …), and `repo` of `up`.
    """
    down_orphans()
    name = name or f"t{os.getpid()}-{next(_numbers)}"
    cluster = up(name=name, owner=procs.identify(os.getpid()), **options)
    try:
        yield cluster
    finally:
        cluster.down()


def down_orphans() -> list[str]:
    """End the clusters whose owning process is gone (a test run that was killed); their names."""
    check_machine()
    with registry.locked("orphans"):
        gone = [r for r in registry.everything() if r.owner is not None and not r.owner.alive]
        for record in gone:
            Cluster(record).down()
    return [record.spec.name for record in gone]


def up(*, repo: Path = REPO, owner: procs.Proc | None = None, **shape: Any) -> Cluster:
    """Start a cluster of this shape (fields of `ClusterSpec`) and wait until every node is idle."""
    check_machine()
    spec = ClusterSpec(**shape)
    with registry.locked():
        if registry.read(spec.name) is not None:
            raise DevClusterError(
                f"a cluster named {spec.name} is there already: "
                f"scripts/dev-cluster down --name {spec.name}, or another --name"
            )
        root = DEFAULT_HOME / spec.name
        if root.exists():  # the machine was switched off under it
            shutil.rmtree(root)
        account = _account()
        python, seen, exposures = _site(spec, root, repo.resolve())
        if spec.accounting:
            accounting.check_machine()
        lua = Path("/usr/lib").glob("**/slurm*/job_submit_lua.so")
        if (spec.gpu_jobs_only or spec.demand_account) and next(lua, None) is None:
            raise DevClusterError(f"Slurm's job_submit_lua plugin is missing: apt-get install {PACKAGES}")
        record = Record(
            spec=spec,
            root=root,
            base_port=registry.choose_ports(spec.ports),
            user=account.pw_name,
            uid=account.pw_uid,
            gid=account.pw_gid,
            python=python,
            repo=seen,
            exposures=exposures,
            owner=owner,
        )
        registry.write(record)
        root.mkdir(parents=True, exist_ok=True)
    try:
        _furnish(record)
        _start(Cluster(record))
    except BaseException:
        Cluster(record).down()
        raise
    return Cluster(record)


# --- what is asked for, checked --------------------------------------------------------------------------------------


def _account() -> pwd.struct_passwd:
    """The ordinary user, made on first use and kept: its files may outlive a cluster."""
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        argv = ["useradd", "--no-create-home", "--user-group", "--shell", "/bin/bash", USER]
        done = subprocess.run(argv, check=False, text=True, capture_output=True)
        if done.returncode != 0:
            raise DevClusterError(f"useradd {USER} failed: {done.stderr.strip()}") from None
        user = pwd.getpwnam(USER)
    return user


def _site(spec: ClusterSpec, root: Path, repo: Path) -> tuple[Path, Path, tuple[Exposure, ...]]:
    """The interpreter and repository for jobs, with the paths that must be shown to them.

    The venv is the repository's, else the one that runs us, else none.
    """
    own = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    venvs = [v for v in (repo / ".venv", *own) if (v / "bin" / "python").exists()]
    shown = {"repo": repo} | ({"venv": venvs[0].resolve()} if venvs else {})
    places = dict(shown)
    if spec.private_shm:
        # A job's private /tmp covers a clone there, so it is shown at a second place.
        hidden = [key for key, path in shown.items() if any(path.is_relative_to(each) for each in PRIVATE)]
        places |= {key: Layout(root).site / key for key in hidden}
    exposures = [Exposure(source=root, target=root)]
    exposures += [Exposure(source=shown[key], target=places[key]) for key in shown]
    if not venvs:
        return Path("/usr/bin/python3"), places["repo"], tuple(exposures)
    # The interpreter prints its own prefix: those of pyenv, uv, conda and Debian all differ.
    argv = [shown["venv"] / "bin" / "python", "-c", "import sys; print(sys.base_prefix)"]
    base = subprocess.run(argv, check=True, text=True, capture_output=True).stdout.strip()
    if base not in {"/usr", "/usr/local"}:
        bases = {Path(base), Path(base).resolve()}
        exposures += [Exposure(source=p, target=p) for p in bases if not p.is_symlink()]
    return places["venv"] / "bin" / "python", places["repo"], tuple(exposures)


# --- folders and files -----------------------------------------------------------------------------------------------


def _furnish(record: Record) -> None:
    """Folders, files and devices."""
    spec, layout = record.spec, record.layout
    folders = [layout.root, layout.conf, layout.log, layout.run, layout.state, layout.spool, layout.munge]
    folders += [layout.devices, layout.user, layout.private, layout.site]
    folders += [e.target for e in record.exposures if e.target.is_relative_to(layout.site)]
    for name in spec.node_names:
        folders += [layout.spool / name, layout.private / name]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    layout.munge.chmod(0o711)
    os.chown(layout.user, record.uid, record.gid)
    for index in range(spec.gpus):
        file = layout.devices / f"nvidia{index}"
        if spec.cgroups:  # they deny a job every GPU that it did not ask for: links to one device will not do
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(GPU_MAJOR, index))
            file.chmod(0o666)
        else:
            file.symlink_to("/dev/null")
    scripts = real_site.power_scripts(spec, layout, REPO / "scripts" / "dev-cluster")
    for path, text in (_texts(record) | scripts).items():
        path.write_text(text)
        path.chmod(0o755 if path in scripts else 0o644)


def _texts(record: Record) -> dict[Path, str]:
    spec, layout = record.spec, record.layout
    host = socket.gethostname().split(".")[0]
    rules = Path(__file__).with_name("job_submit.lua").read_text()
    printed = subprocess.run(["slurmctld", "-V"], check=True, text=True, capture_output=True).stdout
    major, minor = map(int, printed.split()[-1].split(".")[:2])
    cgroups = real_site.cgroup_conf(spec, (major, minor), os.cpu_count() or 1)
    texts = {
        layout.slurm_conf: conf.slurm_conf(spec, layout, host=host, base_port=record.base_port),
        layout.conf / "gres.conf": conf.gres_conf(spec, layout),
        layout.conf / "job_container.conf": conf.job_container_conf(layout),
        layout.conf / "job_submit.lua": conf.job_submit(spec, rules),
        layout.hosts: conf.hosts(spec, host, Path("/etc/hosts").read_text()),
        layout.view_script: conf.namespace_script(spec, layout, plan_view(record.exposures, is_open)),
        layout.env_file: f"export SLURM_CONF={layout.slurm_conf}\n",
    }
    return texts | ({layout.conf / "cgroup.conf": cgroups} if cgroups else {})


def is_open(path: Path) -> bool:
    """Whether every user may enter the folder; one that is not there yet will be made so."""
    try:
        return bool(path.stat().st_mode & 0o001)
    except FileNotFoundError:
        return True


# --- daemons -----------------------------------------------------------------------------------------------------------


def _start(cluster: Cluster) -> None:
    record, spec = cluster.record, cluster.record.spec
    cluster.start_login()
    cluster.start_munged()
    if spec.accounting:
        accounting.start(record)
    cluster.start_controller()
    if spec.accounting:
        accounting.make_accounts(record)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cluster.start_node, cluster.nodes))
    cluster.wait_nodes(cluster.nodes, "idle", deadline_s=120 + len(cluster.nodes))
    gpu_nodes = cluster.gpu_nodes
    if spec.reservation:
        words = ["reservationname=maintenance", "starttime=now", "duration=infinite", "user=root"]
        words += [f"nodes={gpu_nodes[0]}", "flags=maint,ignore_jobs"]
        daemons.command(record, "scontrol", "create", *words)
    if spec.power_save:
        for name in gpu_nodes:
            cluster.update(f"nodename={name}", "state=power_down_force")

        def off() -> bool:
            states = cluster.node_states()
            return all(states.get(name) == "idle~" for name in gpu_nodes)

        if not procs.poll(off, deadline_s=60, every_s=0.5):
            raise DevClusterError(f"nodes are not powered down after 60 s: {cluster.node_states()}")
