"""Ratios of staging on this machine, all in one run: against cp, dd and parallel cp, and behind latency.

Rule: ways alternate within a round and the best round of each counts, so that a busy machine slows them alike. The
source is in the page cache; the targets are fresh tmpfs pages. Rates are bytes a second. The latency rows stand for slow
storage: they add 5 ms to each block read, for one stream and for evalspan's readers alike.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from support.node_memory import make_checkpoint

from bench.harness import Options, command, option, row, targets, timed
from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.specs import CheckpointSpec, StageSpec
from evaljobs.staging import copy as copying
from evaljobs.staging import precursor

MIB = 1 << 20
LATENCY = 0.005  # seconds a block
SLOW_BYTES = 256 * MIB  # that are read behind it
TRIALS = 8

PRECURSOR = """
import sys; from evaljobs.staging import precursor as stage; from evaljobs.contract.specs import StageSpec
h = stage.stage_only(StageSpec.model_validate_json(sys.argv[1])); print(h.staged.storage_bytes, flush=True)
sys.stdin.read(); stage.clear(h, 'bench')
"""


class Bench:
    """One run below a scratch folder (the storage) and a root (node memory)."""

    def __init__(self, scratch: Path, root: Path, checkpoint: CheckpointSpec) -> None:
        self.scratch, self.root, self.checkpoint = scratch, root, checkpoint
        self.weights = [Path(checkpoint.source) / f.name for f in checkpoint.files]

    def spec(self, name: str) -> StageSpec:
        folders = {"evaluation_dir": str(self.scratch), "lease_file": str(self.scratch / "lease")}
        where = {"node": "here", "roots": (str(self.root),)}
        return StageSpec(name=name, checkpoint=self.checkpoint, **where, **folders)

    def staged(self) -> float:
        """Stage once; seconds, of the whole and not of the copy alone."""
        started = time.perf_counter()
        holding = precursor.stage_only(self.spec("new"))
        seconds = time.perf_counter() - started
        assert holding.staged.rung == "shm", holding.staged.why
        precursor.clear_weights(holding, "bench")
        return seconds

    def plain(self, commands: list[list[str]]) -> float:
        """Run copies side by side into a fresh folder; seconds."""
        target = self.root / "plain"
        target.mkdir()
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                return timed(lambda: list(pool.map(lambda c: subprocess.run(c, check=True), commands)))
        finally:
            shutil.rmtree(target)

    def rates(self, rounds: int) -> dict[str, float]:
        to = str(self.root / "plain")
        one = ["cp", *map(str, self.weights), to]
        each = [["cp", str(w), to] for w in self.weights]
        dd = [f"dd bs=8M status=none if='{w}' of='{to}/{w.name}'" for w in self.weights]
        ways: dict[str, Callable[[], float]] = {
            "cp": lambda: self.plain([one]),
            "dd": lambda: self.plain([["sh", "-ec", "\n".join(dd)]]),
            "parallel_cp": lambda: self.plain(each),
            "staged": self.staged,
        }
        best, order = dict.fromkeys(ways, float("inf")), list(ways)
        for _ in range(2):  # the source into the page cache; a virtual machine gets pages for it late
            self.plain([one])
        for _ in range(rounds):
            for name in order:
                best[name] = min(best[name], ways[name]())
            order.append(order.pop(0))  # the first of a round finds the coldest pages
        return {name: self.checkpoint.bytes / seconds for name, seconds in best.items()}

    def storage_ratio(self) -> float:
        """Bytes that left storage over the model's bytes, with eight precursors of one checkpoint on the node at once."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        pipes |= {"stderr": subprocess.DEVNULL, "text": True}
        specs = (self.spec(f"t{i}").model_dump_json() for i in range(TRIALS))
        running = [subprocess.Popen([sys.executable, "-c", PRECURSOR, spec], **pipes) for spec in specs]
        read = sum(int(process.stdout.readline()) for process in running)
        for process in running:
            process.communicate("")
        return read / self.checkpoint.bytes

    def latency(self, rounds: int) -> float:
        """Behind 5 ms a block: seconds of one stream over those of sixteen readers, both of heads of the same four shards."""
        files = sorted(self.weights, key=lambda w: -w.stat().st_size)[:4]
        size = min(SLOW_BYTES // len(files), files[-1].stat().st_size) // MIB * MIB
        sources = [self.scratch / f"head-{file.name}" for file in files]
        for file, head in zip(files, sources, strict=True):
            with file.open("rb") as whole:
                head.write_bytes(whole.read(size))
        pairs = [
            (self._slow_copy(sources, size, 1), self._slow_copy(sources, size, 16)) for _ in range(rounds)
        ]
        alone, ours = map(min, zip(*pairs, strict=True))
        return alone / ours

    def _slow_copy(self, sources: list[Path], size: int, readers: int) -> float:
        preadv = os.preadv

        def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            time.sleep(LATENCY)
            return preadv(descriptor, buffers, offset)

        with contextlib.ExitStack() as stack:
            copies = []
            for source in sources:
                file = stack.enter_context(tempfile.TemporaryFile(dir=self.root))
                file.truncate(size)
                known = {"size": size, "mtime_ns": source.stat().st_mtime_ns, "target": file.fileno()}
                copies.append(copying.Copy(name=source.name, source=source, **known))
            with mock.patch.object(os, "preadv", slow):
                return timed(lambda: copying.copy_files(copies, readers=readers, stop=threading.Event()))


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-staging-", dir=options.scratch) as storage,
        tempfile.TemporaryDirectory(prefix="bench-staging-", dir="/dev/shm") as memory,
    ):
        scratch, root = Path(storage), Path(memory)
        size = int(options.gb * 1e9) // options.shards
        bench = Bench(
            scratch,
            root,
            inspect_checkpoint(make_checkpoint(scratch / "model", shards=options.shards, size=size)),
        )
        rates = bench.rates(options.rounds)
        fresh = rates["staged"] / max(rate for way, rate in rates.items() if way != "staged")
        rows = [
            row("fresh / best of cp, dd, parallel cp", fresh, 0.95, at_least=True),
            row("5 ms a block: evalspan / single stream", bench.latency(options.rounds), 6, at_least=True),
            row("bytes from storage / model, 8 trials", bench.storage_ratio(), 1.0),
        ]
    return targets(rows, bytes=bench.checkpoint.bytes, load_average=os.getloadavg()[0], rates=rates)


OPTIONS = (
    option("--gb", 4.0, "size of the synthetic checkpoint"),
    option("--shards", 8),
    option("--rounds", 5),
    option("--scratch", text="a folder on disk (default: the temporary folder)", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_staging", __doc__, measure, *OPTIONS))
