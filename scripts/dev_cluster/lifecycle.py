"""`up`, `status`, `down`: what the command line and the Python interface share.

Rule: `up` is whole or undone. `down` removes exactly what `up` made; the account it leaves (see docs/dev-cluster.md).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dev_cluster import accounting, cgroups, conf, daemons, procs, real_site, registry
from dev_cluster.registry import Record
from dev_cluster.site_view import Exposure, plan_view
from dev_cluster.spec import ClusterSpec, DevClusterError, Layout, is_below

REPO = Path(__file__).resolve().parents[2]
DEFAULT_HOME = Path("/var/tmp/evalspan-dev")
DEFAULT_USER = "evalspan-test"
SUBMIT_RULE = Path(__file__).with_name("job_submit.lua")
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
TOOLS = dict.fromkeys(("slurmctld", "slurmd", "sbatch", "munged"), PACKAGES)
TOOLS |= dict.fromkeys(("unshare", "nsenter", "setpriv", "useradd", "mount"), "util-linux mount passwd")
# What job_container/tmpfs hides from a job.
PRIVATE = ("/tmp", "/dev/shm")
GPU_MAJOR = 240  # the kernel keeps 240 to 254 for local use; no driver answers
# A Unix socket's path has at most 107 bytes; "/munge/socket.lock" comes after the folder.
LONGEST_ROOT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller of `up` asks for besides the shape of the cluster."""

    spec: ClusterSpec
    dir: Path | None = None
    port: int | None = None
    user: str = DEFAULT_USER
    venv: Path | None = None
    repo: Path = REPO
    expose: Sequence[Path] = ()
    owner: procs.Proc | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        """From a flat mapping of the names of this record's fields and those of ClusterSpec."""
        own = {f.name: options[f.name] for f in fields(cls) if f.name in options}
        return cls(spec=ClusterSpec(**{k: v for k, v in options.items() if k not in own}), **own)


def check_machine() -> None:
    """Refuse early, with the way out."""
    if os.geteuid() != 0:
        raise DevClusterError(
            "a development cluster needs root (slurmd starts jobs as their user): run it with sudo"
        )
    for tool, packages in TOOLS.items():
        if shutil.which(tool, path=daemons.DAEMON_PATH) is None:
            raise DevClusterError(f"{tool} is missing: apt-get install --no-install-recommends {packages}")


def up(request: Request) -> Record:
    """Start the cluster and wait until every node is idle."""
    check_machine()
    with registry.locked():
        record = _reserve(request)
        registry.write(record)
        record.root.mkdir(parents=True, exist_ok=True)
    try:
        _furnish(record)
        _start(record)
        record = replace(record, warnings=(*record.warnings, *_python_warnings(record)))
        registry.write(record)
    except BaseException:
        down(record)
        raise
    return record


def _reserve(request: Request) -> Record:
    """Names, folder and ports of the new cluster. Under the lock."""
    spec = request.spec
    if registry.read(spec.name) is not None:
        raise DevClusterError(
            f"a cluster named {spec.name} is there already: scripts/dev-cluster down --name {spec.name}, or another --name"
        )
    root = _root(request)
    user = _account(request.user)
    python, repo, exposures, warnings = _site(request, root)
    if spec.accounting:
        accounting.check_machine()
    if (spec.gpu_jobs_only or spec.demand_account) and not list(
        Path("/usr/lib").glob("**/slurm*/job_submit_lua.so")
    ):
        raise DevClusterError(f"Slurm's job_submit_lua plugin is missing: apt-get install {PACKAGES}")
    return Record(
        spec=spec,
        root=root,
        base_port=registry.choose_ports(spec.ports, request.port),
        user=user.pw_name,
        uid=user.pw_uid,
        gid=user.pw_gid,
        python=python,
        repo=repo,
        exposures=exposures,
        owner=request.owner,
        warnings=warnings,
    )


def _root(request: Request) -> Path:
    """The cluster's folder: absent or empty, or a default one whose machine was switched off under it."""
    root = (request.dir or DEFAULT_HOME / request.spec.name).resolve()
    if len(str(root)) > LONGEST_ROOT:
        raise DevClusterError(
            f"--dir {root} is too long for a socket's path: at most {LONGEST_ROOT} characters"
        )
    hidden = [place for place in PRIVATE if is_below(root, place)]
    if request.spec.private_shm and hidden:
        raise DevClusterError(
            f"--dir {root} lies in {hidden[0]}, which --private-shm hides from jobs: give another --dir"
        )
    if root.exists() and any(root.iterdir()):
        if request.dir is not None:
            raise DevClusterError(f"--dir {root} is not empty: give an empty or a new folder")
        shutil.rmtree(root)
    return root


