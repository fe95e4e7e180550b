"""Warm interpreters: each command is run in a forked child, so that a job need not import torch and transformers again.

Rule: the first server has imported only libraries that read no variable and no file of a test. At a command's first
variables of the libraries (`LIBRARIES`) it forks a server for further commands that have the same ones: there
transformers, datasets and lm_eval are imported, too. A child has the client's environment, folder and streams.

    python warm.py serve SOCKET                    until its standard input closes
    python -I -S warm.py SOCKET PYTHON -m MODULE … or PYTHON FILE …, in place of PYTHON; the exit code is the command's
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys
import zlib

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


def _of_libraries(place, env):
    """The socket of the server for these variables of the libraries."""
    what = sorted((k, v) for k, v in env.items() if k.startswith(LIBRARIES) and k != "HF_TOKEN")
    return f"{place}.{zlib.crc32(json.dumps(what).encode()):08x}"


def ask(place, argv):
    """Have the server run `argv`; SIGTERM is passed on, and the child ends with this process."""
    env = dict(os.environ)
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(_of_libraries(place, env))
        except OSError:  # there is none yet
            link.connect(place)
        what = json.dumps({"argv": argv, "cwd": os.getcwd(), "env": env}).encode()  # noqa: PTH109 (pathlib is slow)
        fds = array.array("i", [0, 1, 2])
        link.sendmsg([len(what).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])
        link.sendall(what)
        lines = link.makefile("r")
        child = int(lines.readline())
        end = os.pidfd_open(child)
        signal.signal(signal.SIGTERM, lambda number, _frame: signal.pidfd_send_signal(end, number))
        return int(lines.readline() or 1)


def serve(place, base, modules):
    """Until standard input closes. `base`: the first server's socket. One thread, so that forks are safe."""
    import importlib
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(place)
        except OSError:  # another keeper was faster
            return
        for name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        door.listen(64)
        if place == base:
            os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([door, 0], [], [])
            if 0 in ready and not os.read(0, 1):
                return
            if door in ready:
                link, _ = door.accept()
                if os.fork() == 0:
                    door.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _keep(link, place, base)
                link.close()


def _keep(link, place, base):
    """In a process of its own: fork the child, wait for it or for the client's end, answer; then perhaps become a server."""
    import select

    head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(12))
    fds = array.array("i", ancillary[0][2][:12])
    with link.makefile("rb") as body:
        asked = json.loads(body.read(int.from_bytes(head, "big")))
    child = os.fork()
    if child == 0:
        link.close()
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        _become(**asked)
    for fd in fds:
        os.close(fd)
    link.sendall(f"{child}\n".encode())
    ready, _, _ = select.select([link, end := os.pidfd_open(child)], [], [])
    if end not in ready:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    link.close()
    if place == base:
        _environment(asked["env"])
        serve(_of_libraries(base, asked["env"]), base, OF_LIBRARIES)
    os._exit(0)


def _environment(env):
    import importlib

    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p] + [
        p for p in sys.path if p in OWN_PATH
    ]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in env
    importlib.invalidate_caches()


def _become(argv, cwd, env):
    """The command, in this forked process, as `python` would run it, with a `sitecustomize` on its PYTHONPATH."""
    import importlib.util
    import runpy

    _environment(env)
    sys.orig_argv = argv
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    os.chdir(cwd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = argv[2:] if argv[1] == "-m" else argv[1:]
    if argv[1] == "-m":
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[1], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[2], PRELOADED)
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
