"""The same question to plain lm_eval and to `evalspan eval`: scores and samples of a world as it is now."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.runtime.journal import read_events
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths
from support.inputs import plain
from support.inputs.world import World

WARM = Path(__file__).with_name("warm.py")
DEFAULT_SEEDS = {"random": 0, "numpy_random": 1234, "torch_random": 1234, "fewshot_random": 1234}


@dataclass(frozen=True)
class Answer:
    """What was printed. `ran`: leaf tasks with newly answered shards, without a number at their ends, `jobs`: kinds of jobs that were submitted."""

    results: dict[str, dict[str, float]]
    samples: dict[str, list[str]]
    evaluation: str = ""
    ran: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    trouble: str = ""
    said: str = field(default="", compare=False)

    def wrong(self, other: Answer) -> dict[str, str]:
        """Leaf task -> where two answers differ; the task is "" for an answer that failed, and for groups alone."""
        for one in (self, other):
            if one.trouble:
                return {"": one.trouble}
        found = {}
        for task in sorted({*self.samples, *other.samples}):
            a, b = self.results.get(task), other.results.get(task)
            if a != b:
                found[task] = f"{task}: {a} and {b}"
            elif self.samples.get(task) != other.samples.get(task):
                found[task] = f"{task}: other samples"
        if not found and self.results != other.results:
            found[""] = f"groups: {self.results} and {other.results}"
        return found

    def differs(self, other: Answer) -> str:
        """Where two answers differ, in a line; "" where they are equal."""
        return "; ".join(self.wrong(other).values())


def numbers(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        task: {k: v for k, v in metrics.items() if isinstance(v, float) and "stderr" not in k}
        for task, metrics in results.items()
    }


def comparable(lines: list[dict[str, Any]]) -> list[str]:
    """Samples as texts: documents, prompts, answers and numbers, without what differs between two ways of writing them."""
    return sorted(
        json.dumps([str(leaf) for key in plain.KEPT for leaf in leaves(line.get(key))]) for line in lines
    )


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


@contextmanager
def warm(folder: Path) -> Iterator[str]:
    """The command in place of an interpreter's, as words of a shell."""
    place = folder / "warm.sock"
    for old in folder.glob("warm.sock*"):
        old.unlink()
    argv = [sys.executable, str(WARM), "serve", str(place)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        server.stdout.readline()
        try:
            yield f"{sys.executable} -I -S {WARM} {place}"
        finally:
            server.stdin.close()
            server.wait()
            for socket in folder.glob("warm.sock*"):
                socket.unlink()


class Asking:
    """Asks both about one world; `work` is evalspan's work folder, the same until `fresh`."""

    def __init__(self, world: World, command: str) -> None:
        self.world, self.command = world, command
        self._works = itertools.count()
        self.fresh()

    def fresh(self) -> None:
        """Another work folder, and no prepared data but the Hub's: what went wrong before is gone."""
        self.work = self.world.folder / f"work-{next(self._works)}"
        for place in self.world.folder.glob("hf*/datasets/*"):
            if place.name != "org___rows":
                shutil.rmtree(place) if place.is_dir() else place.unlink()

    # --- plain lm_eval -------------------------------------------------------------------------------------------

    def plain(self) -> Answer:
        world, folder = self.world, self.world.folder
        cache = folder / "plain" / "datasets"
        shutil.rmtree(cache.parent, ignore_errors=True)
        prepared = world.hf_home / "datasets" / "org___rows"
        if prepared.exists():  # offline there is no other place
            shutil.copytree(prepared, cache / "org___rows")
        seed = world.suite.get("seed")
        asked = {
            "tasks": str(world.tasks),
            "entries": [
                {"name": name, "batch_size": world.suite.get("batch_size", 1), **entry}
                for name, entry in world.entries.items()
            ],
            "model_args": {"pretrained": str(world.path(world.model)), **world.arguments()},
            "system_instruction": world.suite.get("system_instruction"),
            "chat": world.suite.get("apply_chat_template", False),
            "seeds": DEFAULT_SEEDS if seed is None else dict.fromkeys(DEFAULT_SEEDS, seed),
        }
        asked_file, out = world.path("plain/asked.json"), world.path("plain/out.json")
        asked_file.parent.mkdir(exist_ok=True)
        asked_file.write_text(json.dumps(asked))
        environment = {
            **world.environment(),
            **world.trial_env,
            **world.exports,
            "HF_DATASETS_CACHE": str(cache),
        }
        done = subprocess.run(
            [*self.command.split(), sys.executable, plain.__file__, str(asked_file), str(out)],
            cwd=world.tasks, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            return Answer({}, {}, trouble="lm_eval: " + last_line(done.stderr), said=done.stderr)
        found = json.loads(out.read_text())
        samples = {task: comparable(lines) for task, lines in found["samples"].items()}
        return Answer(numbers(found["results"]), samples)

    # --- evalspan ------------------------------------------------------------------------------------------------

    def ours(self, *more: str) -> Answer:
        world = self.world
        world.write_settings(self.command)
        before = {place.parent.name for place in self.work.glob("*/evaluation.json")}
        argv = [
            str(Path(sys.executable).with_name("evalspan")), "eval", str(world.path(world.model)), "--json", "--suite",
            str(world.path("suite.toml")), "--work-dir", str(self.work), "--config", str(world.path("evalspan.toml")), *more,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                argv,
                cwd=world.folder,
                env=world.environment(),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer({}, {}, trouble="evalspan: not ended after 300 s")
        try:
            printed = json.loads(done.stdout)
            name = printed["evalspan"]["evaluation_id"]
        except (ValueError, KeyError):
            said = done.stderr.strip().splitlines() or ["nothing was said"]
            return Answer({}, {}, trouble="evalspan: " + " ".join(said[-2:])[:400], said=done.stderr)
        paths = EvaluationPaths(self.work / name)
        ran: set[str] = set()
        jobs: set[str] = set()
        if name not in before:
            for event in read_events(paths.journal):
                if event.kind == "shards-dumped":
                    ran |= {ShardId.parse(shard).task.rstrip("0123456789") for shard, _ in event.shards}
            jobs = {log.name.split("-")[2] for log in (paths.root / "logs").glob("es-*")}
        samples: dict[str, list[dict[str, Any]]] = {}
        for file in paths.samples.glob("samples_*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            samples.setdefault(file.stem[len("samples_") : -4], []).extend(lines)
        trouble = (
            "" if done.returncode == 0 else f"evalspan: exit {done.returncode}: {last_line(done.stderr)}"
        )
        return Answer(
            numbers({**printed.get("results", {}), **printed.get("groups", {})}),
            {task: comparable(lines) for task, lines in samples.items()},
            evaluation=name,
            ran=frozenset(ran),
            jobs=frozenset(jobs),
            trouble=trouble,
            said=done.stderr,
        )


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")[:400]
