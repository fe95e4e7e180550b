"""What a node offers, measured by a job on it: `python -m evaljobs probe [--out FILE] [--root DIR …]`, for `evalspan doctor`.

Rule: the values are of this node at this moment, read in the interpreter of a trial or worker; null is a value that
cannot be read. With --out the record is a file in the work folder: that it arrives proves that the folder is shared.
A probe leaves nothing behind but, with --leave, a nonce: another job on the node that finds it proves that the node's
jobs share the memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import mmap
import os
import platform
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaljobs.contract.storage import write_atomic
from evaljobs.staging import store
from evaljobs.staging.capacity import cgroup_limits, measure_room, memory_available
from evaljobs.staging.store import StoreRefused

PACKAGES = ("lm_eval", "torch", "transformers", "vllm", "sglang", "redis", "rq")
REDIS_SECONDS = 5.0
SAMPLE_MB = 256
_BLOCK = 8 << 20  # bytes


def probe_node(roots: Sequence[str] = ("/dev/shm",), *, sample_mb: int = SAMPLE_MB) -> dict[str, Any]:
    """Return the node's record. Sizes in bytes, rates in bytes per second."""
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": installed_versions(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_available": memory_available(),
        "memory_cgroup_limit": min((most for most, _ in cgroup_limits()), default=None),
        "roots": [probe_root(root, sample_mb=sample_mb) for root in roots],
    }


def installed_versions() -> dict[str, str | None]:
    """Return the installed version of each of PACKAGES, without importing it; None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def probe_root(root: str, *, sample_mb: int = SAMPLE_MB) -> dict[str, Any]:
    """Probe one root: its size, its kind, whether weights may go there, and how fast a sample is written and read."""
    record: dict[str, Any] = {"root": root, "usable": False, "why": ""}
    try:
        disk, there = os.statvfs(root), measure_room(root)
        record |= {
            "fs": there.fs,
            "rung": there.rung,
            "size": disk.f_blocks * disk.f_frsize,
            "free": disk.f_bavail * disk.f_frsize,
            "room": there.free,
            "room_limited_by": there.limit,
        }
        with store.locked_home(root, create=True) as home:
            record |= measure_folder(home, min(sample_mb << 20, there.free // 4))
        record["usable"] = True
    except (StoreRefused, OSError) as error:
        record["why"] = str(error)
    return record


def measure_folder(folder: Path, size: int) -> dict[str, Any]:
    """Write and read `size` bytes in a folder; return rates in bytes per second. Nothing is left."""
    size -= size % _BLOCK
    if size <= 0:
        return {"sample": 0, "write_rate": None, "read_rate": None}
    block = mmap.mmap(-1, _BLOCK)
    block.write(secrets.token_bytes(4096) * (_BLOCK // 4096))
    # removed with this process, however it ends
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for offset in range(0, size, _BLOCK):
            os.pwrite(file.fileno(), block, offset)
        written = time.perf_counter()
        for offset in range(0, size, _BLOCK):
            os.preadv(file.fileno(), [block], offset)
        ended = time.perf_counter()
    return {"sample": size, "write_rate": size / (written - started), "read_rate": size / (ended - written)}


def exchange_nonce(root: str, name: str, *, leave: bool) -> bool | None:
    """Leave a nonce for another job (True), or find and remove one (whether it existed). None: no usable root."""
    try:
        with store.locked_home(root, create=leave) as home:
            # the next job that cleans the folder removes names of this kind
            place = home / f"{store.RETIRED_PREFIX}nonce-{name}"
            place.mkdir() if leave else place.rmdir()
    except FileNotFoundError:
        return False
    except (StoreRefused, OSError):
        return None
    return True


def redis_trouble(file: Path) -> str:
    """Return why Redis does not answer from here; "" if it does. `file`: the published address."""
    try:
        from evaljobs.queue import redis_client  # noqa: PLC0415 (a missing package is an answer)
    except ImportError as error:
        return f"this interpreter cannot talk to Redis: {error}"
    try:
        address = redis_client.read_address(file)
        with (
            redis_client.explain_errors(address.where),
            redis_client.make_client(address, seconds=REDIS_SECONDS) as client,
        ):
            client.ping()
    except redis_client.QueueUnavailable as error:
        return str(error)
    return ""


def main(argv: Sequence[str]) -> int:
    """Run the `probe` verb: write or print the record; with --look only whether the nonce was found."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs probe", description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the record; default: standard output")
    parser.add_argument("--root", action="append", help="a folder to stage into, in order; default: /dev/shm")
    parser.add_argument("--sample-mb", type=int, default=SAMPLE_MB)
    parser.add_argument("--redis-file", type=Path, help="the published address of a Redis to reach")
    parser.add_argument("--sandbox", action="store_true", help="try the sandbox's levels")
    parser.add_argument("--leave", metavar="NONCE", help="leave a nonce on the first root for another job")
    parser.add_argument("--look", metavar="NONCE", help="only find and remove a nonce of another job")
    chosen = parser.parse_args(argv)
    roots = chosen.root or ["/dev/shm"]
    if chosen.look:
        record: dict[str, Any] = {"nonce_seen": exchange_nonce(roots[0], chosen.look, leave=False)}
    else:
        record = probe_node(roots, sample_mb=chosen.sample_mb)
        record["redis_trouble"] = chosen.redis_file and redis_trouble(chosen.redis_file)
        record["sandbox"] = None
        if chosen.sandbox:
            from evaljobs.sandbox.levels import probe_levels  # noqa: PLC0415 (a second: imported only on request)

            record["sandbox"] = [asdict(report) for report in probe_levels()]
        record["nonce_left"] = bool(chosen.leave) and exchange_nonce(roots[0], chosen.leave, leave=True)
    text = json.dumps(record)
    if chosen.out is None:
        sys.stdout.write(text + "\n")
    else:
        write_atomic(chosen.out, text.encode())
    return 0
