"""A daemon of synthetic GPUs on a development cluster, from a furnished folder to its end; and Slurm's commands, counted."""

from __future__ import annotations

import compileall
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos_lib.site import Site
from dev_cluster.api import Cluster

from bench import synthetic
from bench.harness import ROOT, RunError

COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")
SHARES = 1 << 16  # of CPU time; 1,024 is a session's


def _compile_all() -> None:
    """Else each job would compile what it imports, as a user who cannot keep it."""
    for part in ("coordinator", "evaljobs", "priors", "scripts/bench"):
        compileall.compile_dir(ROOT / part, quiet=2)


def count_commands(site: Site, answer: float = 0.0) -> None:
    """From now on each call of Slurm's commands by this site's user leaves a mark, and takes `answer` seconds more."""
    late = f"sleep {answer:g}\n" if answer else ""
    for command in COMMANDS:
        site.wrap(command, f'mktemp "$ONCE/XXXXXXXX" >/dev/null\n{late}exec "$REAL" "$@"')


def counted(site: Site) -> dict[str, int]:
    """Calls of each command since `count_commands`."""
    return {c: len(list((site.folder / f"marks-{c}").iterdir())) for c in COMMANDS}


def run(
    cluster: Cluster,
    name: str,
    settings: dict[str, Any],
    *,
    slow: str = "",
    log: Path | None = None,
    seconds: float,
    answer: float = 0.0,
    own_machine: bool = False,
    during: Callable[[Site], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[Site, dict[str, Any], float]:
    """The site after `evalspan daemon --until-idle`, what the daemon's loop cost, and when the daemon was started.

    `settings`: what bench.folder takes. `slow`: "NODE/GPU:TIMES". `log`: where the daemon's log goes. `answer`: seconds
    that each Slurm command takes more. `own_machine`: as of `run_daemon`. `during`: entered with the site before the daemon starts. Errors: RunError.
    """
    site = furnished(cluster, name, settings, answer)
    with during(site):
        return site, *run_daemon(site, seconds, slow=slow, log=log, own_machine=own_machine)


def furnished(
    cluster: Cluster, name: str, settings: dict[str, Any], answer: float = 0.0, folder: Path | None = None
) -> Site:
    """A site with the folder that bench.folder makes of `settings`; `answer`: as of `run`. RunError.

    `folder`: where it lies instead of in the cluster's own folder; one that was made before stays as it is.
    """
    _compile_all()
    folder = folder or cluster.user_dir / name
    cluster.run_as_user(["mkdir", "-p", str(folder / "bin")], check=True)
    site = Site(cluster=cluster, folder=folder, work=folder / "work")
    count_commands(site, answer)
    made = folder / "made"
    if made.exists():
        return site
    argv = [cluster.python, "-m", "bench.folder", str(folder), json.dumps(settings)]
    prepared = cluster.run_as_user(argv, env=environment(site), timeout=600)
    if prepared.returncode:
        raise RunError(prepared.stderr[-4000:])
    made.touch()
    return site


def run_daemon(
    site: Site, seconds: float, *, slow: str = "", log: Path | None = None, own_machine: bool = False
) -> tuple[dict[str, Any], float]:
    """`bench.timed` on a folder with evalspan.toml, bench.json and notices: its costs, and when it was started.

    `own_machine`: the daemon and all that it starts go before the nodes' jobs, which are on other machines at a site.
    """
    started = time.time()
    run_module(site, "bench.timed", seconds=seconds, slow=slow, log=log, own_machine=own_machine)
    return json.loads((site.folder / "costs.json").read_text()), started


def run_module(
    site: Site,
    module: str,
    *words: str,
    seconds: float,
    slow: str = "",
    log: Path | None = None,
    own_machine: bool = False,
) -> None:
    """`python -m MODULE FOLDER WORD…` as the site's user, to its end. `own_machine`: as of `run_daemon`. RunError where it fails."""
    log = log or site.folder / "daemon.log"
    argv = [site.cluster.python, "-m", module, str(site.folder), *words]
    argv, env = site.cluster.user_argv(argv, cwd=site.folder), {**environment(site), synthetic.SLOW: slow}
    with log.open("w") as lines, subprocess.Popen(argv, env=env, stdout=lines, stderr=lines) as process:
        try:
            with first_on_the_machine(process.pid) if own_machine else contextlib.nullcontext():
                status = process.wait(seconds)
        except BaseException:
            process.terminate()
            raise
    if status:
        raise RunError(f"the daemon ended with {status}: {log.read_text()[-4000:]}")


@contextlib.contextmanager
def first_on_the_machine(pid: int) -> Iterator[None]:
    """Give a process and all that it starts the CPU time that it asks for, whatever else runs (control groups, version 1)."""
    group = Path("/sys/fs/cgroup/cpu/evalspan-bench")
    if not group.parent.is_dir():
        raise RunError(f"there is no {group.parent}: the daemon cannot go before the nodes' jobs here")
    group.mkdir(exist_ok=True)
    (group / "cpu.shares").write_text(str(SHARES))
    (group / "cgroup.procs").write_text(str(pid))
    yield
    with contextlib.suppress(OSError):  # its Redis ends a moment later
        group.rmdir()


def environment(site: Site) -> dict[str, str]:
    """Of a process of this site's user that imports the bench."""
    repo = site.cluster.repo
    return {**site.env, "PYTHONPATH": f"{repo / 'scripts'}:{repo}"}
