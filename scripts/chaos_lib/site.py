"""A coordinator's folder on the cluster: the ordinary user's, with a folder of commands that stands first in the PATH."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev_cluster import daemons, procs
from dev_cluster.api import Cluster, dev_cluster
from support import sites
from support.toys import cluster_tasks, config_text, furnish, suite_text, toy_model

from chaos_lib.hosts import Hosts
from coordinator.site.services.redis_server import server_binary

HUNG_SECONDS = 90  # imports take 45 s at load 25 on two cores
INTRUDER = "intruder"  # name of the job that preempts trials, from a partition of higher priority
TASKS: dict[str, dict[str, int]] = {"toy_choice": {}, "toy_sums": {"limit": 24}, "toy_programs": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the sites of a campaign share."""

    cluster: Cluster
    models: list[Path]  # one for each checkpoint
    small: Path  # a small file system that user and nodes see
    hosts: Hosts

    def mend(self) -> None:
        """Bring back the nodes that a fault took down."""
        for node in self.cluster.gpu_nodes:
            self.cluster.bring_back(node)
        self.cluster.wait_nodes(self.cluster.gpu_nodes, "idle", "mixed", deadline_s=90)


@contextlib.contextmanager
def place(checkpoints: int = 1, *, accounting: bool = False) -> Iterator[Place]:
    """A cluster of two GPU nodes and a CPU node; everything is ended and removed afterwards. DevClusterError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evalspan-chaos-")))
        small = Path(tempfile.mkdtemp(prefix="evalspan-small-", dir="/var/tmp"))
        stack.callback(small.rmdir)
        # before the cluster: a node sees the mounts that were there when it was booted
        size = f"size={64 * checkpoints}m,mode=1777"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(small)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(small)], check=True)
        shape = {"nodes": 2, "gpus": 2, "cpu_nodes": 1, "slurmd_timeout_s": 10, "grace_s": 0}
        end = stack.enter_context(contextlib.ExitStack())  # after the cluster
        cluster = stack.enter_context(dev_cluster(**shape, accounting=accounting))
        hosts = Hosts(cluster)
        end.callback(hosts.close)
        models = [toy_model(folder, 7 + number) for number in range(checkpoints)]
        yield Place(cluster=cluster, models=models, small=small, hosts=hosts)


class SiteRedis:
    """A site's own Redis on a port of this machine, empty at each start."""

    def __init__(self, *options: str) -> None:
        """`options`: of the server."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        argv = [str(server_binary()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        argv += self._options
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd="/")

    def kill(self) -> int:
        """SIGKILL; its process id."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return self._process.pid


