"""Product functions and files that one task passes through from the hook's `notify` to its last score, as one row of JSON.

Rule: product is `coordinator`, `evaljobs` and `priors`. Each function counts once, in whichever process it was entered;
the programs of the sandbox, which start without site-packages, are not seen. Every Python process gets this file as its
`sitecustomize`: it puts a line into each function of the product, which writes the function's name when it is first
entered, so that a process that is killed or ends by `os._exit` has written them all. Called by `scripts/check --trace`;
`--list` prints the functions first, each with its processes.
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
    seen: set[str] = set()
    going = str(folder / GOING)
    kind = kind_of(sys.orig_argv)
    out = os.open(folder / f"{kind}-{os.getpid()}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def entered(name: str) -> None:
        if name not in seen and os.path.exists(going):  # noqa: PTH110 (called by each function of the product)
            seen.add(name)
            os.write(out, f"{time.time()} {name}\n".encode())

    import builtins  # noqa: PLC0415

    builtins._evalspan_entered = entered  # type: ignore[attr-defined]  # noqa: SLF001
    roots = tuple(f"{TREE}/{room}/" for room in PRODUCT)
    loader = importlib.machinery.SourceFileLoader
    ordinary: Callable[[Any, str], Any] = loader.get_code

    def traced(self: importlib.machinery.SourceFileLoader, module: str) -> Any:
        path = self.get_filename(module)
        if not path.startswith(roots):
            return ordinary(self, module)
        return compile(
            marked(path[len(str(TREE)) + 1 :], self.get_data(path)), path, "exec", dont_inherit=True
        )

    loader.get_code = traced  # type: ignore[method-assign, assignment]


def kind_of(argv: Iterable[str]) -> str:
    return next((kind for kind, words in KINDS.items() if not words.isdisjoint(argv)), "other")


def marked(file: str, source: bytes) -> ast.Module:
    """The module with a line at the head of each function that names it: `file:Class.function`."""
    tree = ast.parse(source)

    def mark(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}."
            mark(child, name)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                (line,) = ast.parse(f"_evalspan_entered({f'{file}:{name[:-1]}'!r})").body
                child.body.insert(ast.get_docstring(child) is not None, line)

    mark(tree, "")
    return ast.fix_missing_locations(tree)


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