def _account(name: str) -> pwd.struct_passwd:
    """The ordinary user, made on first use and kept: its files may outlive a cluster."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        argv = ["useradd", "--no-create-home", "--user-group", "--shell", "/bin/bash", name]
        done = subprocess.run(argv, check=False, text=True, capture_output=True)
        if done.returncode != 0:
            raise DevClusterError(f"useradd {name} failed: {done.stderr.strip()}") from None
        user = pwd.getpwnam(name)
    if user.pw_uid == 0:
        raise DevClusterError(f"--user {name} is root: give an ordinary user")
    return user


def _site(request: Request, root: Path) -> tuple[Path, Path, tuple[Exposure, ...], tuple[str, ...]]:
    """The interpreter and repository for jobs, with the paths that must be shown to them."""
    repo = request.repo.resolve()
    venv = _venv(request.venv, repo)
    shown = {"repo": repo} | ({} if venv is None else {"venv": venv})
    exposures = [Exposure(source=path, target=path) for path in (*map(Path.resolve, request.expose), root)]
    places = dict(shown)
    if request.spec.private_shm:
        # A job's private /tmp covers a clone there, so it is shown at a second place.
        hidden = [key for key, path in shown.items() if any(is_below(path, place) for place in PRIVATE)]
        places |= {key: Layout(root).site / key for key in hidden}
    exposures += [Exposure(source=shown[key], target=places[key]) for key in shown]
    if venv is None:
        warning = "no venv: jobs get /usr/bin/python3 (--venv DIR)"
        return Path("/usr/bin/python3"), places["repo"], tuple(exposures), (warning,)
    # The interpreter prints its own prefix: those of pyenv, uv, conda and Debian all differ.
    base = subprocess.run(
        [venv / "bin" / "python", "-c", "import sys; print(sys.base_prefix)"],
        check=True,
        text=True,
        capture_output=True,
    ).stdout.strip()
    if base not in {"/usr", "/usr/local"}:
        exposures += [
            Exposure(source=p, target=p) for p in {Path(base), Path(base).resolve()} if not p.is_symlink()
        ]
    return places["venv"] / "bin" / "python", places["repo"], tuple(exposures), ()


def _venv(wanted: Path | None, repo: Path) -> Path | None:
    """The venv asked for, else the repository's, else the one that runs us."""
    if wanted is not None:
        if not (wanted / "bin" / "python").exists():
            raise DevClusterError(f"--venv {wanted}: there is no bin/python in it")
        return wanted.resolve()
    own = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    return next((v.resolve() for v in [repo / ".venv", *own] if (v / "bin" / "python").exists()), None)


def _is_open(path: Path) -> bool:
    """Whether every user may enter the folder; one that is not there yet will be made so."""
    try:
        return bool(path.stat().st_mode & 0o001)
    except FileNotFoundError:
        return True


def _furnish(record: Record) -> None:
    """Folders and configuration files."""
    spec, layout = record.spec, record.layout
    folders = [layout.root, layout.conf, layout.log, layout.run, layout.state, layout.spool, layout.munge]
    folders += [layout.devices, layout.user, layout.private, layout.site]
    folders += [e.target for e in record.exposures if is_below(e.target, str(layout.site))]
    for name in spec.node_names:
        folders += [layout.spool / name, layout.private / name]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    layout.munge.chmod(0o711)
    os.chown(layout.user, record.uid, record.gid)
    _make_devices(record)
    host = socket.gethostname().split(".")[0]
    plan = plan_view(record.exposures, _is_open)
    texts = {
        layout.slurm_conf: conf.slurm_conf(spec, layout, host=host, base_port=record.base_port),
        layout.conf / "gres.conf": conf.gres_conf(spec, layout),
        layout.conf / "job_container.conf": conf.job_container_conf(layout),
        layout.conf / "job_submit.lua": conf.job_submit(spec, SUBMIT_RULE.read_text()),
        layout.hosts: conf.hosts(spec, host, Path("/etc/hosts").read_text()),
        layout.view_script: conf.namespace_script(spec, layout, plan),
        layout.env_file: f"export SLURM_CONF={layout.slurm_conf}\n",
    }
    if text := real_site.cgroup_conf(spec, slurm_version(), os.cpu_count() or 1):
        texts[layout.conf / "cgroup.conf"] = text
    scripts = {}
    if spec.power_save:
        command = REPO / "scripts" / "dev-cluster"
        for word in ("on", "off"):
            scripts[layout.conf / f"power-{word}"] = real_site.power_script(spec, command, on=word == "on")
    for path, text in (texts | scripts).items():
        path.write_text(text)
        path.chmod(0o755 if path in scripts else 0o644)