class Site(sites.Site):
    """What the tests run `evalspan` on, with what a fault breaks and a law reads. `bin` in it goes before Slurm's own commands."""

    cluster: Cluster

    def __init__(self, cluster: Cluster, folder: Path, work: Path, *, watches: bool = False) -> None:
        """`watches`: its coordinator is `evalspan daemon`; else `evalspan eval` of the toy suite."""
        program = Path(cluster.python).parent / "evalspan"
        super().__init__(
            argv=lambda words: cluster.user_argv([program, *words], cwd=folder),
            env={
                **cluster.user_env,
                "EVALSPAN_CONFIG": str(folder / "evalspan.toml"),
                "NO_COLOR": "1",
                "PATH": f"{folder / 'bin'}:{cluster.user_env['PATH']}",
            },
            folder=folder,
            model=folder / "tiny",
            suite=folder / "chaos.toml",
            options=["--shards-per-task", "4"],
            cluster=cluster,
        )
        self.work, self.watches = work, watches
        self.redis: SiteRedis | None = None  # where it is not the coordinator's

    @classmethod
    def make(
        cls,
        place: Place,
        name: str,
        *,
        partition: str = "gpu",
        on_small: bool = False,
        own_redis: bool = False,
    ) -> Site:
        """`on_small`: the work folder lies on the small file system. Several models are in a folder that a daemon watches."""
        config = config_text(f"hung_seconds = {HUNG_SECONDS}")  # [cluster] is its last table
        config += f'kind = "slurm"\npartition = "{partition}"\n'
        run = Path(place.cluster.user_dir) / name / "run"
        redis = SiteRedis() if own_redis else None
        if redis is not None:
            config += f'[redis]\nurl = "redis://127.0.0.1:{redis.port}/0"\n'
        if watches := len(place.models) > 1:
            config += f'[watch]\nfolders = ["{run}"]\nsuite = "{run.with_name("chaos.toml")}"\n'
        texts = {
            "evalspan.toml": config,
            "chaos.toml": suite_text("chaos", TASKS, cluster_tasks(place.cluster)),
        }
        folder = furnish(place.cluster, name, place.models[0], texts)
        site = cls(
            place.cluster, folder, (place.small if on_small else folder) / f"work-{name}", watches=watches
        )
        site.redis = redis
        for number, model in enumerate(place.models if watches else ()):
            site.give(shutil.copytree(model, run / f"step-{number}"))
        return site

    def coordinator(self) -> list[str]:
        """The command line of this site's coordinator; run again after a kill, it goes on."""
        return self.command("daemon", "--until-idle") if self.watches else self.evaluate()

    def start(self, *arguments: str, alone: Path | None = None) -> subprocess.Popen[str]:
        """`evalspan ARGUMENTS`, or without any the coordinator, as the user; its output goes to eval.log.

        `alone`: the library with which its lock of the work folder sees no other's.
        """
        argv = self.command(*arguments) if arguments else self.coordinator()
        env = self.env | ({"LD_PRELOAD": str(alone), "CHAOS_LOCKS_ALONE": "daemon.lock"} if alone else {})
        with (self.folder / "eval.log").open("a") as log:
            return subprocess.Popen(argv, env=env, stdout=log, stderr=log, text=True)

    def user(self, argv: Sequence[str]) -> str:
        """Output of a command of the user's, found without the wrappers."""
        return self.cluster.run_as_user(list(argv)).stdout

    def give(self, folder: Path) -> None:
        """Make a folder and all in it the user's."""
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, self.cluster.record.uid, self.cluster.record.gid)

    # --- what its folder shows -----------------------------------------------------------------------------------

    def evaluations(self, *, open_only: bool = False) -> list[Path]:
        """Folders of the evaluations that were accepted; or of those without results only."""
        folders = sorted(journal.parent for journal in self.work.glob("*/journal.jsonl"))
        return [f for f in folders if not (open_only and (f / "results.json").exists())]

    def events(self, evaluation: Path | None = None) -> list[dict[str, Any]]:
        """Whole lines of the journal of an evaluation, or of all; none before one is accepted."""
        folders = self.evaluations() if evaluation is None else [evaluation]
        return [event for folder in folders for event in super(Site, self).events(folder)]

    def shards(self) -> int:
        """How often an evaluation has counted a shard."""
        return sum(len(event["shards"]) for event in self.events() if event["kind"] == "shards-dumped")

    def processes_of(self, verb: str) -> list[int]:
        """Host pids of the jobs of this site that run `python -m evaljobs VERB`, and of what they fork."""
        return [pid for pid, words, _ in sites.running(self.work) if {verb, "evaljobs"} <= {*words}]

    # --- what must not be left ---------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Jobs, processes and files in node memory that belong to this site or its user."""
        listed = self.cluster.run_as_user(["squeue", "--noheader", "--format=%j"])
        found = [f"job {n}" for n in listed.stdout.split()]
        found += [f"jobs, maybe: {listed.stderr.strip()}"] if listed.returncode != 0 else []
        found += [f"process {' '.join(words)[:120]}" for _, words, _ in sites.running(self.work)]
        return found + [f"in memory of {node}: {path}" for node, path in self._staged()]

    def wait_clean(self, seconds: float) -> list[str]:
        """What is left after at most `seconds`; returns as soon as nothing is."""
        left: list[str] = []
        self.user(["scancel", f"--name={INTRUDER}"])  # it waits where its node was killed, too

        def clean() -> bool:
            left[:] = self.left()
            return not left

        procs.poll(clean, deadline_s=seconds, every_s=0.5)
        return left

    def sweep(self) -> None:
        """After a run that broke a law: end what it left, so that the next one is judged by its own."""
        self.user(["scancel", "--me"])
        for pid, _, _ in sites.running(self.work):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _, path in self._staged():
            path.unlink(missing_ok=True)
        self.wait_clean(30)

    def _staged(self) -> Iterator[tuple[str, Path]]:
        """Weights in the memory of nodes; those of a folder that goes while we look are gone."""
        for node in self.cluster.gpu_nodes:
            first = daemons.running(self.cluster.record, node)
            memory = Path(f"/proc/{first.pid}/root/dev/shm") if first is not None else Path("/nowhere")
            for folder, _, files in os.walk(memory):
                if "/evalspan-" in folder:
                    yield from ((node, Path(folder, name)) for name in files if name.endswith(".safetensors"))

    def remove(self) -> None:
        for folder in (self.folder, self.work):
            shutil.rmtree(folder, ignore_errors=True)

    # --- commands in front of Slurm's ----------------------------------------------------------------------------

    def wrap(self, command: str, script: str) -> None:
        """A command that runs `script`; $REAL in it is the true one, $ONCE a folder to leave marks in."""
        real = shutil.which(command, path="/usr/local/bin:/usr/bin:/bin")
        marks = self.folder / f"marks-{command}"
        shutil.rmtree(marks, ignore_errors=True)
        marks.mkdir()
        self.give(marks)
        temporary = self.folder / f".{command}"
        temporary.write_text(f"#!/bin/sh\nREAL={real}\nONCE={marks}\n{script}\n")
        temporary.chmod(0o755)
        temporary.replace(self.folder / "bin" / command)

    def unwrap(self, command: str) -> None:
        (self.folder / "bin" / command).unlink(missing_ok=True)
