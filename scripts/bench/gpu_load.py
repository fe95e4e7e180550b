"""The part "load" of scripts/bench_gpu: seconds from storage to node memory to the device, by several ways.

Rule: every way reads the same staged files, and its clock stops when the device holds all bytes. Trials load by
`transformers`; the other ways show what a load could cost, and one that this machine refuses says so in its row.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import staging
from coordinator.intake.checkpoint import inspect
from evaljobs.staging import precursor

CHUNK = 64 << 20  # bytes of a reader's pinned buffer
PRODUCT = "transformers, as trials do"
Row = dict[str, Any]


def seen(what: str, seconds: float | None = None, figure: str = "", **more: Any) -> Row:
    """A row of the table."""
    return {"what": what, "seconds": seconds, "figure": figure, **more}


def rate(what: str, rounds: list[float], size: int) -> Row:
    """A row of the best round, with bytes a second."""
    return seen(what, min(rounds), f"{size / min(rounds) / 1e9:.3g} GB/s", rounds=rounds)


def measure(model: Path, scratch: Path, memory: Path, device: str, rounds: int) -> list[Row]:
    """Rows for staging, for each way from the staged files to the device, and for a trial's whole load."""
    checkpoint = inspect(model)
    bench = staging.Bench(scratch, memory, checkpoint, rounds)

    def cold(work: Callable[[], Any]) -> Any:
        """Drop the weights from the page cache first, as far as their file system does that."""
        for file in bench.weights:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return work()

    def trial(place: str) -> list[float]:
        return [float(word) for word in staging.run(staging.TRIAL, place, device).split()]

    times = [cold(bench.staged) for _ in range(rounds)]
    rows = [rate("cold storage to /dev/shm", times, checkpoint.bytes)]
    times = [bench.staged() for _ in range(rounds)]
    rows.append(rate("storage in the page cache to /dev/shm", times, checkpoint.bytes))
    holding = precursor.stage_only(bench.spec(checkpoint, "held"))
    try:
        staged = holding.staged.path
        rows += to_device(Path(staged), device, rounds)
        loads = {"/dev/shm": [trial(staged) for _ in range(rounds)]}
        loads["cold storage"] = [cold(lambda: trial(str(model))) for _ in range(rounds)]
    finally:
        precursor.clear(holding, "bench")
    for name, found in loads.items():
        total, imported, loaded = min(found)
        text = f"import {imported:.1f} s, load {loaded:.1f} s"
        rows.append(seen(f"a trial's process, from {name}", total, text, rounds=found))
    return rows


def to_device(folder: Path, device: str, rounds: int) -> list[Row]:
    import torch  # noqa: PLC0415

    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)

    def seconds(way: Callable[[], Any]) -> float:
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        kept = way()
        if device != "cpu":
            torch.cuda.synchronize()
        ended = time.perf_counter()
        del kept  # its freeing does not count
        return ended - started

    first = seconds(lambda: torch.zeros(1, device=device))
    rows = [seen(f"the first tensor on {device} (its context)", first)]
    known = ways(folder, files, device)
    known[PRODUCT]()  # what is imported on the first use does not count
    for name, way in known.items():
        what = f"/dev/shm to {device}: {name}"
        try:
            rows.append(rate(what, [seconds(way) for _ in range(rounds)], size))
        except (RuntimeError, TypeError) as error:
            if name == PRODUCT:
                raise
            rows.append(seen(what, None, f"refused: {str(error).splitlines()[0]}"))
    return rows


def ways(folder: Path, files: Sequence[Path], device: str) -> dict[str, Callable[[], Any]]:
    """Ways to bring the files' weights to the device; each call returns what must live for that."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    def copied(where: str, **backend: str) -> list[Any]:
        tensors = [tensor for file in files for tensor in load_file(file, where, **backend).values()]
        # those on a CPU are views of a file's pages
        return [torch.empty_like(t, device=device).copy_(t) if t.device.type == "cpu" else t for t in tensors]

    return {
        PRODUCT: lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": device}),
        "pageable, tensors copied from the mapped file": lambda: copied("cpu"),
        "direct, safetensors": lambda: copied(device),
        "direct, safetensors with pread": lambda: copied(device, backend="pread"),
        "pinned buffer, 1 reader": lambda: pinned(files, device, 1),
        "pinned buffers, 4 readers": lambda: pinned(files, device, 4),
    }


def pinned(files: Sequence[Path], device: str, readers: int) -> Any:
    """The files' bytes, one after the other, in one uint8 tensor on the device; for a CPU the buffers are not pinned."""
    import torch  # noqa: PLC0415

    on_gpu = device != "cpu"
    sizes = [file.stat().st_size for file in files]
    there = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    starts = itertools.accumulate(sizes, initial=0)
    pieces = [
        (file, offset, start + offset, min(CHUNK, size - offset))
        for file, size, start in zip(files, sizes, starts, strict=False)
        for offset in range(0, size, CHUNK)
    ]

    def read(own: Sequence[tuple[Path, int, int, int]]) -> None:
        buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=on_gpu)
        with torch.cuda.stream(torch.cuda.Stream(device) if on_gpu else None):
            for file, offset, start, length in own:
                with file.open("rb", buffering=0) as source:
                    source.seek(offset)
                    assert source.readinto(memoryview(buffer.numpy())[:length]) == length, file
                there[start : start + length].copy_(buffer[:length])  # waits; other readers read meanwhile

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, (pieces[first::readers] for first in range(readers))))
    return there
