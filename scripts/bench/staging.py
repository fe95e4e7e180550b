"""Ratios of staging on this machine, all in one run: against cp, dd and parallel cp, and behind latency.

Rule: ways alternate within a round and the best round of each counts, so that a busy machine slows them alike. The
source is in the page cache; the targets are fresh tmpfs pages. Rates are bytes a second. The latency rows stand for slow
storage: they add 5 ms to each block read, for one stream and for evalspan's readers alike.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import Options, command, option, timed
from coordinator.intake.checkpoint import inspect
from evaljobs.contract.specs import CheckpointSpec, StageSpec
from evaljobs.staging import copy as copying
from evaljobs.staging import precursor

MIB = 1 << 20
LATENCY = 0.005  # seconds a block
TRIALS = 8
LOADS = 24  # rounds of loading; an odd one out moves no median

LOAD = """
import json, sys, time
import torch, transformers
staged, storage, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
def load(path):
    started = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model(torch.zeros((1, 8), dtype=torch.long))
    return time.perf_counter() - started
load(staged), load(storage)  # the first of a process pays for what both share
times = []
for i in range(rounds):  # each goes first in every other round: what the first leaves behind serves the second
    pair = {path: load(path) for path in ((staged, storage) if i % 2 else (storage, staged))}
    times.append((pair[staged], pair[storage]))
