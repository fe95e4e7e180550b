"""On which CPU to make a node's mount namespace, so that its jobs can have namespaces of their own.

job_container/tmpfs keeps a job's namespace by a bind mount of /proc/PID/ns/mnt. Linux refuses that (EINVAL) unless the
mounter's namespace has the lower id. Before 6.18 the older one had it. Since then each CPU takes ids from a batch of its
own (4096, for namespaces of all kinds), new batches are always higher, and now and then a job could not start. A node made
on the CPU that is at the lowest id comes before all later namespaces, unless that batch ended just then: `comes_first`
checks. Rule: a kernel that does not show ids numbers them in order, and no CPU is preferred.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess

# _IOR(0xb7, 5, __u64) of <linux/nsfs.h>: the id of a mount namespace (Linux 6.11 and later).
NS_GET_MNTNS_ID = 0x8008B705


def lowest_cpu() -> int | None:
    """The CPU, of those we may use, that hands out the lowest ids now."""
    return min(((number, cpu) for cpu, number in _new_ids().items()), default=(0, None))[1]


def comes_first(pid: int) -> bool:
    """Whether the mount namespace of `pid` has a lower id than any that is made from now on."""
    own = _id_of(pid)
    return own is None or all(own < number for number in _new_ids().values())


def _new_ids() -> dict[int, int]:
    """For each CPU that we may use, where it tells: the id of a mount namespace made there just now."""
    ids = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        argv = ["taskset", "-c", str(cpu), "unshare", "--mount", "sh", "-c", "echo; read wait"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            if child.stdout is not None and child.stdin is not None and child.stdout.read(1) == b"\n":
                number = _id_of(child.pid)
                child.stdin.close()
                ids |= {} if number is None else {cpu: number}
    return ids


def _id_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/ns/mnt", "rb") as handle:  # noqa: PTH123 (no path of the file system)
            raw = fcntl.ioctl(handle, NS_GET_MNTNS_ID, bytes(8))
    except OSError:
        return None
    number: int = struct.unpack("=Q", raw)[0]
    return number
