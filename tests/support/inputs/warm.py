"""A warm interpreter: forks a child for each command, so that a job need not import torch and pandas again.

Rule: the server has imported only libraries that read no variable and no file of a test. A child takes the client's
environment, folder and streams, and imports transformers, datasets, lm_eval and all else anew.

    python warm.py serve SOCKET                    until its standard input closes
    python -I -S warm.py SOCKET PYTHON -m MODULE … or PYTHON FILE …, in place of PYTHON; the exit code is the command's
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys

PRELOADED = (
    "torch", "torch._dynamo", "torch.utils._pytree", "torch.nn", "torch.fx.passes.infra.pass_base", "torch.export", "numpy", "pandas", "pyarrow.dataset", "pyarrow.parquet",
    "pyarrow.json", "pyarrow.csv", "sacrebleu", "sympy", "multiprocess", "dill", "fsspec", "requests", "regex", "yaml", "jinja2",
    "redis", "psutil", "safetensors", "scipy.stats", "sqlite3", "pydantic",
)  # fmt: skip


def main(argv: list[str]) -> int:
    if argv[0] == "serve":
        return serve(argv[1])
    return ask(argv[0], argv[1:])


# --- the client ------------------------------------------------------------------------------------------------------


def ask(place: str, argv: list[str]) -> int:
    """Have the server run `argv`; SIGTERM is passed on, and the child ends with this process."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(place)
        here = os.getcwd()  # noqa: PTH109 (without pathlib it starts sooner)
        what = json.dumps({"argv": argv, "cwd": here, "env": dict(os.environ)}).encode()
        fds = array.array("i", [0, 1, 2])
        link.sendmsg([len(what).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])
        link.sendall(what)
        lines = link.makefile("r")
        child = int(lines.readline())
        signal.signal(signal.SIGTERM, lambda number, _frame: _kill(child, number))
        answer = lines.readline()
        return int(answer) if answer else 1


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- the server ------------------------------------------------------------------------------------------------------


def serve(place: str) -> int:
    import importlib
    import select

    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen(64)
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([door, 0], [], [])
            if 0 in ready and not os.read(0, 1):
                return 0
            if door in ready:
                link, _ = door.accept()
                if (
                    os.fork() == 0
                ):  # a keeper of each child: the server has one thread, so that forks are safe
                    door.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _keep(link)
                link.close()


def _keep(link: socket.socket) -> None:
    """In a process of its own: fork the child, wait for it or for the client's end, answer."""
    import select

    head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(12))
    fds = array.array("i")
    fds.frombytes(ancillary[0][2][:12])
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        body += link.recv(size - len(body))
    asked = json.loads(body)
    child = os.fork()
    if child == 0:
        link.close()
        _become(asked, list(fds))
    for fd in fds:
        os.close(fd)
    link.sendall(f"{child}\n".encode())
    end = os.pidfd_open(child)
    ready, _, _ = select.select([link, end], [], [])
    if end not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        link.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    os._exit(0)


def _become(asked: dict[str, object], fds: list[int]) -> None:
    """The command, in this forked process, as `python` would run it."""
    import importlib
    import runpy
    import traceback

    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    sys.path[0:1] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    importlib.invalidate_caches()
    words = list(asked["argv"])[1:]
    code: object = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException:  # noqa: BLE001 (as an interpreter ends)
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(code or 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
