"""The same question to plain lm_eval and to `evalspan eval`: scores and samples of a world as it is now."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.runtime.journal import read_events
from evaljobs.contract.archived_files import files_in, read_bytes
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths
from support.inputs import plain

WARM = Path(__file__).with_name("warm.py")
SECONDS = 300  # of a question
DEFAULT_SEEDS = {"random": 0, "numpy_random": 1234, "torch_random": 1234, "fewshot_random": 1234}


@dataclass(frozen=True)
class Answer:
    """`trouble`: of a command that failed. `ran`: leaf tasks with newly answered shards, without a number at their ends;
    `jobs`: kinds of jobs that wrote a log meanwhile."""

    results: dict[str, dict[str, float]]
    samples: dict[str, list[str]]
    ran: frozenset[str] = frozenset()
    trouble: str = ""
    jobs: frozenset[str] = field(default=frozenset(), compare=False)
    said: str = field(default="", compare=False)

    def differs(self, other):
        """Where two answers differ, in a line; "" where they are equal."""
        found = [one.trouble for one in (self, other) if one.trouble]
        for task in sorted({*self.results, *other.results, *self.samples, *other.samples}):
            a, b = ((one.results.get(task), one.samples.get(task)) for one in (self, other))
            if a != b and not self.trouble + other.trouble:
                found.append(f"{task}: {a[0]} and {b[0]}" if a[0] != b[0] else f"{task}: other samples")
        return "; ".join(found)


def numbers(results):
    return {
        task: {k: v for k, v in metrics.items() if isinstance(v, float) and "stderr" not in k}
        for task, metrics in results.items()
    }


def comparable(lines):
    """Samples as texts: documents, prompts, answers and numbers, without what differs between two ways of writing them."""
    return sorted(
        json.dumps([str(leaf) for key in plain.KEPT for leaf in leaves(line.get(key))]) for line in lines
    )


def leaves(value):
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


@contextmanager
def warm(folder):
    """The command in place of an interpreter's, as words of a shell."""
    place = folder / "warm.sock"
    argv = [sys.executable, str(WARM), "serve", str(place)]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as server:
        server.stdout.readline()
        try:
            yield f"{sys.executable} -I -S {WARM} {place}"
        finally:
            server.stdin.close()


def last_line(text):
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")[:400]


class Asking:
    """Asks both about one world; `work` is evalspan's work folder, the same until `fresh`."""

    def __init__(self, world, command):
        self.world, self.command = world, command
        self._works = itertools.count()
        self.fresh()

    def fresh(self):
        """Another work folder, and no prepared data but the Hub's: what went wrong before is gone."""
        self.work = self.world.folder / f"work-{next(self._works)}"
        for place in self.world.folder.glob("hf*/datasets/*"):
            if place.name != "org___rows":
                shutil.rmtree(place) if place.is_dir() else place.unlink()

    def _run(self, argv, folder, env):
        return subprocess.run(
            argv, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def _logs(self):
        return {(log.name, log.stat().st_mtime_ns) for log in self.work.glob("*/logs/es-*")}

    def plain(self):
        """Of lm_eval, with a cache of prepared data that holds the Hub's alone: offline there is no other place."""
        world = self.world
        cache, prepared = world.path("plain/datasets"), world.hf_home / "datasets" / "org___rows"
        shutil.rmtree(cache.parent, ignore_errors=True)
        shutil.copytree(prepared, cache / "org___rows")
        seed, size = world.suite.get("seed"), {"batch_size": world.suite.get("batch_size", 1)}
        asked = {
            "tasks": str(world.tasks),
            "entries": [{"name": name, **size, **entry} for name, entry in world.entries.items()],
            "model_args": {"pretrained": str(world.path(world.model)), **world.arguments()},
            "system_instruction": world.suite.get("system_instruction"),
            "chat": world.suite.get("apply_chat_template", False),
            "seeds": DEFAULT_SEEDS if seed is None else dict.fromkeys(DEFAULT_SEEDS, seed),
        }
        asked_file, out = world.path("plain/asked.json"), world.path("plain/out.json")
        asked_file.write_text(json.dumps(asked))
        env = {**world.environment(), **world.trial_env, **world.exports, "HF_DATASETS_CACHE": str(cache)}
        argv = [*self.command.split(), sys.executable, str(plain.__file__), str(asked_file), str(out)]
        done = self._run(argv, world.tasks, env)
        if done.returncode:
            return Answer({}, {}, trouble="lm_eval: " + last_line(done.stderr))
        found = json.loads(out.read_text())
        samples = {task: comparable(lines) for task, lines in found["samples"].items()}
        return Answer(numbers(found["results"]), samples)

    def ours(self, *more):
        """Of `evalspan eval`, with more options."""
        world = self.world
        world.write_settings(self.command)
        before = {place.parent.name for place in self.work.glob("*/evaluation.json")}
        logs = self._logs()
        argv = [
            str(Path(sys.executable).with_name("evalspan")),
            "eval",
            str(world.path(world.model)),
            "--json",
        ]
        options = {
            "suite": world.path("suite.toml"),
            "work-dir": self.work,
            "config": world.path("evalspan.toml"),
        }
        argv += [f"--{name}={value}" for name, value in options.items()] + [*more]
        done = self._run(argv, world.folder, world.environment())
        trouble = f"evalspan: exit {done.returncode}: {last_line(done.stderr)}" if done.returncode else ""
        try:
            printed = json.loads(done.stdout)
            paths = EvaluationPaths(self.work / printed["evalspan"]["evaluation_id"])
        except (ValueError, KeyError):
            return Answer({}, {}, trouble=trouble or "evalspan: no results")
        events = [] if paths.root.name in before else read_events(paths.journal)
        dumped = [shard for event in events if event.kind == "shards-dumped" for shard, _ in event.shards]
        samples = {}
        for file in files_in(paths.samples, "samples_*.jsonl"):  # also of many files, which are archived
            lines = [json.loads(line) for line in read_bytes(file).splitlines()]
            samples.setdefault(file.stem[len("samples_") : -4], []).extend(lines)
        return Answer(
            numbers({**printed.get("results", {}), **printed.get("groups", {})}),
            {task: comparable(lines) for task, lines in samples.items()},
            frozenset(ShardId.parse(shard).task.rstrip("0123456789") for shard in dumped),
            trouble,
            frozenset(name.split("-")[2] for name, _ in self._logs() - logs),
            done.stderr,
        )
