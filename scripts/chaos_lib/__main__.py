"""scripts/chaos [--seeds N] [--fault NAME|K] [--resume] [--minutes M] [--out FILE], or scripts/chaos daemon|metrics …: see docs/chaos.md."""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dev_cluster.api import DevClusterError, unavailable

from chaos_lib import metrics, storm
from chaos_lib.campaign import PATIENCE_S, Verdict, disturbed, undisturbed
from chaos_lib.faults import FAULTS
from chaos_lib.site import place


def main() -> int:
    """0: every run gave the same scores and left nothing; 1: one did not; 2: it cannot be run here."""
    if sys.argv[1:2] == ["metrics"]:
        return metrics.main(sys.argv[2:])
    if sys.argv[1:2] == ["daemon"]:
        return storm.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="moments of each fault")
    parser.add_argument("--fault", action="append", help="a name or a number; again for more; default: all")
    parser.add_argument(
        "--storm", type=int, default=0, metavar="K", help="instead: K faults at once, drawn from each seed"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so long")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds a run may take (300)")
    parser.add_argument("--out", type=Path, default=Path("chaos.jsonl"), help="a line a run (chaos.jsonl)")
    said = parser.parse_args()
    names = [n for n, f in FAULTS.items() if not said.fault or n in said.fault or str(f.number) in said.fault]
    why = unavailable() or ("" if names else f"no such fault; there are {', '.join(FAULTS)}")
    if why:
        print(why, file=sys.stderr)
        return 2
    known = _read(said.out) if said.resume else []
    if not said.resume:
        said.out.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    try:
        wanted = _wanted(names, said.seeds, said.storm)
        end = time.monotonic() + 60 * said.minutes
        _campaign(wanted, known, said.out, deadline=end, patience=said.patience)
    except DevClusterError as error:
        print(error, file=sys.stderr)
        return 2
    rows = _read(said.out)
    print(table(rows))
    return int(any(row["broken"] for row in rows))


def _wanted(names: list[str], seeds: int, storm: int) -> list[tuple[tuple[str, ...], int]]:
    """Faults and seed of each run, every fault's first moment before any second one."""
    if storm:
        drawn = [
            tuple(sorted(random.Random(seed).sample(names, min(storm, len(names))))) for seed in range(seeds)
        ]
        return list(zip(drawn, range(seeds), strict=True))
    return [((name,), seed) for seed in range(seeds) for name in names]


def _campaign(
    wanted: list[tuple[tuple[str, ...], int]],
    known: list[dict[str, Any]],
    out: Path,
    *,
    deadline: float,
    patience: float,
) -> None:
    done = {(row["fault"], row["seed"]) for row in known}
    left = [(names, seed) for names, seed in wanted if ("+".join(names), seed) not in done]
    if not left:
        return
    with place() as where:
        calm = next((row for row in known if row["fault"] == "none"), None)
        if calm is None:
            calm = _write(out, undisturbed(where, patience))
        if calm["broken"]:
            return
        for names, seed in left:
            if time.monotonic() > deadline:
                return
            verdict = disturbed(where, names, seed, calm["scores"], calm["events"], patience=patience)
            _write(out, verdict)


def _write(out: Path, verdict: Verdict) -> dict[str, Any]:
    row = {**asdict(verdict), "verdict": verdict.word}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    struck = "; ".join(verdict.struck.values())
    said = "; ".join(verdict.broken)[:300]
    print(
        f"{verdict.fault} #{verdict.seed}: {verdict.word}, {verdict.seconds:.0f} s {struck} {said}",
        file=sys.stderr,
    )
    return row


def _read(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def table(rows: list[dict[str, Any]]) -> str:
    """A line a fault: how often struck, how often the scores were the same, what it cost."""
    calm = next((row["seconds"] for row in rows if row["fault"] == "none"), 0.0)
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_fault[row["fault"]].append(row)
    lines = [
        f"| fault | runs | same scores, nothing left | broken | missed | seconds, median (undisturbed: {calm:.0f}) |",
        "|---|---|---|---|---|---|",
    ]
    for name, mine in by_fault.items():
        counts = [sum(r["verdict"] == word for r in mine) for word in ("same", "broken", "missed")]
        seconds = statistics.median(r["seconds"] for r in mine)
        lines.append(f"| {name} | {len(mine)} | {counts[0]} | {counts[1]} | {counts[2]} | {seconds:.0f} |")
    return "\n".join(lines)


sys.exit(main())
