"""scripts/chaos [--seeds N] [--together K] [--fault NAME|K] [--resume] [--minutes M] [--out FILE], or scripts/chaos daemon|metrics …: see docs/chaos.md."""

from __future__ import annotations

import argparse
import json
import re
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
from chaos_lib.faults import FAULTS, deal
from chaos_lib.site import place


def main() -> int:
    """0: every run gave the same scores and left nothing; 1: one did not; 2: it cannot be run here."""
    if sys.argv[1:2] == ["metrics"]:
        return metrics.main(sys.argv[2:])
    if sys.argv[1:2] == ["daemon"]:
        return storm.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument(
        "--seeds", type=_seeds, default=range(1), metavar="N|A-B", help="moments of each fault, or which"
    )
    parser.add_argument("--fault", action="append", help="a name or a number; again for more; default: all")
    parser.add_argument(
        "--together", type=int, default=1, metavar="K", help="faults in a run, dealt anew for each seed (1)"
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
        wanted = [(dealt, seed) for seed in said.seeds for dealt in deal(names, seed, said.together)]
        end = time.monotonic() + 60 * said.minutes
        _campaign(wanted, known, said.out, deadline=end, patience=said.patience)
    except DevClusterError as error:
        print(error, file=sys.stderr)
        return 2
    rows = _read(said.out)
    print(table(rows))
    return int(any(row["broken"] for row in rows))


def _seeds(text: str) -> range:
    """`20`: the first twenty; `5-9`: these five."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seeds, or A-B")
    first, last = match.groups()
    return range(int(last)) if first is None else range(int(first), int(last) + 1)


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
    """A line a fault: how often struck, how many of those runs gave the same scores, what they took."""
    calm = next((row["seconds"] for row in rows if row["fault"] == "none"), 0.0)
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for name in row["fault"].split("+"):
            by_fault[name].append(row)
    lines = [
        f"| fault | struck | same scores, nothing left | broken | missed | seconds, median (undisturbed: {calm:.0f}) |",
        "|---|---|---|---|---|---|",
    ]
    for name, mine in by_fault.items():
        struck = [r for r in mine if name in r["struck"]]
        same = sum(not r["broken"] for r in struck)
        seconds = statistics.median(r["seconds"] for r in mine)
        lines.append(
            f"| {name} | {len(struck)} | {same} | {len(struck) - same} | {len(mine) - len(struck)} | {seconds:.0f} |"
        )
    return "\n".join(lines)


sys.exit(main())
