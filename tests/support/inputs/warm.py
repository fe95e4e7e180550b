"""Warm interpreters: each command is run in a forked child, so that a job need not import torch and transformers again.

Rule: the first server has imported only libraries that read no variable and no file of a test. A command's keeper becomes
a server of its own for the next commands that have the same variables of the libraries (`LIBRARIES`): there transformers,
datasets and lm_eval are imported, too. A child has the client's environment, folder and streams.

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
import zlib

TYPE_CHECKING = False  # typing costs the client milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

PRELOADED = (
    "torch", "torch._dynamo", "torch.utils._pytree", "torch.nn", "torch.fx.passes.infra.pass_base", "torch.export",
    "numpy", "pandas", "pyarrow.dataset", "pyarrow.parquet", "pyarrow.json", "pyarrow.csv", "sacrebleu", "sympy", "multiprocess",
    "dill", "fsspec", "requests", "regex", "yaml", "jinja2", "redis", "psutil", "safetensors", "scipy.stats", "sqlite3", "pydantic",
)  # fmt: skip
OF_LIBRARIES = (
    "huggingface_hub", "datasets", "datasets.packaged_modules.json.json", "datasets.packaged_modules.csv.csv", "lm_eval.evaluator",
    "lm_eval.models.huggingface", "lm_eval.tasks", "transformers.models.llama.modeling_llama", "transformers.generation.utils",
    "accelerate", "peft",
)  # fmt: skip
LIBRARIES = ("HF_", "TRANSFORMERS_", "PYTHON", "LMEVAL_", "TQDM_", "XDG_", "HOME")  # variables that they read


OWN_PATH = tuple(sys.path[1:])  # of the interpreter, without this file's folder


def main(argv: list[str]) -> int:
    if argv[0] == "serve":
        return serve(argv[1])
    return ask(argv[0], argv[1:])


# --- the client ------------------------------------------------------------------------------------------------------


def ask(place: str, argv: list[str]) -> int:
    """Have the server run `argv`; SIGTERM is passed on, and the child ends with this process."""
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(_of_libraries(place, os.environ))
        except OSError:  # there is none yet
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


def _of_libraries(place: str, env: Mapping[str, str]) -> str:
    """The socket of the server for these variables of the libraries."""
    what = sorted((k, v) for k, v in env.items() if k.startswith(LIBRARIES) and k != "HF_TOKEN")
    return f"{place}.{zlib.crc32(json.dumps(what).encode()):08x}"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- the server ------------------------------------------------------------------------------------------------------


def serve(place: str) -> int:
    _import(PRELOADED)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen(64)
        os.write(1, b"ready\n")
        return _answer(door, place)


def _import(modules: Sequence[str]) -> None:
    import importlib

    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _answer(door: socket.socket, place: str) -> int:
    """Until standard input closes. A keeper of each child waits for it: this process has one thread, so that forks are safe."""
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([door, 0], [], [])
        if 0 in ready and not os.read(0, 1):
            return 0
        if door in ready:
            link, _ = door.accept()
            if os.fork() == 0:
                door.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                env = _keep(link)
                _stay(place, env)
            link.close()


def _stay(place: str, env: Mapping[str, str]) -> NoReturn:
    """Become the server for these variables, unless there is one."""
    own = _of_libraries(place, env)
    if "." in place.rpartition("/")[2].removesuffix(".sock"):
        os._exit(0)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as door:
        door.bind(own)
        _environment(env)
        _import(OF_LIBRARIES)
        door.listen(64)
        _answer(door, own)
    os._exit(0)


def _environment(env: Mapping[str, str]) -> None:
    import importlib

    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p] + [
        p for p in sys.path if p in OWN_PATH
    ]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in env
    importlib.invalidate_caches()


def _keep(link: socket.socket) -> Mapping[str, str]:
    """In a process of its own: fork the child, wait for it or for the client's end, answer. Returns the child's environment."""
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
    link.close()
    return dict(asked["env"])


def _become(asked: dict[str, object], fds: list[int]) -> None:
    """The command, in this forked process, as `python` would run it."""
    import runpy
    import traceback

    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    _environment(asked["env"])
    os.chdir(asked["cwd"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
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
