"""What the training hook costs: milliseconds of its import and of `notify`, each case in a process of its own.

Prints JSON: per case the first, median, 99th percentile and maximum of `notify`, called by a process that is busy in
between, its most CPU time, and how many calls took more than 5 ms. "control" is as much work without the hook, timed at
the same places: what a busy machine adds is in both. "disk_full" needs root (a tmpfs of 64 kB) and is null otherwise.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.harness import Options, command, option, row, spread, targets

IMPORT = """
import sys, time
t = time.perf_counter()
import coordinator.hook
print((time.perf_counter() - t) * 1000)
"""
# A trainer is busy between calls: one that slept would hide what handing over to another thread costs.
NOTIFY = """
import json, sys, time
from coordinator import hook
def busy():
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end: sum(range(500))
def control(i):
    json.dumps({"a": list(range(20))})
def notify(i):
    hook.notify(f"/checkpoints/step-{i}", i, "core", work_dir=sys.argv[1], rank=0)
found = {"control": ([], []), "notify": ([], [])}
for i in range(int(sys.argv[2])):
    for call in (notify, control):
        busy()
        t, c = time.perf_counter(), time.thread_time()
        call(i)
        took, cpu = found[call.__name__]
        took.append((time.perf_counter() - t) * 1000)
        cpu.append((time.thread_time() - c) * 1000)
print(json.dumps(found))
"""


def _python(*argv: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", *argv], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def _case(work: Path, calls: int) -> dict[str, Any]:
    began = time.perf_counter()
    found = json.loads(_python(NOTIFY, str(work), str(calls)))
    (took, cpu), (control, _) = found["notify"], found["control"]
    return {
        "first_ms": took[0],
        "ms": spread(took),
        "cpu_max_ms": max(cpu),
        "over_5_ms": sum(t > 5 for t in took),
        "control_max_ms": max(control),
        "control_over_5_ms": sum(t > 5 for t in control),
        "process_s": time.perf_counter() - began,
    }


def _address(work: Path, port: int) -> None:
    (work / "redis").mkdir(parents=True)
    (work / "redis" / "address.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))


def _disk_full(folder: Path, calls: int) -> dict[str, Any] | None:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        return None
    try:
        with suppress(OSError):  # full before all is written
            (folder / "spool").mkdir()
            (folder / "filler").write_bytes(b"x" * 60 * 1024)
        return _case(folder, calls)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    imports = spread([float(_python(IMPORT)) for _ in range(7)])
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as silent:
        root = Path(scratch)
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _address(root / "slow", silent.getsockname()[1])
        _address(root / "down", 1)
        (root / "spool").mkdir()
        (root / "file").write_text("")
        folders = {
            "spool": "spool",
            "redis_down": "down",
            "redis_slow": "slow",
            "work_folder_is_a_file": "file",
        }
        notify: dict[str, Any] = {
            what: _case(root / folder, options.calls) for what, folder in folders.items()
        }
        notify["disk_full"] = _disk_full(root / "full", options.calls)
    rows = [row("import, median ms", imports["median"], 20.0)]
    return targets(rows, calls=options.calls, import_ms=imports, notify=notify)


if __name__ == "__main__":
    sys.exit(command("bench_hook", __doc__, measure, option("--calls", 200)))
