"""scripts/bench_gpu: seconds, bytes a second and digits on this machine's GPU, beside lm_eval. Needs no network.

Parts: load (storage to /dev/shm to device, by several ways), exact (evalspan beside `lm_eval run`, digit by digit), fast
(mode = "fast" beside exact), vllm (beside `lm_eval run --model vllm`), two-gpus (a trial on two GPUs). The tasks are the
quickstart suite's. Without --model the model has random weights: its seconds are real, its scores mean nothing.

A part runs in processes of its own, which all end with it. One that fails has its error in the table, and the others go
on. Writes bench_gpu.json and bench_gpu.md to --out and prints the table. Exit status 1 where a part failed or exact digits
are not lm_eval's. Without a GPU it says so and runs in small, on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.gpu_parts import PARTS, SHAPES
from bench.harness import Options, command, option, rounded, say
from coordinator.base.run_command import CommandError, run_command
from coordinator.base.version import version_text
from coordinator.cluster import local_guardian
from coordinator.cluster.local import gpu_names

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
KILL_SECONDS = "20"  # from SIGTERM to SIGKILL, of a part that is past its time
QUERY = ["--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]


def machine(gpus: list[str]) -> dict[str, Any]:
    """What the figures depend on."""
    link = "no driver"
    with contextlib.suppress(CommandError, IndexError):
        link = run_command(["nvidia-smi", *QUERY], seconds=60).splitlines()[0]
    names = ("torch", "transformers", "safetensors", "lm_eval")
    return {
        "gpus": gpus,
        "driver, PCIe generation, lanes": link,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
        "evalspan": version_text(),
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def run_part(name: str, given: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A part's result, or its error. None of its processes is left, and nothing in its folder in /dev/shm."""
    say(f"== {name}")
    folder, memory = Path(given["folder"]), Path(given["memory"])
    folder.mkdir()
    memory.mkdir()
    (folder / "given.json").write_text(json.dumps(given, default=str))
    result = folder / "result.json"
    part = [sys.executable, "-m", "bench.gpu_parts", name, str(folder / "given.json"), str(result)]
    guardian = [sys.executable, "-I", "-S", local_guardian.__file__, KILL_SECONDS, *part]
    started, code = time.monotonic(), None
    # the guardian ends all of the part's processes on SIGTERM, and where this end of its input closes
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": sys.stderr, "env": {**os.environ, **OFFLINE}}
    child = subprocess.Popen(guardian, **how)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(seconds)
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait()
    error = f"took longer than {seconds:g} s" if code is None else f"ended with {code}"
    found: dict[str, Any] = {"error": error} if code != 0 else json.loads(result.read_text())
    if left := sorted(str(place) for place in memory.rglob("*")):
        found.setdefault("error", f"left {', '.join(left)}")
    shutil.rmtree(memory)
    return {"took_seconds": time.monotonic() - started, **found}


def text_of(report: dict[str, Any]) -> str:
    """The report in Markdown: what was measured on what, and a table."""
    at = report["machine"]
    link = "driver, PCIe generation, lanes"
    where = f"No GPU: in small on {at['cpus']} CPU cores, load {at['load_average']:.1f}"
    where = f"{', '.join(at['gpus'])}; {link}: {at[link]}" if at["gpus"] else where
    lines = [f"{where}; {at['versions']}; {at['evalspan']}; {at['at']}. Model: {report['model']}.", ""]
    lines += ["| part | what | seconds | figure |", "|---|---|---|---|"]
    for name, part in report["parts"].items():
        rows = list(part.get("rows", []))
        if reason := part.get("skipped"):
            rows.append({"what": "not run", "figure": reason})
        if error := part.get("error"):
            rows.append({"what": "**failed**", "figure": " ".join(error.split())[-400:]})
        for row in rows:
            seconds = "" if row.get("seconds") is None else f"{row['seconds']:.3g}"
            cells = [name, row["what"], seconds, row["figure"].replace("|", "\\|")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(options: Options) -> tuple[str, bool]:
    gpus = [line.partition(", ")[2] for line in gpu_names()]  # less their index
    small = options.small or not gpus
    if not gpus:
        say("nvidia-smi lists no GPU of this machine: every part runs in small, on the CPU")
    size = options.size or ("tiny" if small else "1b")
    weights = options.model or f"made here ({size}), random weights in bfloat16"
    report: dict[str, Any] = {"schema_version": 1, "small": small, "machine": machine(gpus), "parts": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.scratch) as scratch,
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir="/dev/shm") as memory,
    ):
        model = options.model.resolve() if options.model else Path(scratch) / "model"
        given = {
            "model": model,
            "size": size,
            "device": "cuda" if gpus else "cpu",
            "gpus": len(gpus),
            "limit": options.limit or (8 if small else 120),
            "shots": options.shots,
            "batch_size": options.batch_size or (4 if small else 32),
            "rounds": 1 if small else 3,
            "vllm_python": options.vllm_python,
        }
        for name in ([] if options.model else ["model"]) + options.parts:
            own = {"folder": f"{scratch}/{name}-part", "memory": f"{memory}/{name}"}
            report["parts"][name] = run_part(name, given | own, options.part_seconds)
            files = model.glob("*.safetensors")
            report["model"] = f"{weights}, {sum(file.stat().st_size for file in files) / 1e9:.3g} GB"
            (options.out / "bench_gpu.json").write_text(json.dumps(rounded(report), indent=1) + "\n")
            (options.out / "bench_gpu.md").write_text(text_of(report) + "\n")
    parts = report["parts"].values()
    met = all(row.get("met", True) for part in parts for row in part.get("rows", []))
    return text_of(report), met and not any("error" in part for part in parts)


NAMES = [name for name in PARTS if name != "model"]
OPTIONS = (
    option("--small", False, "a tiny model and few documents, to see that it works", action="store_true"),
    option("--parts", NAMES, "only these parts", nargs="+", choices=NAMES, type=str),
    option("--model", text="a checkpoint's folder (default: one with random weights is made)", type=Path),
    option("--size", text="of the model that is made: 1b, in small tiny", choices=list(SHAPES), type=str),
    option("--limit", text="documents a task: 120 (all that are shipped), in small 8", type=int),
    option("--shots", 5, "of the part fast"),
    option("--batch-size", text="32, in small 4", type=int),
    option("--vllm-python", text="an interpreter with vLLM and lm_eval, for the part vllm", type=str),
    option("--part-seconds", 1800.0, "time limit of each part"),
    option("--scratch", text="a folder on the storage to measure (default: the temporary folder)", type=Path),
    option("--out", Path(), "folder for bench_gpu.json and bench_gpu.md", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_gpu", __doc__, measure, *OPTIONS))