def _make_devices(record: Record) -> None:
    """A file per GPU. Links to /dev/null serve, but where cgroups deny a job every GPU that it did not ask for."""
    for index in range(record.spec.gpus):
        file = record.layout.devices / f"nvidia{index}"
        if record.spec.cgroups:
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(GPU_MAJOR, index))
            file.chmod(0o666)
        else:
            file.symlink_to("/dev/null")


def slurm_version() -> tuple[int, int]:
    """Major and minor of the installed Slurm."""
    printed = subprocess.run(["slurmctld", "-V"], check=True, text=True, capture_output=True).stdout
    major, minor = printed.split()[-1].split(".")[:2]
    return int(major), int(minor)


def _start(record: Record) -> None:
    daemons.start_login(record)
    daemons.start_munged(record)
    if record.spec.accounting:
        accounting.start(record)
    daemons.start_controller(record)
    if record.spec.accounting:
        accounting.make_accounts(record)
    names = record.spec.node_names
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: daemons.start_node(record, name), names))
    wait_nodes(record, names, {"idle"}, deadline_s=120 + len(names))
    _hold_back(record)


def _hold_back(record: Record) -> None:
    """Take the first node by a reservation, and the power of all GPU nodes, where the cluster is such a site."""
    first = record.spec.gpu_node_names[0]
    if record.spec.reservation:
        words = ["reservationname=maintenance", "starttime=now", "duration=infinite", "user=root"]
        daemons.scontrol(record, "create", *words, f"nodes={first}", "flags=maint,ignore_jobs")
    if record.spec.power_save:
        for name in record.spec.gpu_node_names:
            daemons.scontrol(record, "update", f"nodename={name}", "state=power_down_force")
        names = record.spec.gpu_node_names
        off = procs.poll(
            lambda: all(node_states(record).get(name) == "idle~" for name in names),
            deadline_s=60,
            every_s=0.5,
        )
        if not off:
            raise DevClusterError(f"nodes are not powered down after 60 s: {node_states(record)}")


def power(record: Record, nodes: str, *, on: bool) -> None:
    """Boot nodes (Slurm's list of names), or cut their power, as Slurm's ResumeProgram and SuspendProgram do."""
    argv = ["scontrol", "show", "hostnames", nodes]
    names = subprocess.run(argv, check=True, text=True, capture_output=True, env=daemons.daemon_env(record))
    for name in names.stdout.split():
        (daemons.start_node if on else daemons.kill_node)(record, name)


def wait_nodes(record: Record, names: Sequence[str], states: set[str], *, deadline_s: float) -> None:
    """Wait until Slurm shows each of `names` in one of `states` (lower case, no suffix)."""
    seen: dict[str, str] = {}

    def there() -> bool:
        seen.update(node_states(record))
        return all(seen.get(name, "").rstrip("~#!%$@^-+") in states for name in names)

    if not procs.poll(there, deadline_s=deadline_s, every_s=0.2):
        late = next(n for n in names if seen.get(n, "").rstrip("~#!%$@^-+") not in states)
        log = record.layout.log / f"slurmd.{late}.log"
        raise DevClusterError(
            f"node {late} is {seen.get(late, 'unknown')} after {deadline_s:.0f} s: {procs.tail(log)}"
        )


