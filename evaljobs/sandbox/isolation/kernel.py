# ruff: noqa: PTH112
# pathlib, and what it imports, would enlarge every fork.
"""System calls that Python lacks: namespaces, mounts, capabilities, seccomp, Landlock.

Rule: thin wrappers that raise OSError, and pure builders of the byte strings that the kernel reads.
Imports the standard library alone. Called from `launch` and `zygote`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterable
from typing import Final

from evaljobs.sandbox.isolation import syscalls

_libc: Final = ctypes.CDLL(None, use_errno=True)
_syscall: Final = _libc.syscall
_syscall.restype = ctypes.c_long

MACHINE: Final = os.uname().machine
_COLUMN: Final = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_THREAD = 0x00010000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND = 32, 1024, 2048, 4096
MS_REC, MS_PRIVATE, MS_RELATIME = 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38


def syscall(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make one system call by name. Raise OSError with the kernel's errno if it fails."""
    if MACHINE not in _COLUMN:
        raise OSError(f"no system call table for {MACHINE}")
    number = (syscalls.SPECIAL.get(name) or syscalls.ALLOWED[name])[_COLUMN[MACHINE]]
    result: int = _syscall(
        ctypes.c_long(number or 0), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# --- processes and namespaces -------------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, as the manual page of prctl has it."""
    syscall("prctl", option, value, 0, 0, 0)


def map_ids(inner: int, outer_uid: int, outer_gid: int) -> None:
    """Map this process's only user and group to `inner` in its new user namespace."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner} {outer_uid} 1"),
        ("gid_map", f"{inner} {outer_gid} 1"),
    ):
        write_proc(f"/proc/self/{name}", text)


def write_proc(path: str, text: str) -> None:
    """One write(2) to a proc file; a buffered writer would hide its error."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def drop_capabilities() -> None:
    """Empty every capability set of this process."""
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall("capset", header, bytes(24))


# --- mounts -------------------------------------------------------------------------------------------------------


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Attach or change a mount, as the manual page of mount has it."""
    syscall("mount", source.encode(), target.encode(), kind and kind.encode(), flags, data and data.encode())  # type: ignore[arg-type]


def mount_proc() -> None:
    """Mount a private /proc: only processes if the kernel supports that (5.8), otherwise all of it."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    try:
        mount("proc", "/proc", "proc", flags, "subset=pid")
    except OSError:
        mount("proc", "/proc", "proc", flags)


def bind_read_only(source: str, target: str, *, device: bool = False) -> None:
    """Show `source` at `target`, read-only; keeps flags that a namespace may not drop."""
    mount(source, target, None, MS_BIND)
    flags = os.statvfs(target).f_flag  # ST_* and MS_* agree in the bits that follow
    keep = flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    keep |= MS_RELATIME if flags & 4096 else 0  # ST_RELATIME
    add = MS_RDONLY | MS_NOSUID | (0 if device else MS_NODEV)
    mount("none", target, None, MS_REMOUNT | MS_BIND | keep | add)


# --- seccomp ------------------------------------------------------------------------------------------------------

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
# PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS,
# PR_SET_VMA
_PRCTL_OPTIONS = (3, 15, 16, 21, 23, 39, 0x53564D41)
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD … F_SETFL, record locks, OFD locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which
# signals other processes
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
_AF_UNIX = 1
# SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC: a pair of datagram sockets could send to any
# socket of the machine
_STREAM_TYPES = (0x1, 0x801, 0x80001, 0x80801)
_OWN_PID = 0x7E57_1D00  # stands in the filter for the process's own pid
_CLONE_MASK = _CLONE_THREAD | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC
_CLONE_MASK |= CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

_LD, _JEQ, _JGT, _JGE, _AND, _RET = 0x20, 0x15, 0x25, 0x35, 0x54, 0x06


def _op(code: int, jt: int, jf: int, k: int) -> bytes:
    return struct.pack("HBBI", code, jt, jf, k)


def _argument(index: int) -> bytes:
    """Load the low half of an argument: all compared ones are 32-bit, or have their flags there."""
    return _op(_LD, 0, 0, 16 + 8 * index)


def _when(number: int | None, body: bytes) -> bytes:
    """Run `body`, which ends in returns, if the call is `number`; otherwise continue."""
    return b"" if number is None else _op(_JEQ, 0, len(body) // 8, number) + body


def _one_of(index: int, values: Iterable[int]) -> bytes:
    """Allow if an argument is one of `values`, otherwise EPERM."""
    allow = _op(_RET, 0, 0, _ALLOW)
    tests = b"".join(_op(_JEQ, 0, 1, v) + allow for v in values)
    return _argument(index) + tests + _op(_RET, 0, 0, _ERRNO | _EPERM)


def _any_of(numbers: Iterable[int]) -> bytes:
    """Allow any of `numbers`, otherwise EPERM, as ascending ranges.

    A chain of single tests would cost 0.4 ms per sample, because the kernel runs a new filter once per call number (its cache
    of calls that are always allowed).
    """
    ranges: list[list[int]] = []
    for n in sorted(numbers):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    body = b""
    for left, (low, high) in zip(range(len(ranges) - 1, -1, -1), ranges, strict=True):
        # two returns follow the last range: refuse, allow
        body += _op(_JGE, 0, 2 * left + 1, low) + _op(_JGT, 0, 2 * left + 1, high)
    return body + _op(_RET, 0, 0, _ERRNO | _EPERM) + _op(_RET, 0, 0, _ALLOW)


@functools.cache
def seccomp_program() -> bytes:
    """Return the filter of an untrusted process, as an array of sock_filter, with _OWN_PID for its pid.

    Everything not listed gives EPERM. A process may only signal itself. New processes are refused (threads are not), so that
    killing one process ends the program at every level.
    """
    column = _COLUMN[MACHINE]
    number = {name: row[column] for name, row in syscalls.SPECIAL.items()}
    allow, refuse = _op(_RET, 0, 0, _ALLOW), _op(_RET, 0, 0, _ERRNO | _EPERM)
    program = [
        _op(_LD, 0, 0, 4),
        _op(_JEQ, 1, 0, _AUDIT_ARCH[MACHINE]),
        _op(_RET, 0, 0, _KILL),
        _op(_LD, 0, 0, 0),
    ]
    if MACHINE == "x86_64":  # the x32 numbers reach the same calls
        program += [_op(_JGE, 0, 1, 0x40000000), _op(_RET, 0, 0, _ERRNO | _ENOSYS)]
    thread = _argument(0) + _op(_AND, 0, 0, _CLONE_MASK) + _op(_JEQ, 0, 1, _CLONE_THREAD) + allow
    pair = _argument(0) + _op(_JEQ, 1, 0, _AF_UNIX) + refuse + _one_of(1, _STREAM_TYPES)
    program += [
        *(_when(row[column], _op(_RET, 0, 0, _ERRNO)) for row in syscalls.IGNORED.values()),
        _when(number["kill"], _one_of(0, (_OWN_PID,))),
        _when(number["tgkill"], _one_of(0, (_OWN_PID,))),
        _when(number["prlimit64"], _one_of(0, (0, _OWN_PID))),
        _when(number["prctl"], _one_of(0, _PRCTL_OPTIONS)),
        _when(number["ioctl"], _one_of(1, _IOCTL_REQUESTS)),
        _when(number["fcntl"], _one_of(1, _FCNTL_COMMANDS)),
        _when(number["socketpair"], pair),
        _when(number["clone"], thread + refuse),
        _when(number["clone3"], _op(_RET, 0, 0, _ERRNO | _ENOSYS)),  # then libc uses clone
        _any_of(n for row in syscalls.ALLOWED.values() if (n := row[column]) is not None),
    ]
    return b"".join(program)


def install_seccomp() -> None:
    """Apply the filter to this process and its later threads; no_new_privs must be set."""
    program = seccomp_program().replace(struct.pack("I", _OWN_PID), struct.pack("I", os.getpid()))
    array = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(array))
    syscall("seccomp", 1, 0, header)  # SECCOMP_SET_MODE_FILTER


# --- Landlock -----------------------------------------------------------------------------------------------------

READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1


def landlock_ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Return a ruleset's descriptor: read below `readable`, write the files `writable`, nothing else.

    It denies everything that this kernel's version can (uapi/linux/landlock.h). Raise OSError without Landlock, and before
    Linux 6.2, whose Landlock lets a file opened for reading be truncated.
    """
    abi = syscall("landlock_create_ruleset", None, 0, 1)
    if abi < 3:
        raise OSError(errno.ENOSYS, "Landlock does not handle O_TRUNC before Linux 6.2")
    bits = 15 + (abi >= 5)  # IOCTL_DEV
    words = [(1 << bits) - 1]
    if abi >= 4:
        words.append(3)  # bind and connect TCP
    if abi >= 6:
        words.append(3)  # abstract sockets and signals stay inside
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    wanted = [(path, READ_FILE | READ_DIR) for path in readable]
    wanted += [(path, READ_FILE | WRITE_FILE) for path in writable]
    for path, access in wanted:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights = access if os.path.isdir(path) else access & ~READ_DIR
                syscall("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, fd), 0)
            finally:
                os.close(fd)
    return ruleset
