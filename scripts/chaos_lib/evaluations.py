"""Whole evaluations while faults strike at seeded moments; `scripts/chaos daemon` and `scripts/chaos metrics` are campaigns of
their own, each with its --help. docs/benchmarks.md has their laws and figures.

Exit status 0: every run gave the same scores and left nothing; 1: one did not; 2: it cannot be run here.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness import Options, option, say
from dev_cluster.api import Cluster, DevClusterError

from chaos_lib.campaign import CLEAN_S, Run, laws_broken, scores, under_faults
from chaos_lib.faults import FAULTS, Fault, deal
from chaos_lib.site import Place, Site, place

PATIENCE_S = 300.0
AWAY_S = 10.0  # that a node stays away where several faults strike
COLUMNS = ("fault", "struck", "same scores, nothing left", "broken", "missed")
Row = dict[str, Any]


def disturbed(
    place: Place,
    names: Sequence[str],
    seed: int,
    wanted: dict[str, Any],
    events: int,
    *,
    patience: float = PATIENCE_S,
) -> Row:
    """Run an evaluation, strike these faults at moments drawn from `seed`, and judge what comes of it.

    `wanted`, `events`: scores and number of events of the undisturbed run (the one without names); without scores they
    are not compared. `patience`: seconds until its end. The row's `broken`: the laws that do not hold, one line each.
    """
    chosen = [FAULTS[n] for n in names]
    label = "+".join(names)
    dice = random.Random(f"{label}/{seed}")
    site = Site.make(
        place,
        f"r{time.time_ns() % 10**10}-{seed}",
        partition="spare" if any(f.partition == "spare" for f in chosen) else "gpu",
        on_small=any(f.on_small for f in chosen),
        own_clock=any(f.own_clock for f in chosen),
    )
    started = time.monotonic()
    with under_faults(site, dice, patience) as run:
        moments = [1 + int(events * dice.uniform(*fault.span)) for fault in chosen]
        threads = [
            threading.Thread(target=_strike, args=(run, *pair), daemon=True)
            for pair in zip(chosen, moments, strict=True)
        ]
        if len(chosen) > 1:  # together they may take every node
            threads.append(threading.Thread(target=_administer, args=(run, place.cluster), daemon=True))
        for thread in threads:
            thread.start()
        run.await_end(patience, "the evaluation")
        seconds = time.monotonic() - started
        for thread in threads:
            thread.join(timeout=60)
        found = next(map(scores, site.evaluations()), {})
        run.broken += _laws_broken(run, found, wanted)
    place.mend()
    struck = dict(run.strikes)
    row = {
        "fault": label or "none",
        "seed": seed,
        "verdict": "broken" if run.broken else "same" if struck or not names else "missed",
        "struck": struck,
        "seconds": round(seconds, 1),
        "events": len(site.events()),
        "scores": found,
        "broken": run.broken,
    }
    if not run.broken:
        site.remove()
    return row


def _strike(run: Run, fault: Fault, moment: int) -> None:
    if run.wait(lambda: len(run.site.events()) >= moment):
        run.strike(fault.name, fault.strike, f"after {moment} events")


def _administer(run: Run, cluster: Cluster) -> None:
    """Bring back each node that Slurm has shown as down or drained for a while."""
    away: dict[str, float] = {}
    while not run.over:
        time.sleep(1.0)
        states = cluster.node_states()
        gone = {n for n in cluster.gpu_nodes if states.get(n, "").startswith(("down", "drain"))}
        away = {n: away.get(n, time.monotonic()) for n in gone}
        for node in [n for n, since in away.items() if time.monotonic() - since > AWAY_S]:
            cluster.bring_back(node)
            del away[node]


def _laws_broken(run: Run, found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    events = run.site.events()
    yield from laws_broken(events, found, wanted)
    if run.site.own_clock:
        times = [e["at"] for e in events]
        # events of one look carry the time of its begin, what came of them in between a later one
        if any(before - after > CLEAN_S for before, after in pairwise(times)):
            yield "the journal's times run backwards"
        # the clock alone says how long a killed coordinator was away
        span = sum(b["at"] - a["at"] for a, b in pairwise(events) if b["kind"] != "restarted")
        if span > run.patience:
            yield f"the journal spans {span:.0f} s"
        if "trial-hung" not in dict(run.strikes) and any(e["kind"] == "trial-hung" for e in events):
            yield "a trial that no fault stopped was judged hung"
    yield from (f"left behind: {what}" for what in run.site.wait_clean(CLEAN_S))


# --- the campaign -----------------------------------------------------------------------------------------------------


def measure(options: Options) -> tuple[str, bool]:
    names = [n for n, f in FAULTS.items() if not options.fault or {n, str(f.number)} & set(options.fault)]
    if not names:
        raise DevClusterError(f"no such fault; there are {', '.join(FAULTS)}")
    if not options.resume:
        options.out.unlink(missing_ok=True)
    known = _read(options.out)
    done = {(row["fault"], row["seed"]) for row in known}
    dealt = [(faults, seed) for seed in options.seeds for faults in deal(names, seed, options.together)]
    left = [(faults, seed) for faults, seed in dealt if ("+".join(faults), seed) not in done]
    if left:
        _campaign(left, known, options)
    rows = _read(options.out)
    return table(rows), not any(row["broken"] for row in rows)


def _seeds(text: str) -> range:
    """`20`: the first twenty; `5-9`: these five."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seeds, or A-B")
    first, last = match.groups()
    return range(int(last)) if first is None else range(int(first), int(last) + 1)


def _campaign(left: Sequence[tuple[tuple[str, ...], int]], known: Sequence[Row], options: Options) -> None:
    deadline = time.monotonic() + 60 * options.minutes
    with place() as where:

        def run(*what: Any) -> Row:
            row = disturbed(where, *what, patience=options.patience)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            details = f"{'; '.join(row['struck'].values())} {'; '.join(row['broken'])[:300]}"
            say(f"{row['fault']} #{row['seed']}: {row['verdict']}, {row['seconds']:.0f} s {details}")
            return row

        calm = next((row for row in known if row["fault"] == "none"), None) or run((), 0, {}, 0)
        for names, seed in left:
            if calm["broken"] or time.monotonic() > deadline:
                return
            run(names, seed, calm["scores"], calm["events"])


def _read(out: Path) -> list[Row]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def table(rows: Sequence[Row]) -> str:
    """A line a fault: how often struck, how many of those runs gave the same scores, what they took."""
    calm = next((row["seconds"] for row in rows if row["fault"] == "none"), 0.0)
    by_fault: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for name in row["fault"].split("+"):
            by_fault[name].append(row)
    lines = [
        f"| {' | '.join(COLUMNS)} | seconds, median (undisturbed: {calm:.0f}) |",
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
    option("--fault", text="a name or a number; again for more; default: all", action="append"),
    option("--together", 1, "faults in a run, dealt anew for each seed (1)", metavar="K"),
    option("--resume", False, "leave out what --out holds already", action="store_true"),
    option("--minutes", float("inf"), "start no run after so long"),
    option("--patience", PATIENCE_S, "seconds a run may take (300)"),
    option("--out", Path("chaos.jsonl"), "a line a run (chaos.jsonl)", type=Path),
)
