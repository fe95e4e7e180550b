"""Whole evaluations while faults strike at seeded moments; `scripts/chaos daemon` and `scripts/chaos metrics` are campaigns of
their own, each with its --help. docs/chaos.md explains all three.

Exit status 0: every run gave the same scores and left nothing; 1: one did not; 2: it cannot be run here.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import always, command, option
from dev_cluster.api import DevClusterError

from chaos_lib import metrics, storm
from chaos_lib.campaign import PATIENCE_S, Verdict, disturbed
from chaos_lib.faults import FAULTS, deal
from chaos_lib.site import place


def measure(said: argparse.Namespace) -> tuple[str, bool]:
    names = [n for n, f in FAULTS.items() if not said.fault or n in said.fault or str(f.number) in said.fault]
    if not names:
        raise DevClusterError(f"no such fault; there are {', '.join(FAULTS)}")
    if not said.resume:
        said.out.unlink(missing_ok=True)
    known = _read(said.out)
    done = {(row["fault"], row["seed"]) for row in known}
    wanted = [(dealt, seed) for seed in said.seeds for dealt in deal(names, seed, said.together)]
    left = [(dealt, seed) for dealt, seed in wanted if ("+".join(dealt), seed) not in done]
    if left:
        _campaign(left, known, said)
    rows = _read(said.out)
    return table(rows), not any(row["broken"] for row in rows)


def _seeds(text: str) -> range:
    """`20`: the first twenty; `5-9`: these five."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seeds, or A-B")
    first, last = match.groups()
    return range(int(last)) if first is None else range(int(first), int(last) + 1)


def _campaign(
    left: list[tuple[tuple[str, ...], int]], known: list[dict[str, Any]], said: argparse.Namespace
) -> None:
    deadline = time.monotonic() + 60 * said.minutes
    with place() as where:
        calm = next((row for row in known if row["fault"] == "none"), None)
        if calm is None:
            calm = _write(said.out, disturbed(where, (), 0, {}, 0, patience=said.patience))
        if calm["broken"]:
            return
        for names, seed in left:
            if time.monotonic() > deadline:
                return
            scores, events = calm["scores"], calm["events"]
            _write(said.out, disturbed(where, names, seed, scores, events, patience=said.patience))


def _write(out: Path, verdict: Verdict) -> dict[str, Any]:
    row = {**asdict(verdict), "verdict": verdict.word}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    more = f"{'; '.join(verdict.struck.values())} {'; '.join(verdict.broken)[:300]}"
    print(f"{verdict.fault} #{verdict.seed}: {verdict.word}, {verdict.seconds:.0f} s {more}", file=sys.stderr)
    return row


def _read(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def table(rows: list[dict[str, Any]]) -> str:
    """A line a fault: how often struck, how many of those runs gave the same scores, what they took."""
    calm = next((row["seconds"] for row in rows if row["fault"] == "none"), 0.0)
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for name in row["fault"].split("+"):
            by_fault[name].append(row)
    columns = ("fault", "struck", "same scores, nothing left", "broken", "missed")
    lines = [
        f"| {' | '.join(columns)} | seconds, median (undisturbed: {calm:.0f}) |",
        "|---|---|---|---|---|---|",
    ]
    for name, mine in by_fault.items():
        struck = [r for r in mine if name in r["struck"]]
        same = sum(not r["broken"] for r in struck)
        seconds = statistics.median(r["seconds"] for r in mine)
        counts = (len(struck), same, len(struck) - same, len(mine) - len(struck), f"{seconds:.0f}")
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


OPTIONS = (
    option("--seeds", range(1), "moments of each fault, or which", type=_seeds, metavar="N|A-B"),
    option("--fault", says="a name or a number; again for more; default: all", action="append"),
    option("--together", 1, "faults in a run, dealt anew for each seed (1)", metavar="K"),
    option("--resume", False, "leave out what --out holds already", action="store_true"),
    option("--minutes", float("inf"), "start no run after so long"),
    option("--patience", PATIENCE_S, "seconds a run may take (300)"),
    option("--out", Path("chaos.jsonl"), "a line a run (chaos.jsonl)", type=Path),
)
CAMPAIGNS = {"metrics": metrics.main, "daemon": storm.main}
if sys.argv[1:2] and sys.argv[1] in CAMPAIGNS:
    sys.exit(CAMPAIGNS[sys.argv[1]](sys.argv[2:]))
sys.exit(command("chaos", __doc__, measure, *OPTIONS, slurm=always))
