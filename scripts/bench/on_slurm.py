"""A daemon of synthetic GPUs on a development cluster, from a furnished folder to its end; and Slurm's commands, counted."""

from __future__ import annotations

import compileall
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

from chaos_lib.site import Site
from dev_cluster.api import Cluster

from bench import synthetic
from bench.harness import ROOT, RunError

COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")
FIRST = -15  # niceness: 28 times the CPU time of what has 0


def count_commands(site: Site, answer: float = 0.0) -> None:
    """From now on each call of Slurm's commands by this site's user leaves a mark, and takes `answer` seconds more."""
    late = f"sleep {answer:g}\n" if answer else ""
    for command in COMMANDS:
        site.wrap(command, f'mktemp "$ONCE/XXXXXXXX" >/dev/null\n{late}exec "$REAL" "$@"')


def counted(site: Site) -> dict[str, int]:
    """Calls of each command since `count_commands`."""
    return {c: len(list((site.folder / f"marks-{c}").iterdir())) for c in COMMANDS}


def cost(pid: int) -> tuple[float, float]:
    """CPU seconds so far, its ended children's included, and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), resident / 2**20


def furnished(
    cluster: Cluster,
    name: str,
    settings: dict[str, Any],
    *,
    answer: float | None = 0.0,
    folder: Path | None = None,
) -> Site:
    """A site with the folder that bench.world makes of `settings`, or made of them for an earlier cluster. RunError.

    `answer`: as of `count_commands`; None: nothing is counted. `folder`: outlives the cluster.
    """
    for part in ("coordinator", "evaljobs", "priors", "scripts/bench"):
        compileall.compile_dir(ROOT / part, quiet=2)  # else each job would, as a user who cannot keep it
    folder = folder or cluster.user_dir / name
    cluster.run_as_user(["mkdir", "-p", str(folder / "bin")], check=True)
    site = Site(cluster=cluster, folder=folder, work=folder / "work")
    paths = ":".join(str(cluster.repo / part) for part in ("scripts", "", "tests"))
    site.env["PYTHONPATH"] = paths  # of all that imports the bench
    if answer is not None:
        count_commands(site, answer)
    if (folder / synthetic.GIVEN).exists():
        return site
    argv = [cluster.python, "-m", "bench.world", str(folder), json.dumps(settings)]
    prepared = cluster.run_as_user(argv, env=site.env, timeout=600)
    if prepared.returncode:
        raise RunError(prepared.stderr[-4000:])
    return site


def run_daemon(site: Site, *words: str, seconds: float, own_machine: bool = False) -> dict[str, Any]:
    """`bench.in_daemon` on this site to its end: what it left in FOLDER/costs.json. RunError where it fails.

    `own_machine`: the daemon and all that it starts go before the nodes' jobs, which are on other machines at a site.
    """
    log = site.folder / "daemon.log"
    argv = [site.cluster.python, "-m", "bench.in_daemon", str(site.folder), *words]
    argv = site.cluster.user_argv(argv, cwd=site.folder)
    with log.open("w") as lines, subprocess.Popen(argv, env=site.env, stdout=lines, stderr=lines) as process:
        try:
            if own_machine:
                os.setpriority(os.PRIO_PROCESS, process.pid, FIRST)
            status = process.wait(seconds)
        except BaseException:
            process.terminate()
            raise
    if status:
        raise RunError(f"the daemon ended with {status}: {log.read_text()[-4000:]}")
    return dict(json.loads((site.folder / "costs.json").read_text()))
