"""Refuses folders that the nodes of a Slurm cluster cannot see, as far as this machine can prove it.

Rule: node memory (tmpfs, ramfs) and the folders that each machine has for itself (/tmp, ...) are seen by this machine alone, unless a
network file system is mounted there or every node of the cluster is this machine. A local disk anywhere else may be exported to
the nodes: `evalspan doctor` asks the nodes themselves.
Called by `evalspan eval` and `submit` before anything is staged.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Iterable, Sequence
from glob import has_magic
from pathlib import Path

from coordinator.doctor.doctor import SHARED_FS
from coordinator.errors import OperatorError
from evaljobs.staging.capacity import MEMORY_FS, fs_type

OWN_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
SINFO_SECONDS = 30.0
ADDRESSES = ("sinfo", "--noheader", "--Node", "--Format=NodeAddr:256")


def check_shared(paths: Iterable[str]) -> None:
    """OperatorError with the first path that only this machine sees. Slurm is asked only where there is one."""
    for path in paths:
        fs = fs_type(_existing(path))
        if not is_own(Path(path).resolve(), fs):
            continue
        if all_here(_addresses(), socket.gethostname()):
            return
        raise OperatorError(
            f"the nodes cannot see {path} ({fs}, this machine's own): put it on storage that they share"
        )


def _existing(path: str) -> Path:
    """The path itself, or the folder of a pattern's matches."""
    place = Path(path)
    while has_magic(str(place)) and not place.exists():
        place = place.parent
    return place


def is_own(place: Path, fs: str) -> bool:
    """Whether a path lies where each machine has its own. `place`: absolute, without links; `fs`: its file system's type."""
    if fs.startswith(SHARED_FS):
        return False
    return fs in MEMORY_FS or any(place.is_relative_to(folder) for folder in OWN_FOLDERS)


def all_here(addresses: Sequence[str], host: str) -> bool:
    """Whether every node is this machine, as on a cluster of one; also where Slurm named no node, which proves nothing."""
    own = {"localhost", host, host.partition(".")[0]}
    return all(address in own or _loopback(address) for address in addresses)


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _addresses() -> list[str]:
    """Addresses of the cluster's nodes; empty where Slurm does not say."""
    try:
        done = subprocess.run(ADDRESSES, capture_output=True, text=True, timeout=SINFO_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
