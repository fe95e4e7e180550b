"""What a node offers for staging, as one JSON object: `python -m evaljobs probe [--root DIR …] [--sample-mb N]`.

Rule: measured or read on the node itself, at the time; what cannot be told is null. A probe leaves nothing behind.

It does not know: what other nodes say. Whether /dev/shm is shared between jobs is told by comparing two jobs: each
gives the mount's identity, and `nonce` leaves or looks for a file that another job left.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaljobs.staging import owned_files, store
from evaljobs.staging.capacity import cgroup_limits, memory_available, room
from evaljobs.staging.owned_files import Refused

SAMPLE_MB = 256
_BLOCK = 8 << 20
LOGIND = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf", "/usr/lib/systemd/logind.conf")


def probe_node(roots: Sequence[str] = ("/dev/shm",), *, sample_mb: int = SAMPLE_MB) -> dict[str, Any]:
    """All that `doctor` wants to know of this node. Sizes in bytes, rates in bytes a second."""
    limits = cgroup_limits()
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "host": socket.gethostname(),
        "uid": os.geteuid(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": len(os.sched_getaffinity(0)),
        "boot_id": store.boot_id(),
        "memory_available": memory_available(),
        "memory_cgroup_limit": min((most for most, _ in limits), default=None),
        "memory_cgroup_headroom": min((free for _, free in limits), default=None),
        "remove_ipc": remove_ipc(),
        "user_namespaces": user_namespaces(),
        "roots": [probe_root(root, sample_mb=sample_mb) for root in roots],
    }


def probe_root(root: str, *, sample_mb: int = SAMPLE_MB) -> dict[str, Any]:
    """One root: its size, its kind, whether we may use it, and how fast a sample goes in and out of it."""
    record: dict[str, Any] = {"root": root, "usable": False, "why": ""}
    try:
        disk, there = os.statvfs(root), room(root)
        record |= {
            "fs": there.fs,
            "rung": there.rung,
            "size": disk.f_blocks * disk.f_frsize,
            "free": disk.f_bavail * disk.f_frsize,
            "room": there.free,
            "room_limited_by": there.limit,
            "mount": mount_of(root),
            "private_hint": private_hint(root),
        }
        os.close(owned_files.open_root(root))
        with store.locked_home(root, create=True) as home:
            sample = min(sample_mb << 20, there.free // 4)
            record |= measure(home.fd, sample)
        record["usable"] = True
    except (Refused, OSError, TimeoutError) as error:
        record["why"] = str(error)
    return record


def mount_of(root: str) -> dict[str, Any]:
    """The mount's identity: two jobs on a node that see the same device and namespace share it."""
    return {
        "device": Path(root).stat().st_dev,
        "mount_namespace": Path("/proc/self/ns/mnt").stat().st_ino,
        "inode": Path(root).stat().st_ino,
    }


def private_hint(root: str) -> bool | None:
    """Whether this process sees another mount at `root` than pid 1 does; None where pid 1 may not be asked."""
    try:
        return not os.path.samestat(Path(root).stat(), Path(f"/proc/1/root/{root}").stat())
    except OSError:
        return None


def remove_ipc() -> bool | None:
    """Whether logind wipes a user's /dev/shm when his last session ends (logind.conf(5): by default it does)."""
    places = [Path(p) for p in LOGIND]
    parts = [part for p in places for part in sorted(Path(f"{p}.d").glob("*.conf"))]
    answer: bool | None = None
    for path in (*reversed(places), *parts):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        answer = True if answer is None else answer
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                answer = value.strip().lower() in {"yes", "true", "1", "on"}
    return answer


def user_namespaces() -> bool:
    """Whether an unprivileged user namespace can be made here."""
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "true"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def measure(folder: int, size: int) -> dict[str, Any]:
    """Write and read `size` bytes in an open folder of ours; rates in bytes a second. Nothing stays."""
    size -= size % _BLOCK
    if size <= 0:
        return {"sample": 0, "write_rate": None, "read_rate": None}
    name = f".sample-{secrets.token_hex(4)}"
    block = mmap.mmap(-1, _BLOCK)
    block.write(secrets.token_bytes(4096) * (_BLOCK // 4096))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    os.unlink(name, dir_fd=folder)  # gone with this process, however it ends
    try:
        started = time.perf_counter()
        for offset in range(0, size, _BLOCK):
            os.pwrite(file, block, offset)
        written = time.perf_counter()
        for offset in range(0, size, _BLOCK):
            os.preadv(file, [block], offset)
        ended = time.perf_counter()
    finally:
        os.close(file)
    return {"sample": size, "write_rate": size / (written - started), "read_rate": size / (ended - written)}


def nonce(root: str, name: str, *, leave: bool) -> bool:
    """Leave a nonce in our home for another job to see (True), or look for one and take it away (whether it was there).

    The proof of a shared /dev/shm: one job leaves it, another one on the same node finds it.
    """
    if Path(name).name != name or not name.isalnum():
        raise ValueError(f"{name!r} is no nonce")
    place = f"{store.RETIRED}nonce-{name}"  # a name that anybody of ours removes, if nobody ever looks
    try:
        with store.locked_home(root, create=leave) as home:
            if leave:
                os.mkdir(place, 0o700, dir_fd=home.fd)
            else:
                os.rmdir(place, dir_fd=home.fd)
    except FileNotFoundError:
        return False
    return True


def probe_main(argv: Sequence[str]) -> int:
    """The `probe` verb: prints the record; with --leave or --look, whether the nonce was left or found."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs probe", description=__doc__)
    parser.add_argument("--root", action="append", help="default: /dev/shm")
    parser.add_argument("--sample-mb", type=int, default=SAMPLE_MB)
    parser.add_argument("--leave", metavar="NONCE", help="leave a nonce on the first root for another job")
    parser.add_argument(
        "--look", metavar="NONCE", help="look for a nonce that another job left, and take it away"
    )
    chosen = parser.parse_args(argv)
    roots = chosen.root or ["/dev/shm"]
    record = probe_node(roots, sample_mb=chosen.sample_mb)
    if chosen.leave:
        record["nonce_left"] = nonce(roots[0], chosen.leave, leave=True)
    if chosen.look:
        record["nonce_seen"] = nonce(roots[0], chosen.look, leave=False)
    sys.stdout.write(json.dumps(record) + "\n")
    return 0
