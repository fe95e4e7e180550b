"""Measures what a node computes, and how fast, alone and with the other nodes of its job: `python -m evaljobs node-check
FOLDER`.

Rule: one process per GPU (on CPUs: per node), started by srun. Each leaves a record FOLDER/NODE.LOCAL.json before the
collective and after it, so that one which dies or hangs is identified by it. It exits after --seconds. All products are of
integers, so that every device must produce identical results. Submitted by `coordinator.operations.node_check.checker`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaljobs.contract.storage import write_atomic
from evaljobs.errors import one_line

if TYPE_CHECKING:
    from torch import Tensor

MATRIX_SIDE = {"cpu": 1024, "cuda": 4096}  # of the square matrices that are multiplied
MEMORY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # copied within the device's memory
COPY_BYTES = 256 << 20  # copied from host to GPU
GATHER_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # that each process contributes to the all-gather
# time of a device's own work; other processes may share a CPU's cores, and their time does not make it slow
CLOCKS = {"cpu": time.process_time, "cuda": time.perf_counter}
REPEATS = 5  # of each measurement; the fastest counts
GATHER_SHARE = 0.5  # longest wait for the others, as a fraction of a process's seconds
LARGEST_ENTRY = 8  # of a matrix: sums stay below 2**24, so that float32 is exact in any order
MOST_KERNEL_LINES = 20  # of Xids that appeared while the check ran
PORT_TAKEN_WORDS = ("EADDRINUSE", "address already in use")


def main(argv: Sequence[str]) -> int:
    """Run the `node-check` verb."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs node-check", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the records")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which this process ends itself")
    chosen = parser.parse_args(argv)
    faulthandler.dump_traceback_later(chosen.seconds, exit=True)  # even if a call of the driver hangs
    local = int(os.environ.get("SLURM_LOCALID", "0"))
    record: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "local": local,
        "trouble": "",  # evidence that this node is bad
        "kernel": [],  # lines of the kernel's log about Xids since the check began
        "together": "",  # why the collective failed, or was not tried
        "lost": "",  # why it did not take place, without a node being at fault
        "done": False,
    }
    place, before = chosen.folder / f"{record['node']}.{local}.json", frozenset(kernel_log())
    try:
        record |= measure_alone(chosen.device, local)
    except Exception as error:  # noqa: BLE001 (a driver's, or an interpreter's without torch: the other nodes tell)
        record["together"] = f"a measurement failed: {one_line(error)}"
    record["kernel"] = [line for line in kernel_log() if line not in before][:MOST_KERNEL_LINES]
    write_atomic(place, json.dumps(record).encode())
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and not record["together"]:
        try:
            record |= gather_rate(chosen.device, local, GATHER_SHARE * chosen.seconds)
        except Exception as error:  # noqa: BLE001 (as above)
            said = one_line(error)
            record["lost" if any(word in str(error) for word in PORT_TAKEN_WORDS) else "together"] = said
    record["kernel"] = [line for line in kernel_log() if line not in before][:MOST_KERNEL_LINES]
    record["done"] = True
    write_atomic(place, json.dumps(record).encode())
    return 0


def measure_alone(kind: str, local: int) -> dict[str, Any]:
    """Return the device's name, its rates (operations or bytes per second) and what is wrong with it."""
    import torch  # noqa: PLC0415

    if kind == "cpu":
        torch.set_num_threads(1)
        device, name = torch.device("cpu"), "CPU"
    else:
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    rates, wrong = {}, []
    rates["matmul"], said = product_rate(device)
    wrong.append(said)
    words = MEMORY_BYTES[kind] // 4
    here, there = torch.ones(words, device=device), torch.empty(words, device=device)
    rates["memory"] = 2 * 4 * words / fastest_seconds(lambda: there.copy_(here), device, CLOCKS[kind])
    wrong.append("" if torch.equal(here, there) else "memory does not hold what was written")
    if kind == "cuda":
        host = torch.arange(COPY_BYTES // 4, dtype=torch.int32).pin_memory()
        copied = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=device)
        rates["copy"] = COPY_BYTES / fastest_seconds(lambda: copied.copy_(host, non_blocking=True), device)
        wrong.append("" if torch.equal(copied.cpu(), host) else "a copy from the host is wrong")
        wrong.append(gpu_error_counters(device.index))
    return {"device": name, "rates": rates, "trouble": "; ".join(filter(None, wrong))}


