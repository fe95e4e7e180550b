"""Refuses folders that the nodes of a Slurm cluster cannot see, as far as this machine can prove it.

Rule: memory (tmpfs, ramfs) and folders such as /tmp are visible only on this machine, unless a network file system is mounted
there or every node of the cluster is this machine. A local disk elsewhere may be exported to the nodes, which only the probes
of `evalspan doctor` can tell. Called by `evalspan eval` and `submit` before anything is staged.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from glob import has_magic
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command
from coordinator.errors import OperatorError
from coordinator.operations.doctor.findings import SHARED_FS
from evaljobs.staging.capacity import MEMORY_FS, fs_type

OWN_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
SINFO_SECONDS = 30.0
ADDRESSES_COMMAND = ("sinfo", "--noheader", "--Node", "--Format=NodeAddr:256")


def check_shared(paths: Iterable[str]) -> None:
    """Raise OperatorError for the first path that only this machine sees. Slurm is only queried if there is one."""
    for path in paths:
        fs = fs_type(_existing(path))
        if not is_own(Path(path).resolve(), fs):
            continue
        if are_all_here(_addresses(), socket.gethostname()):
            return
        raise OperatorError(
            f"the nodes cannot see {path} ({fs}, this machine's own): put it on storage that they share"
        )


def _existing(path: str) -> Path:
    """Return the path itself, or the folder of a pattern's matches."""
    place = Path(path)
    while has_magic(str(place)) and not place.exists():
        place = place.parent
    return place


def is_own(place: Path, fs: str) -> bool:
    """Return whether each machine has its own folder there. `place`: absolute, without links; `fs`: its file system's type."""
    if fs.startswith(SHARED_FS):
        return False
    return fs in MEMORY_FS or any(place.is_relative_to(folder) for folder in OWN_FOLDERS)


def are_all_here(addresses: Sequence[str], host: str) -> bool:
    """Return whether every node is this machine, as on a cluster of one. True also without addresses, which prove nothing."""
    own = {"localhost", host, host.partition(".")[0]}
    return all(address in own or _loopback(address) for address in addresses)


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _addresses() -> list[str]:
    try:
        return run_command(ADDRESSES_COMMAND, seconds=SINFO_SECONDS).split()
    except CommandError:
        return []
