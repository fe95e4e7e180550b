"""Stall of a training loop by each way to save its state, and the steps beside a background save with our hook.

Rule: ways alternate within a round; the first round warms up. `stall`: seconds from a step's end to the moment when the next
step may begin; `over_torch_save`: its ratio to that of torch.save, which leaves the data in the page cache, while the others
wait for the disk. `slower`: the median step beside the save over one without; `durable` and `announced`: seconds from the
step's end. The model is plain, on the CPU, in one process without a process group; steps use one thread.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bench.harness import Options, RunError, command, option, timed
from coordinator import hook

SIDE = 2048  # of a layer's square matrix: 16 MiB
QUIET_STEPS = 5


class Training:
    """A model of so many bytes; `folder` is its checkpoint, `work` a work folder without a daemon."""

    def __init__(self, scratch: Path, size: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(size // (4 * SIDE**2))))
        self.optimizer, self.inputs = torch.optim.SGD(self.model.parameters(), lr=1e-6), torch.randn(8, SIDE)
        self.folder, self.work = scratch / "step", scratch / "work"
        (self.work / "inbox").mkdir(parents=True, mode=0o700)
        self.step()

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def torch_save(self) -> dict[str, float]:
        return {"stall": timed(lambda: torch.save(self.model.state_dict(), self.folder / "model.pt"))}

    def dcp_save(self) -> dict[str, float]:
        return {
            "stall": timed(lambda: dcp.save({"model": self.model.state_dict()}, checkpoint_id=self.folder))
        }

    def dcp_async_save(self) -> dict[str, float]:
        """Steps go on until the notice lies in the inbox."""
        ended, beside, started = list[float](), list[float](), time.perf_counter()
        saving: Any = dcp.async_save({"model": self.model.state_dict()}, checkpoint_id=self.folder)
        saving.add_done_callback(lambda _: ended.append(time.perf_counter()))
        hook.on_dcp_saved(saving, str(self.folder), 1, "core", work_dir=self.work)
        stall = time.perf_counter() - started
        while not (notices := list((self.work / "inbox").glob("*.json"))):
            beside.append(timed(self.step))
        announced = time.perf_counter()
        if not ended or not (self.folder / ".metadata").exists():
            raise RunError("the checkpoint was announced before it was durable")
        notices[0].unlink()
        slower = median(beside) / median(timed(self.step) for _ in range(QUIET_STEPS))
        since = {"durable": ended[0] - started, "announced": announced - started}
        return {"stall": stall, **since, "slower": slower}


WAYS = (Training.torch_save, Training.dcp_save, Training.dcp_async_save)


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    torch.set_num_threads(1)
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for megabytes in options.mb:
        seen: dict[str, list[dict[str, float]]] = {save.__name__: [] for save in WAYS}
        with tempfile.TemporaryDirectory(prefix="bench-saving-", dir=options.scratch) as scratch:
            training = Training(Path(scratch), megabytes * 10**6)
            for save in WAYS * (options.rounds + 1):
                training.folder.mkdir()
                seen[save.__name__].append(save(training))
                shutil.rmtree(training.folder)
                os.sync()  # so that no way waits for another's data
        own = {w: {key: median(f[key] for f in found[1:]) for key in found[0]} for w, found in seen.items()}
        for found in own.values():
            found["over_torch_save"] = found["stall"] / own["torch_save"]["stall"]
        sizes[f"{megabytes} MB"] = own
    return {"load_average": os.getloadavg()[0], **sizes}, True


OPTIONS = (
    option("--mb", [400, 2000], "sizes of the state", type=int, nargs="+"),
    option("--rounds", 3),
    option("--scratch", text="a folder on disk (default: the temporary folder)", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_saving", __doc__, measure, *OPTIONS))
