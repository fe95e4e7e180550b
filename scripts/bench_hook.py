"""What the training hook costs: milliseconds of its import and of `notify`, each case in a process of its own.

Prints JSON: per case the first, median, 99th percentile and maximum of `notify`, called by a process that is busy in
between, its most CPU time, and how many calls took more than 5 ms. "control" is as much work without the hook, timed at
the same places: what a busy machine adds is in both. "disk_full" needs root (a tmpfs of 64 kB) and is null otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
    took, cpu = found["notify"]
    control = found["control"][0]
    return {
        "first_ms": round(took[0], 4),
        "p50_ms": round(statistics.median(took), 4),
        "p99_ms": round(sorted(took)[int(len(took) * 0.99)], 4),
        "max_ms": round(max(took), 4),
        "cpu_max_ms": round(max(cpu), 4),
        "over_5_ms": sum(t > 5 for t in took),
        "control_max_ms": round(max(control), 4),
        "control_over_5_ms": sum(t > 5 for t in control),
        "process_s": round(time.perf_counter() - began, 2),
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
        (folder / "spool").mkdir()
        (folder / "filler").write_bytes(b"x" * 60 * 1024)
        return _case(folder, calls)
    except OSError:
        return _case(folder, calls)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    found: dict[str, Any] = {"schema_version": 1, "calls": calls}
    imports = sorted(float(_python(IMPORT)) for _ in range(7))
    found["import_ms"] = {"p50": round(imports[3], 2), "max": round(imports[-1], 2)}
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as silent:
        root = Path(scratch)
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _address(root / "slow", silent.getsockname()[1])
        _address(root / "down", 1)
        (root / "spool").mkdir()
        (root / "file").write_text("")
        found["notify"] = {
            "spool": _case(root / "spool", calls),
            "redis_down": _case(root / "down", calls),
            "redis_slow": _case(root / "slow", calls),
            "work_folder_is_a_file": _case(root / "file", calls),
            "disk_full": _disk_full(root / "full", calls),
        }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
