"""Product functions and files that one task passes through from the hook's `notify` to its last score, as one row of JSON.

Rule: product is `coordinator`, `evaljobs` and `priors`. Each function counts once, in whichever process it was entered;
the programs of the sandbox, which start without site-packages, are not seen. Every Python process gets this file as its
`sitecustomize`: its profile function writes a function's name when it is first entered, so that a process that is killed
or ends by `os._exit` has written them all. Called by `scripts/check --trace`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

TREE = Path(os.environ.get("EVALSPAN_TRACE_TREE") or Path(__file__).parents[2])
PRODUCT = ("coordinator", "evaljobs", "priors")
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


# --- in each process --------------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Have this process, its threads and its forks write the functions of the product that they enter to `folder`."""
    seen: set[str] = set()
    going = folder / GOING
    file = folder / f"{kind_of(sys.orig_argv)}-{os.getpid()}.txt"
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    rooms = tuple(f"{TREE}/{room}/" for room in PRODUCT)
    files: dict[str, str | None] = {}  # path -> its place in the product

    def entered(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if (path := code.co_filename) not in files:
            files[path] = path.removeprefix(f"{TREE}/") if path.startswith(rooms) else None
        if (place := files[path]) is None or code.co_name[0] == "<" or not code.co_flags & CO_OPTIMIZED:
            return  # a lambda and the like; the body of a class
        name = f"{place}:{'.'.join(part for part in code.co_qualname.split('.') if part[0] != '<')}"
        if name not in seen and going.exists():
            seen.add(name)
            os.write(out, f"{time.time()} {name}\n".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


def kind_of(argv: Iterable[str]) -> str:
    return next((kind for kind, words in KINDS.items() if not words.isdisjoint(argv)), "other")


# --- in the command ---------------------------------------------------------------------------------------------------


def run(folder: Path, task: str) -> dict[str, set[str]]:
    """Evaluate one task of a tiny model; kind of process -> functions, as `file:Class.function`."""
    from support.toys import config_text, suite_text, toy_model  # noqa: PLC0415

    site, trace, work = (folder / name for name in ("site", "trace", "work"))
    for made in (site, trace, work):
        made.mkdir()
    shutil.copy(__file__, site / "sitecustomize.py")
    (folder / "toys.toml").write_text(suite_text("toys", {task: {"limit": 8}}))
    watch = f'kind = "local"\nslots = 1\n[watch]\nroots = ["{folder}"]\nsuites = ["{folder}/toys.toml"]\n'
    (folder / "evalspan.toml").write_text(config_text() + watch)
    model = toy_model(folder)
    env = {**os.environ, "EVALSPAN_TRACE": str(trace), "EVALSPAN_TRACE_TREE": str(TREE)}
    env["PYTHONPATH"] = os.pathsep.join([str(site), str(TREE)])
    argv = [str(Path(sys.executable).with_name("evalspan")), "daemon", "--work-dir", str(work)]
    argv += ["--config", str(folder / "evalspan.toml")]
    with (folder / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen(argv, env=env, stdout=log, stderr=log)

    def until(law: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not law():
            if daemon.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the evaluation has no score:\n{Path(log.name).read_text()}")
            time.sleep(0.2)

    try:
        until((work / "redis" / "address.json").exists)
        (trace / GOING).touch()
        notify = [sys.executable, "-c", NOTIFY, str(model), str(work), "training"]
        subprocess.run(notify, env=env, check=True)
        until(lambda: any(work.glob("*/results.json")))
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
    (results,) = work.glob("*/results.json")
    (scores,) = json.loads(results.read_text())["results"].values()
    if not scores:
        raise RuntimeError(f"no score: {results.read_text()}")
    return entered_by(trace, results.stat().st_mtime)


def entered_by(folder: Path, end: float) -> dict[str, set[str]]:
    """Kind of process -> functions entered before `end`."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in folder.glob("*.txt"):
        lines = [line.partition(" ") for line in file.read_text().splitlines()]
        found[file.name.partition("-")[0]] |= {name for at, _, name in lines if float(at) <= end}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    task = "a toy task of tests/support/exactness/tasks"
    parser.add_argument("--task", default="toy_programs", help=task)
    parser.add_argument("--list", action="store_true", help="first the functions, each with its processes")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        found = run(Path(folder), chosen.task)
    kinds = [kind for kind in (*KINDS, "other") if found.get(kind)]
    every = set().union(*found.values())
    for name in sorted(every) if chosen.list else ():
        print(name, *(kind for kind in kinds if name in found[kind]))

    def counts(names: set[str]) -> dict[str, int]:
        return {"functions": len(names), "files": len({name.partition(":")[0] for name in names})}

    by = {kind: counts(found[kind]) for kind in kinds}
    print(json.dumps({"bench": "trace", "task": chosen.task, **counts(every), "processes": by}))


if __name__ == "sitecustomize" and "EVALSPAN_TRACE" in os.environ:
    record(Path(os.environ["EVALSPAN_TRACE"]))
elif __name__ == "__main__":
    main()