print(json.dumps(times))
"""
BARE = """
import time; a = time.perf_counter()
import sys, torch, transformers
b = time.perf_counter()
transformers.AutoTokenizer.from_pretrained(sys.argv[1])
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
print(b - a, time.perf_counter() - b)
"""
TRIAL = """
import time; a = time.perf_counter()
import sys
from evaljobs.trial.engines import loading
from evaljobs.contract.specs import ModelOptions
loaded = loading.load(sys.argv[1], ModelOptions(device=sys.argv[2]), 1).loaded
print(time.perf_counter() - a, loaded.import_seconds, loaded.load_seconds)
"""


def make_checkpoint(folder: Path, size: int, shards: int = 1) -> CheckpointSpec:
    """A checkpoint of `size` bytes of weights; each MiB of it is different."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    each, index = size // shards, {}
    noise = os.urandom(MIB)
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        header = json.dumps({f"t{i}": {"dtype": "U8", "shape": [each], "data_offsets": [0, each]}}).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for block in range(0, each, MIB):
                file.write(((i << 32) + block).to_bytes(8, "little") + noise[8 : min(MIB, each - block)])
        index[f"t{i}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return inspect(folder)


class Bench:
    """One run below a scratch folder (the storage) and a root (node memory)."""

    def __init__(self, scratch: Path, root: Path, checkpoint: CheckpointSpec, rounds: int) -> None:
        self.scratch, self.root, self.checkpoint, self.rounds = scratch, root, checkpoint, rounds
        self.weights = [Path(checkpoint.source) / f.name for f in checkpoint.files]

    def spec(self, checkpoint: CheckpointSpec, name: str) -> StageSpec:
        folders = {"evaluation_dir": str(self.scratch), "lease_file": str(self.scratch / "lease")}
        return StageSpec(name=name, node="here", checkpoint=checkpoint, roots=(str(self.root),), **folders)

    def plain(self, commands: list[list[str]], parallel: int) -> float:
        """Run copies into a fresh folder; seconds."""
        target = self.root / "plain"
        target.mkdir()
        try:
            with ThreadPoolExecutor(parallel) as pool:
                return timed(lambda: list(pool.map(lambda c: subprocess.run(c, check=True), commands)))
        finally:
            shutil.rmtree(target)

    def staged(self) -> float:
        """Stage once; seconds, of the whole and not of the copy alone."""
        started = time.perf_counter()
        holding = precursor.stage_only(self.spec(self.checkpoint, "new"))
        seconds = time.perf_counter() - started
        assert holding.staged.rung == "shm", holding.staged.why
        precursor.clear(holding, "bench")
        return seconds

    def rates(self) -> dict[str, float]:
        to = str(self.root / "plain")
        one = ["cp", *map(str, self.weights), to]
        each = [["cp", str(w), to] for w in self.weights]
        dd = [["dd", "bs=8M", f"if={w}", f"of={to}/{w.name}", "status=none"] for w in self.weights]
        ways: dict[str, Callable[[], float]] = {
            "cp": lambda: self.plain([one], 1),
            "dd": lambda: self.plain(dd, 1),
            "parallel_cp": lambda: self.plain(each, len(os.sched_getaffinity(0))),
            "staged": self.staged,
        }
        best = dict.fromkeys(ways, float("inf"))
        order = list(ways)
        for _ in range(2):  # the source into the page cache; a virtual machine gets pages for it late
            self.plain([one], 1)
        for _ in range(self.rounds):
            for name in order:
                best[name] = min(best[name], ways[name]())
            order.append(order.pop(0))  # the first of a round finds the coldest pages
        return {name: self.checkpoint.bytes / seconds for name, seconds in best.items()}

    def storage_ratio(self) -> float:
        """Bytes that left storage over the model's bytes, with eight precursors of one checkpoint on the node at once."""
        code = (
            "import sys; from evaljobs.staging import precursor as stage; from evaljobs.contract.specs import StageSpec\n"
            "h = stage.stage_only(StageSpec.model_validate_json(sys.argv[1])); print(h.staged.storage_bytes, flush=True)\n"
            "sys.stdin.read(); stage.clear(h, 'bench')"
        )
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        specs = (self.spec(self.checkpoint, f"t{i}").model_dump_json() for i in range(TRIALS))
        running = [subprocess.Popen([sys.executable, "-c", code, s], text=True, **pipes) for s in specs]
        read = sum(int(process.stdout.readline()) for process in running if process.stdout is not None)
        for process in running:
            process.communicate("")
        return read / self.checkpoint.bytes

    def latency(self, size: int = 256 * MIB) -> dict[str, float]:
        """Behind 5 ms a block: the rate of one stream and of sixteen readers, both of the same blocks."""

        def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            time.sleep(LATENCY)
            return os.preadv(descriptor, buffers, offset)

        files = sorted(self.weights, key=lambda w: -w.stat().st_size)[:4]
        size = min(size, files[-1].stat().st_size * len(files)) // len(files) // MIB * MIB
        sources = []
        for file in files:  # heads of four shards, as files of their own
            head = self.scratch / f"head-{file.name}"
            with file.open("rb") as whole, head.open("wb") as part:
                part.write(whole.read(size))
            sources.append(head)
        rates = {"single_stream": 0.0, "ours": 0.0}
        for _ in range(self.rounds):
            for name, readers in (("single_stream", 1), ("ours", 16)):
                seconds = self._slow_copy(sources, size, readers, slow)
                rates[name] = max(rates[name], size * len(files) / seconds)
        for source in sources:
            source.unlink()
        return rates

    def _slow_copy(self, sources: list[Path], size: int, readers: int, read: copying.ReadBlock) -> float:
        copies = []
        for i, source in enumerate(sources):
            target = os.open(self.root / f"slow-{i}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            (self.root / f"slow-{i}").unlink()
            os.ftruncate(target, size)
            mtime = source.stat().st_mtime_ns
            copies.append(copying.Copy(name=str(i), source=source, size=size, mtime_ns=mtime, target=target))
        try:
            return timed(lambda: copying.copy_files(copies, readers=readers, read=read))
        finally:
            for copy in copies:
                os.close(copy.target)


def run(code: str, *arguments: str) -> str:
    """The last line that a program prints in an interpreter of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def loads(model: Path, scratch: Path, root: Path) -> dict[str, Any]:
    """A real model: loading it staged against page-cached storage, and a trial's start against a bare script's."""
    spec = Bench(scratch, root, inspect(model), 1).spec(inspect(model), "model")
    holding = precursor.stage_only(spec)
    times = json.loads(run(LOAD, holding.staged.path, str(model), str(LOADS)))
    bare, trial = [], []
    for _ in range(3):
        bare.append(sum(map(float, run(BARE, holding.staged.path).split())))
        trial.append(float(run(TRIAL, holding.staged.path, "cpu").split()[0]))
    precursor.clear(holding, "bench")
    staged, storage = (statistics.median(pair[i] for pair in times) for i in range(2))
    return {
        "model_bytes": spec.checkpoint.bytes,
        "staged_load_seconds": staged,
        "storage_load_seconds": storage,
        "staged_over_storage": staged / storage,
        "bare_import_and_load_seconds": min(bare),
        "trial_import_and_load_seconds": min(trial),
        "trial_over_bare": min(trial) / min(bare),
    }


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-staging-", dir=options.scratch) as storage,
        tempfile.TemporaryDirectory(prefix="bench-staging-", dir="/dev/shm") as memory,
    ):
        scratch, root = Path(storage), Path(memory)
        bench = Bench(
            scratch,
            root,
            make_checkpoint(scratch / "model", int(options.gb * 1e9), options.shards),
            options.rounds,
        )
        rates = bench.rates()
        slow = bench.latency()
        best = max(rates["cp"], rates["dd"], rates["parallel_cp"])
        report: dict[str, Any] = {
            "cpus": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "bytes": bench.checkpoint.bytes,
            "shards": options.shards,
            "rates": rates,
            "latency_rates": slow,
            "staged_over_best": rates["staged"] / best,
            "latency_ours_over_single": slow["ours"] / slow["single_stream"],
            "storage_over_model_bytes": bench.storage_ratio(),
        }
        if options.model is not None:
            report["loads"] = loads(options.model, scratch, root)
    return report, True


OPTIONS = (
    option("--gb", 4.0, "size of the synthetic checkpoint"),
    option("--shards", 8),
    option("--rounds", 5),
    option("--model", text="a real model's folder, for the load rows", type=Path),
    option("--scratch", text="a folder on disk (default: the temporary folder)", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_staging", __doc__, measure, *OPTIONS))
