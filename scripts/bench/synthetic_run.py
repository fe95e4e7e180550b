"""A daemon of synthetic GPUs on a development cluster, from a furnished folder to its end; and Slurm's commands, counted."""

from __future__ import annotations

import compileall
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from chaos_lib.site import Site
from dev_cluster.api import Cluster

from bench import synthetic
from bench.harness import ROOT, RunError

COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")


def _compile_all() -> None:
    """Else each job would compile what it imports, as a user who cannot keep it."""
    for part in ("coordinator", "evaljobs", "priors", "scripts/bench"):
        compileall.compile_dir(ROOT / part, quiet=2)


def count_commands(site: Site) -> None:
    """From now on each call of Slurm's commands by this site's user leaves a mark."""
    for command in COMMANDS:
        site.wrap(command, 'mktemp "$ONCE/XXXXXXXX" >/dev/null\nexec "$REAL" "$@"')


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
) -> tuple[Site, dict[str, Any], float]:
    """The site after `evalspan daemon --until-idle`, what the daemon's loop cost, and when the daemon was started.

    `settings`: what bench.folder takes. `slow`: "NODE/GPU:TIMES". `log`: where the daemon's log goes. Errors: RunError.
    """
    site = furnished(cluster, name, settings)
    return site, *run_daemon(site, seconds, slow=slow, log=log)


def furnished(cluster: Cluster, name: str, settings: dict[str, Any]) -> Site:
    """A site with the folder that bench.folder makes of `settings`. RunError."""
    _compile_all()
    folder = cluster.user_dir / name
    cluster.run_as_user(["mkdir", "-p", str(folder / "bin")], check=True)
    site = Site(cluster=cluster, folder=folder, work=folder / "work")
    count_commands(site)
    argv = [cluster.python, "-m", "bench.folder", str(folder), json.dumps(settings)]
    prepared = cluster.run_as_user(argv, env=_env(site), timeout=600)
    if prepared.returncode:
        raise RunError(prepared.stderr[-4000:])
    return site


def run_daemon(
    site: Site, seconds: float, *, slow: str = "", log: Path | None = None
) -> tuple[dict[str, Any], float]:
    """`bench.timed` on a folder with evalspan.toml, bench.json and notices: its costs, and when it was started."""
    started = time.time()
    run_module(site, "bench.timed", seconds=seconds, slow=slow, log=log)
    return json.loads((site.folder / "costs.json").read_text()), started


def run_module(
    site: Site, module: str, *words: str, seconds: float, slow: str = "", log: Path | None = None
) -> None:
    """`python -m MODULE FOLDER WORD…` as the site's user, to its end. RunError where it fails."""
    log = log or site.folder / "daemon.log"
    argv = [site.cluster.python, "-m", module, str(site.folder), *words]
    argv, env = site.cluster.user_argv(argv, cwd=site.folder), {**_env(site), synthetic.SLOW: slow}
    with log.open("w") as lines, subprocess.Popen(argv, env=env, stdout=lines, stderr=lines) as process:
        try:
            status = process.wait(seconds)
        except BaseException:
            process.terminate()
            raise
    if status:
        raise RunError(f"the daemon ended with {status}: {log.read_text()[-4000:]}")


def _env(site: Site) -> dict[str, str]:
    repo = site.cluster.repo
    return {**site.env, "PYTHONPATH": f"{repo / 'scripts'}:{repo}"}
