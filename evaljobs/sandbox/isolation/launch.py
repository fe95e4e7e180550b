# ruff: noqa: PTH102, PTH103, PTH106, PTH110, PTH112, PTH114, PTH115, PTH116, PTH120, PTH211
# pathlib, and what it imports, would enlarge every fork.
"""First code of a lane: isolates the process, then becomes the zygote.

Rule: started by `lane` as `python -S -s -P launch.py CONFIG` with a clean environment. It loads all
its code first, then gives up in turn: namespaces, the file system except the interpreter, its user,
its capabilities. A step that fails ends the lane with the reason, so no program runs half isolated.

CONFIG is JSON: {"level", "fd", "packages"}: the socket to the supervisor, and folders of installed
packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import types
from typing import Any, Final

_NOBODY: Final = 65534
_SYSTEM_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")
_EXTRAS: Final = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def _load_own_code() -> None:
    """Make `evaljobs.sandbox` importable without running the packages above it."""
    sandbox = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name, folder in (("evaljobs", os.path.dirname(sandbox)), ("evaljobs.sandbox", sandbox)):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package


if __name__ == "__main__":
    _load_own_code()

from evaljobs.sandbox.isolation import kernel, zygote  # noqa: E402


def readable_paths() -> list[str]:
    """Return absolute paths that a program may read, parents first: modules, libraries, time zones."""
    wanted = {path for path in sys.path if os.path.exists(path)}
    wanted |= {os.path.realpath(path) for path in wanted}
    for line in zygote.read_text("/proc/self/maps").splitlines():
        path = line.partition("/")[2]
        if ".so" in path:
            wanted.add(_library_path("/" + path))
    wanted |= {path for path in _EXTRAS if os.path.exists(path)}
    kept: list[str] = []
    for path in sorted(wanted):
        if not any(path.startswith(parent + "/") for parent in kept):
            kept.append(path)
    return kept


def _library_path(path: str) -> str:
    """Return the folder of a mapped library if it only contains libraries (others load later), otherwise the file."""
    folder = os.path.dirname(path)
    if folder == sys.base_prefix + "/lib" or any(
        folder == d or folder.startswith(d + "/") for d in _SYSTEM_LIBRARIES
    ):
        return folder
    return path


# --- the private root -------------------------------------------------------------------------------------------------


def enter_namespaces(*, user: bool) -> None:
    """Continue as process 1 of new namespaces; the outer process waits for it and exits with it."""
    uid, gid = os.getuid(), os.getgid()
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    flags |= kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP | (kernel.CLONE_NEWUSER if user else 0)
    kernel.syscall("unshare", flags)
    if user:
        kernel.map_ids(_NOBODY, uid, gid)
    child = os.fork()
    if child:
        os.closerange(3, 256)  # the supervisor's sockets must end when the child is gone
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def path_inside(path: str) -> str:
    """Return a path's location in the private root: a program's own /tmp would hide what is below /tmp."""
    return f"/of{path}" if path.startswith("/tmp/") else path


def build_root(readable: list[str]) -> None:
    """Make a read-only root: `readable`, four devices, a private /proc, an empty /tmp. Modules are found there."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    os.chdir("/tmp")
    kernel.syscall("pivot_root", b".", b"old")
    os.chdir("/")
    for link in ("/lib", "/lib64"):
        if os.path.islink("/old" + link):
            os.symlink(os.readlink("/old" + link), link)
    for path in (*readable, *_DEVICES):
        source, place = "/old" + path, path_inside(path)
        if not os.path.exists(source) or os.path.exists(place):
            continue
        if os.path.isdir(source):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT, 0o644))
        kernel.bind_read_only(source, place, device=path in _DEVICES)
    for folder in ("/proc", "/tmp"):
        os.makedirs(folder, exist_ok=True)
    os.symlink("/tmp", "/dev/shm")
    kernel.mount_proc()
    kernel.syscall("umount2", b"/old", kernel.MNT_DETACH)
    os.rmdir("/old")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, flags)
    sys.path[:] = map(path_inside, sys.path)


def drop_root() -> None:
    """Become the unprivileged user 65534, permanently."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # so that it can map its user in the next namespace


def readable_by_others(path: str) -> bool:
    """Return whether a user without special rights could reach a path."""
    with contextlib.suppress(OSError):
        folder = os.path.realpath(path)
        while folder != "/":
            folder = os.path.dirname(folder)
            if not os.stat(folder).st_mode & 1:
                return False
        return True
    return False


def leave_root(level: str, readable: list[str]) -> bool:
    """As root, make a private root if that is allowed, then become the unprivileged user.

    Return whether the root was made. Root makes the mounts, because the unprivileged user may not reach an interpreter in
    root's home.
    """
    made = False
    if level != "rlimits":
        with contextlib.suppress(PermissionError):  # root of a container may lack the right
            enter_namespaces(user=False)
            made = True
    if made:
        build_root(readable)
    elif not readable_by_others(os.__file__):
        # Never as root outside a private root: kill(-1) there would end every process of the machine.
        raise PermissionError("started as root with an interpreter that no other user can read")
    drop_root()
    return made


def isolate_process(level: str) -> list[str]:
    """Isolate this process and return the paths that its programs may read.

    With namespaces it keeps its rights over its own user namespace, to give each program a fresh /tmp; programs drop them.
    """
    readable = readable_paths()
    made = os.geteuid() == 0 and leave_root(level, readable)
    if level == "namespaces" and made:
        kernel.syscall("unshare", kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.map_ids(_NOBODY, _NOBODY, _NOBODY)
    elif level == "namespaces":
        enter_namespaces(user=True)
        build_root(readable)
    elif level == "landlock":
        kernel.drop_capabilities()
    os.chdir("/")
    if made or level == "namespaces":
        readable = list(map(path_inside, readable))
        kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no program may use /proc or ptrace on this process
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    return readable


def main(config: dict[str, Any]) -> None:
    """Isolate the process and serve until the supervisor closes its socket."""
    # dup takes the lowest number: later processes close what they must not have below 256
    job = socket.socket(fileno=os.dup(config["fd"]))
    os.close(config["fd"])
    sys.path += config["packages"]
    try:
        zygote.preload_modules()
        with contextlib.suppress(OSError):
            kernel.write_proc("/proc/self/oom_score_adj", "1000")  # programs end before other jobs
        readable = isolate_process(config["level"])
        lane = zygote.Zygote(level=config["level"], job=job, readable=readable)
    except OSError as error:
        job.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)
    job.sendall(json.dumps({"ready": True}).encode() + b"\n")
    lane.serve()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
