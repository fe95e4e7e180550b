"""Where whole evaluations run by the command line: on this machine, or as an ordinary user's on a development cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dev_cluster.api import Cluster, dev_cluster, unavailable

from evaljobs.contract.storage import read_frames
from support.toys import cluster_tasks, config_text, furnish, suite_text

TOYS = {"toy_choice": {}, "toy_sums": {"limit": 24}, "toy_pages": {}, "toy_programs": {}}


EXPORTED = '["HOSTILE", "PAUSE_*", "SMALL_GPU_TOKENS"]'  # variables of the tests' own that jobs get
LONG = pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs this")
WATCHED = {task: TOYS[task] for task in ("toy_choice", "toy_sums")}  # by the fixture `site`


@contextmanager
def cluster(**shape):
    """A real Slurm of this shape; the test is skipped where none can be started."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with dev_cluster(**shape) as made:
        yield made


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

    def __post_init__(self):
        self.work = self.folder / "work"

    def command(self, *arguments):
        return self.argv([*arguments, "--work-dir", str(self.work)])

    def evaluate(self, *more):
        return self.command(
            "eval", str(self.model), "--suite", str(self.suite), "--json", *self.options, *more
        )

    def run(self, command, timeout=240):
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, command):
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pause_a_trial(self, after):
        """Have one trial stand still (SIGSTOP) once it has written so many records and holds a shard (`pausing`)."""
        path = [str(Path(__file__).parent / "pausing"), *filter(None, [self.env.get("PYTHONPATH")])]
        more = {"PAUSE_FILE": str(self.folder / "paused"), "PAUSE_AFTER": str(after)}
        self.env |= {"PYTHONPATH": os.pathsep.join(path), **more}

    def paused(self):
        """Pid of the trial that stands still, once one does."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / "paused").read_text())
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
        return None

    def end_workers(self):
        """A coordinator that is told to end while jobs live leaves them."""
        if (pid := self.paused()) is not None:  # a test that failed before it let it go on
            os.kill(pid, signal.SIGCONT)
        for release in self.work.glob("*/release"):
            (release / "workers").touch()

    def processes(self, *verbs):
        """Pid → command line of this site's jobs that run one of `verbs`. A child that has not called exec yet has its parent's
        command line, as its guardian has that of its job: both are left out.
        """
        jobs = {pid: words for pid, words, _ in running(self.work) if "evaljobs" in words}
        found = {
            pid: " ".join(words)
            for pid, words in jobs.items()
            if {*verbs} & {*words} and not any(word.endswith("local_guardian.py") for word in words)
        }
        # the parent of one that is gone by now cannot be asked: it was such a child, or has ended
        parents = {pid: parent_of(pid) for pid in found}
        return {
            pid: found[pid] for pid, parent in parents.items() if parent is not None and parent not in found
        }

    def events(self, root=None):
        """Of the journal in `root`, or of its one evaluation; less a line that is being written."""
        lines = ((root or self.root()) / "journal.jsonl").read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def dumped(self):
        """Shards whose responses are on disk."""
        return sum(1 for file in self.work.glob("*/responses/*.frames") for _ in read_frames(file, 0))

    def counted_once(self):
        """All shards, sorted; fails unless each of them counts once."""
        events = self.events()
        shards = [s for e in events if e["kind"] == "planned" for leaf in e["leaves"] for s in leaf["shards"]]
        counted = [s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"]]
        assert sorted(counted) == sorted(shards)
        return sorted(shards)

    def logs(self):
        return "\n".join(f"== {p}\n{p.read_text()[-1500:]}" for p in self.work.glob("*/logs/*.log"))

    def root(self):
        (found,) = (p.parent for p in self.work.glob("*/evaluation.json"))
        return found

    def results(self):
        return json.loads((self.root() / "results.json").read_text())


def running(folder):
    """Pid, command line and state of each process whose command line names the folder."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(folder) in " ".join(words):
                yield int(place.name), words, (place / "stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid):
    """Of a process; none where it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def local(folder, model, *options, entries=TOYS, more=""):
    """A site on this machine with the toy suite in `folder`. `more`: further settings."""
    config, suite = folder / "evalspan.toml", folder / "toys.toml"
    config.write_text(config_text() + more)
    suite.write_text(suite_text("toys", entries))
    program = str(Path(sys.executable).parent / "evalspan")
    env = {**os.environ, "EVALSPAN_CONFIG": str(config), "EVALSPAN_CLUSTER_EXPORT": EXPORTED, "NO_COLOR": "1"}
    return Site(lambda a: [program, *a], env, folder, model, suite, list(options))


def on_cluster(cluster, name, model, *, more=""):
    """The ordinary user's side of a real Slurm; model, suite and work folder are the user's own."""
    texts = {
        "evalspan.toml": config_text() + more,
        "toys.toml": suite_text("toys", TOYS, cluster_tasks(cluster)),
    }
    folder = furnish(cluster, name, model, texts)
    env = {**cluster.user_env, "EVALSPAN_CONFIG": str(folder / "evalspan.toml"), "NO_COLOR": "1"}
    env["EVALSPAN_CLUSTER_EXPORT"] = EXPORTED

    def argv(arguments):
        return cluster.user_argv([str(cluster.python), "-m", "coordinator", *arguments], cwd=folder)

    options = ["--cluster", "slurm", "--partition", "gpu"]
    return Site(argv, env, folder, folder / "tiny", folder / "toys.toml", options, cluster)
