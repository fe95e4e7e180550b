"""scripts/bench_gpu: seconds, bytes a second and digits on this machine's GPU, beside lm_eval. Needs no network.

Parts: load (storage to /dev/shm to device), exact (evalspan beside `lm_eval run`, digit by digit), fast (mode = "fast"
beside exact), vllm (beside `lm_eval run --model vllm`), two-gpus (a trial on two GPUs). The tasks are the quickstart
suite's. Without --model the model has random weights: its seconds are real, its scores mean nothing.

A part that fails has its error in the table, and the others go on. Writes the table to bench_gpu.md in --out, too. Exit
status 1 where a part failed or exact digits are not lm_eval's.
Without a GPU it says so and runs in small, on the CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.gpu_parts import PARTS
from bench.harness import Options, command, option, say
from coordinator.base.version import version_text
from coordinator.cluster.local import gpu_names

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run_part(name: str, given: Options) -> dict[str, Any]:
    """A part's rows, or why it has none, with what it took. Nothing of it is left in /dev/shm."""
    say(f"== {name}")
    for folder in (given.folder, given.memory):
        Path(folder).mkdir()
    started = time.monotonic()
    try:
        rows = PARTS[name](given)
        found: dict[str, Any] = {"skipped": rows} if isinstance(rows, str) else {"rows": rows}
        if left := sorted(str(place) for place in Path(given.memory).rglob("*")):
            found["error"] = f"left {', '.join(left)}"
    except Exception as error:  # noqa: BLE001 (a part's error is its result)
        found = {"error": f"{type(error).__name__}: {error}"}
    shutil.rmtree(given.memory)
    return {"took_seconds": time.monotonic() - started, **found}


def text_of(report: dict[str, Any]) -> str:
    """The report in Markdown: what was measured on what, and a table."""
    about = "; ".join(f"{key}: {value}" for key, value in report.items() if key != "parts")
    lines = [f"{about}.", "", "| part | what | seconds | figure |", "|---|---|---|---|"]
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
    return "\n".join(lines) + "\n"


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    os.environ |= OFFLINE
    gpus = [line.partition(", ")[2] for line in gpu_names()]  # less their index
    small = options.small or not gpus
    if not gpus:
        say("nvidia-smi lists no GPU of this machine: every part runs in small, on the CPU")
    names = ("torch", "transformers", "safetensors", "lm_eval")
    report: dict[str, Any] = {
        "gpus": gpus,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "versions": ", ".join([version_text(), *(f"{name} {version(name)}" for name in names)]),
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "model": str(options.model or f"random weights, {'tiny' if small else '1 billion parameters'}"),
        "parts": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.scratch) as scratch,
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir="/dev/shm") as memory,
    ):
        if not gpus:
            os.environ["OMP_NUM_THREADS"] = "1"  # of both commands: more threads give other digits
        given = {
            "model": str(options.model.resolve() if options.model else Path(scratch) / "model"),
            "small": small,
            "device": "cuda" if gpus else "cpu",
            "gpus": len(gpus),
            "limit": options.limit or (8 if small else 120),
            "shots": options.shots,
            "batch_size": options.batch_size or (4 if small else 32),
            "rounds": 1 if small else 3,
            "vllm_python": options.vllm_python,
            "seconds": options.command_seconds,
        }
        for name in ([] if options.model else ["model"]) + options.parts:
            own = {"folder": f"{scratch}/{name}-part", "memory": f"{memory}/{name}"}
            report["parts"][name] = run_part(name, Options(**given, **own))
            (options.out / "bench_gpu.md").write_text(text_of(report))
    say(text_of(report))
    parts = report["parts"].values()
    met = all(row.get("met", True) for part in parts for row in part.get("rows", []))
    return report, met and not any("error" in part for part in parts)


NAMES = [name for name in PARTS if name != "model"]
OPTIONS = (
    option("--small", False, "a tiny model and few documents, to see that it works", action="store_true"),
    option("--parts", NAMES, "only these parts", nargs="+", choices=NAMES, type=str),
    option("--model", text="a checkpoint's folder (default: one with random weights is made)", type=Path),
    option("--limit", text="documents a task: 120 (all that are shipped), in small 8", type=int),
    option("--shots", 5, "of the part fast"),
    option("--batch-size", text="32, in small 4", type=int),
    option("--vllm-python", text="an interpreter with vLLM and lm_eval, for the part vllm", type=str),
    option("--command-seconds", 1800.0, "time limit of each command"),
    option("--scratch", text="a folder on the storage to measure (default: the temporary folder)", type=Path),
    option("--out", Path(), "folder for bench_gpu.md", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_gpu", __doc__, measure, *OPTIONS))