def product_rate(device: Any) -> tuple[float, str]:
    """Return operations per second of a matrix product, and errors. Checked on the CPU as A (B r), by Freivalds."""
    import torch  # noqa: PLC0415

    side = MATRIX_SIDE[device.type]
    drawn = torch.Generator().manual_seed(1)
    a, b = (
        torch.randint(-LARGEST_ENTRY, LARGEST_ENTRY, (side, side), generator=drawn, dtype=torch.float32)
        for _ in range(2)
    )
    r = torch.randint(1, 1000, (side,), generator=drawn).double()
    right, made = a.double() @ (b.double() @ r), list[Any]()
    on = [a.to(device), b.to(device)]
    seconds = fastest_seconds(lambda: made.append(torch.matmul(*on)), device, CLOCKS[device.type])
    wrong = sum(int((each.cpu().double() @ r != right).sum()) for each in made)
    said = f"wrong product: {wrong} rows in {len(made)} products of {side} x {side}" if wrong else ""
    return 2 * side**3 / seconds, said


def fastest_seconds(
    work: Callable[[], object], device: Any, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of the fastest of REPEATS runs, by this clock."""
    import torch  # noqa: PLC0415

    found = []
    for _ in range(REPEATS):
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - started)
    return min(found)


def gather_rate(kind: str, local: int, patience: float) -> dict[str, Any]:
    """Return bytes per second that this process receives in an all-gather over all processes, and what is wrong with it.
    Errors of torch pass through if the others do not arrive, or finish, within `patience` seconds.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, processes = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    # rank 0 runs on the node where srun was called
    host, port = os.environ["SLURM_LAUNCH_NODE_IPADDR"], 20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=patience),
    )
    device = torch.device(kind, local % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    words = GATHER_BYTES[kind] // 4

    def of(number: int) -> Tensor:
        return torch.arange(words, dtype=torch.int32, device=device) * (2 * number + 1)

    own, found = of(rank), [torch.empty(words, dtype=torch.int32, device=device) for _ in range(processes)]
    seconds = fastest_seconds(lambda: dist.all_gather(found, own), device)
    wrong = [number for number, each in enumerate(found) if not torch.equal(each, of(number))]
    dist.barrier()
    said = f"the all-gather brought wrong values from {len(wrong)} of {processes} processes" if wrong else ""
    return {"together": said, "gathered": (processes - 1) * GATHER_BYTES[kind] / seconds}


# --- what NVIDIA's driver counts -------------------------------------------------------------------------------------------


def gpu_error_counters(index: int) -> str:
    """Return errors of a GPU that the driver has counted since it was loaded; "" if there are none, or no nvidia-ml-py."""
    try:
        import pynvml  # noqa: PLC0415 (optional)
    except ImportError:
        return ""
    import torch  # noqa: PLC0415

    found, bus = [], ""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        bus = str(pynvml.nvmlDeviceGetPciInfo(gpu).bus)
        with suppress(pynvml.NVMLError):  # GPUs without ECC
            kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            if count := pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since):
                found.append(f"{count} uncorrected ECC errors")
        with suppress(pynvml.NVMLError):
            _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(gpu)
            found += ["rows of memory wait for a reset"] * bool(pending) + ["row remapping failed"] * bool(
                failed
            )
    return f"{', '.join(found)} (GPU {index}, PCI bus {bus})" if found else ""


def kernel_log() -> list[str]:
    """Return lines about Xids in the kernel's log, which is often only readable by root."""
    with suppress(OSError, subprocess.SubprocessError):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=True).stdout
        return [line for line in log.splitlines() if "NVRM: Xid" in line]
    return []
