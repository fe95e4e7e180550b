"""Product functions and files that one task passes through from the hook's `notify` to its last score, as one row of JSON.

Rule: product is `coordinator`, `evaljobs` and `priors`. Each function counts once, in whichever process it was entered;
the programs of the sandbox, which start without site-packages, are not seen. Every Python process gets this file as its
`sitecustomize`: its profile function writes the name of each function of the product that is entered for the first time, so
that a process that is killed or ends by `os._exit` has written them all. Called by `scripts/check --trace`; `--list` prints
the functions first, each with its processes.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType

TREE = Path(os.environ.get("EVALSPAN_TRACE_TREE") or Path(__file__).parents[2])
PRODUCT = ("coordinator", "evaljobs", "priors")
TASK = "toy_programs"  # of tests/support/exactness/tasks
GOING = "going"  # a file of the trace's folder: functions entered before it is there do not count
SECONDS = 600.0  # the longest wait for the score
# kind of process -> the words of which one is an argument of its command line
KINDS = {
    "training": {"training"},
    "daemon": {"daemon"},
    "build": {"build"},
    "precursor": {"stage"},
    "trial": {"trial", "host"},
    "worker": {"worker"},
}
NOTIFY = "import sys; from coordinator import hook; hook.notify(sys.argv[1], 1, 'toys', work_dir=sys.argv[2]); hook.flush(60)"


def record(folder: Path) -> None:
    """Have this process and its forks write the functions of the product that they enter to `folder`."""
    seen: dict[int, CodeType] = {}  # by id: the hash of code is that of all it holds
    roots, going = tuple(f"{TREE}/{room}/" for room in PRODUCT), str(folder / GOING)
    out = os.open(
        folder / f"{kind_of(sys.orig_argv)}-{os.getpid()}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
    )

    def entered(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in seen:
            return
        ours = code.co_filename.startswith(roots)
        if not ours or os.path.exists(going):  # noqa: PTH110 (called by each function of the product)
            seen[id(code)] = code
            if ours and (name := name_of(code)):
                os.write(out, f"{time.time()} {name}\n".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


def name_of(code: CodeType) -> str:
    """`file:Class.function`; "" of a module, a class's body, a lambda or a comprehension."""
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
        return ""
    return f"{code.co_filename[len(str(TREE)) + 1 :]}:{code.co_qualname.replace('.<locals>', '')}"


def kind_of(argv: Iterable[str]) -> str:
    return next((kind for kind, words in KINDS.items() if not words.isdisjoint(argv)), "other")


if __name__ == "sitecustomize":
    if place := os.environ.get("EVALSPAN_TRACE"):
        record(Path(place))
else:

    def run(folder: Path) -> dict[str, set[str]]:
        """Evaluate TASK with a tiny model; kind of process -> functions, as `file:Class.function`."""
        from support.toys import config_text, suite_text, toy_model  # noqa: PLC0415

        site, trace, work = (folder / name for name in ("site", "trace", "work"))
        for made in (site, trace, work):
            made.mkdir()
        shutil.copy(__file__, site / "sitecustomize.py")
        (folder / "toys.toml").write_text(suite_text("toys", {TASK: {"limit": 8}}))
        watch = f'kind = "local"\nslots = 1\n[watch]\nroots = ["{folder}"]\nsuites = ["{folder}/toys.toml"]\n'
        (folder / "evalspan.toml").write_text(config_text() + watch)
        model = toy_model(folder)
        env = {**os.environ, "EVALSPAN_TRACE": str(trace), "EVALSPAN_TRACE_TREE": str(TREE)}
        env["PYTHONPATH"] = os.pathsep.join([str(site), str(TREE)])
        daemon_argv = [str(Path(sys.executable).with_name("evalspan")), "daemon", "--work-dir", str(work)]
        with (folder / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(
                [*daemon_argv, "--config", str(folder / "evalspan.toml")], env=env, stdout=log, stderr=log
            )
        try:
            until(daemon, (work / "redis" / "address.json").exists, log.name)
            (trace / GOING).touch()
            subprocess.run(
                [sys.executable, "-c", NOTIFY, str(model), str(work), "training"], env=env, check=True
            )
            until(daemon, lambda: any(work.glob("*/results.json")), log.name)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
        (results,) = work.glob("*/results.json")
        (scores,) = json.loads(results.read_text())["results"].values()
        if not scores:
            raise RuntimeError(f"no score: {results.read_text()}")
        return entered_by(trace, results.stat().st_mtime)

    def until(daemon: subprocess.Popen[bytes], law: Callable[[], bool], log: str) -> None:
        """Wait for a state; RuntimeError with the daemon's log where it ends or SECONDS pass."""
        end = time.monotonic() + SECONDS
        while not law():
            if daemon.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the evaluation has no score:\n{Path(log).read_text()}")
            time.sleep(0.2)

    def entered_by(trace: Path, end: float) -> dict[str, set[str]]:
        """Kind of process -> functions entered before `end`."""
        found: dict[str, set[str]] = {}
        for file in sorted(trace.glob("*.txt")):
            kind = file.name.partition("-")[0]
            for line in file.read_text().splitlines():
                at, _, name = line.partition(" ")
                if float(at) <= end:
                    found.setdefault(kind, set()).add(name)
        return found

    def counts(names: Iterable[str]) -> dict[str, int]:
        names = set(names)
        return {"functions": len(names), "files": len({name.partition(":")[0] for name in names})}

    def main() -> int:
        with tempfile.TemporaryDirectory(prefix="trace-") as folder:
            found = run(Path(folder))
        every = sorted(set().union(*found.values()))
        if sys.argv[1:] == ["--list"]:
            for name in every:
                print(name, *(kind for kind in (*KINDS, "other") if name in found.get(kind, ())))
        by = {kind: counts(found[kind]) for kind in (*KINDS, "other") if kind in found}
        print(json.dumps({"bench": "trace", "task": TASK, **counts(every), "processes": by}))
        return 0

    if __name__ == "__main__":
        sys.exit(main())