def node_states(record: Record) -> dict[str, str]:
    """Node → Slurm's long state name; empty where the controller does not answer."""
    argv = ["sinfo", "--noheader", "-N", "-o", "%N %T"]
    try:
        done = subprocess.run(
            argv, check=False, text=True, capture_output=True, env=daemons.daemon_env(record), timeout=60
        )
    except subprocess.TimeoutExpired:
        return {}
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _python_warnings(record: Record) -> list[str]:
    """Whether the user can really run the interpreter and read the code; tried, not derived."""
    code = "import os, sys; os.listdir(sys.argv[1]); [open(p).close() for p in sys.argv[2:]]"
    probes = sorted(record.repo.glob("*/__init__.py")) if record.repo == REPO else []
    done = subprocess.run(
        [*user_argv(record, cwd=None), str(record.python), "-c", code, str(record.repo), *map(str, probes)],
        check=False,
        text=True,
        capture_output=True,
        env=user_env(record),
    )
    if done.returncode == 0:
        return []
    reason = done.stderr.strip().splitlines()[-1:]
    where = record.python.parents[1]
    return [
        f"{record.user} cannot use {record.python} or {record.repo} ({reason}): chmod -R a+rX {where} {record.repo}"
    ]


def user_argv(record: Record, *, cwd: Path | str | None) -> list[str]:
    """What to put before a command so that it runs as the user on the submit side, at the same pid."""
    holder = daemons.running(record, "login")
    if holder is None:
        raise DevClusterError(
            f"cluster {record.spec.name} is down: scripts/dev-cluster up --name {record.spec.name}"
        )
    ids = ["--reuid", str(record.uid), "--regid", str(record.gid), "--clear-groups"]
    return [
        *["nsenter", "-t", str(holder.pid), "-m", "--", "setpriv", *ids, "--"],
        *["env", "-C", str(cwd or record.layout.user)],
    ]


def user_env(record: Record) -> dict[str, str]:
    """The user's whole environment on the submit side; `sbatch` gives it to jobs."""
    return {
        "SLURM_CONF": str(record.layout.slurm_conf),
        "HOME": str(record.layout.user),
        "USER": record.user,
        "LOGNAME": record.user,
        "LANG": "C.UTF-8",
        "PATH": f"{record.python.parent}:{daemons.DAEMON_PATH}",
        "PYTHONPATH": str(record.repo),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def status(record: Record) -> dict[str, Any]:
    """What runs of the cluster, for people and for `--json`."""
    states = node_states(record)
    nodes = [
        {
            "name": name,
            "state": states.get(name, "unknown"),
            "gpus": record.spec.gpus if name in record.spec.gpu_node_names else 0,
            "port": record.base_port + offset,
            "pid": _pid(daemons.running(record, name)),
            "slurmd": _pid(daemons.slurmd(record, name)),
        }
        for offset, name in enumerate(record.spec.node_names, start=1)
    ]
    return {
        "name": record.spec.name,
        "dir": str(record.root),
        "slurm_conf": str(record.layout.slurm_conf),
        "env_file": str(record.layout.env_file),
        "user": record.user,
        "user_dir": str(record.layout.user),
        "python": str(record.python),
        "repo": str(record.repo),
        "port": record.base_port,
        "processes": {part: _pid(daemons.running(record, part)) for part in record.spec.parts},
        "nodes": nodes,
        "warnings": list(record.warnings),
    }


def _pid(proc: procs.Proc | None) -> int | None:
    return proc.pid if proc is not None else None


def down(record: Record) -> None:
    """End all processes, then remove folder and registration. Does nothing twice."""
    daemons.kill_everything(record)
    if record.spec.cgroups:
        cgroups.remove(record.spec.node_names)
    _unmount_below(record.root)
    if record.root.exists():
        shutil.rmtree(record.root)
    with registry.locked():
        if record.root.parent == DEFAULT_HOME:
            # Another cluster's folder may be there: then this one stays too.
            with contextlib.suppress(OSError):
                DEFAULT_HOME.rmdir()
        registry.remove(record.spec.name)


def _unmount_below(root: Path) -> None:
    """No mount of a cluster is in this namespace; were one there, removing the folder would reach through it."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if is_below(Path(p), str(root))), reverse=True):
        subprocess.run(["umount", "-l", point], check=True)


def down_orphans() -> list[str]:
    """End the clusters whose owning process is gone (a test run that was killed); their names."""
    check_machine()
    with registry.locked("orphans"):
        gone = [r for r in registry.everything() if r.owner is not None and not r.owner.alive]
        for record in gone:
            down(record)
    return [record.spec.name for record in gone]
