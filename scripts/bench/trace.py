"""Product functions and files that one task passes through from the hook's `notify` to its last score, as one row of JSON.

Rule: product is `coordinator`, `evaljobs` and `priors`. Each function counts once, in whichever process it was entered;
the programs of the sandbox, which start without site-packages, are not seen. Every Python process gets this file as its
`sitecustomize`: a profiler writes each function of the product when it is first entered, so that a process that is killed
or ends by `os._exit` has written them all. Called by `scripts/check --trace`; `--list` prints the functions first.
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
    out = os.open(
        folder / f"{kind_of(sys.orig_argv)}-{os.getpid()}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
    )

    def entered(name: str) -> bool:
        going = os.path.exists(folder / GOING)  # noqa: PTH110 (pathlib's own functions would be profiled)
        return going and bool(os.write(out, f"{time.time()} {name}\n".encode()))

    profiler = profiler_of(TREE, entered)
    threading.setprofile(profiler)
    sys.setprofile(profiler)


def profiler_of(tree: Path, entered: Callable[[str], bool]) -> Callable[[FrameType, str, object], None]:
    """A profiler that names each function of the product below `tree`, as `file:Class.function`, until `entered` takes it."""
    roots = tuple(f"{tree}/{room}/" for room in PRODUCT)
    over: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in over:
            return
        name = code.co_qualname.replace("<locals>.", "")
        # a class's body is no function, nor is a lambda or a comprehension
        function = code.co_flags & inspect.CO_OPTIMIZED and "<" not in name
        if not (function and code.co_filename.startswith(roots)) or entered(
            f"{code.co_filename[len(str(tree)) + 1 :]}:{name}"
        ):
            over.add(code)

    return profile


def kind_of(argv: Iterable[str]) -> str:
    return next((kind for kind, words in KINDS.items() if not words.isdisjoint(argv)), "other")


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
    argv = [str(Path(sys.executable).with_name("evalspan")), "daemon", "--work-dir", str(work)]
    with (folder / "daemon.log").open("wb") as log:
        argv += ["--config", str(folder / "evalspan.toml")]
        daemon = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    try:
        until(daemon, (work / "redis" / "address.json").exists, log.name)
        (trace / GOING).touch()
        subprocess.run([sys.executable, "-c", NOTIFY, str(model), str(work), "training"], env=env, check=True)
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
        for line in file.read_text().splitlines():
            at, _, name = line.partition(" ")
            if float(at) <= end:
                found.setdefault(file.name.partition("-")[0], set()).add(name)
    return found


def counts(names: Iterable[str]) -> dict[str, int]:
    names = set(names)
    return {"functions": len(names), "files": len({name.partition(":")[0] for name in names})}


if __name__ == "sitecustomize":
    if place := os.environ.get("EVALSPAN_TRACE"):
        record(Path(place))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="trace-") as made_here:
        found_by = run(Path(made_here))
    every = sorted(set().union(*found_by.values()))
    if sys.argv[1:] == ["--list"]:
        for each in every:
            print(each, *(kind for kind in (*KINDS, "other") if each in found_by.get(kind, ())))
    by = {kind: counts(found_by[kind]) for kind in (*KINDS, "other") if kind in found_by}
    print(json.dumps({"bench": "trace", "task": TASK, **counts(every), "processes": by}))
