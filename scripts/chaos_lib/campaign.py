"""Whole evaluations on a real Slurm while faults strike at seeded moments; docs/benchmarks.md has the laws and figures.

One `evalspan eval` a run, struck by one fault or by several; with --checkpoints a daemon that evaluates so many, each with
other weights. With --keep FILE each run's row goes to FILE as it ends, and the same command goes on after those that are
there.

Rule: laws are read from what is on disk and on the cluster afterwards, never from what the coordinator prints. A run's row
goes to stderr when it ends. Exit status 0: every run gave lm-eval's scores and left nothing; 1: one did not; 2: it cannot be
run here.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Options, command, option, say
from support import toys

from chaos_lib.faults import FAULTS, deal
from chaos_lib.run import under_faults
from chaos_lib.site import TASKS, Place, Site, place
from coordinator.decide.evaluation.ending import HOLDS_WEIGHTS
from coordinator.runtime.summary import read_ended_summary
from evaljobs.contract.paths import EvaluationPaths

PATIENCE_S = 300.0  # for one evaluation
CLEAN_S = 60.0  # a controller that was away ends its jobs later
Row = dict[str, Any]


# --- laws --------------------------------------------------------------------------------------------------------------


def scores(site: Site) -> dict[str, dict[str, Any]]:
    """Checkpoint's folder name -> task -> its results, or why it failed; empty for an evaluation without results."""
    found: dict[str, dict[str, Any]] = {}
    for folder in site.evaluations():
        record = json.loads((folder / "evaluation.json").read_text())
        told = found.setdefault(Path(record["checkpoint"]["source"]).name, {})
        if (folder / "results.json").exists():
            results = json.loads((folder / "results.json").read_text())
            told |= results["results"]
            told |= {task: {"failed": why} for task, why in results.get("failed", {}).items()}
    return found


def laws_broken(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What an evaluation's journal shows that must not be."""
    planned = [s for e in events if e["kind"] == "planned" for x in e["leaves"] for s in x["shards"]]
    counted = Counter(s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"])
    again = Counter(e["shard"] for e in events if e["kind"] == "shard-corrupted")
    if len(planned) != len(set(planned)):
        yield "a shard was planned twice"
    for shard in planned:
        if counted[shard] != 1 + again[shard]:
            yield f"{shard} was counted {counted[shard]} times, corrupted {again[shard]} times"
    outcomes = [e["outcome"] for e in events if e["kind"] == "outcome-seen"]
    entries = sorted(o["entry"] for o in outcomes if o["kind"] == "scored")
    if len(entries) != len(set(entries)):
        yield f"scored twice: {entries}"


def lm_evals(place: Place) -> dict[str, dict[str, Any]]:
    """lm-eval's own scores of the place's models, one run a task, as `scores` has them."""
    names = [f"step-{number}" for number in range(len(place.models))] if len(place.models) > 1 else ["tiny"]
    return {name: toys.expected(model, TASKS) for name, model in zip(names, place.models, strict=True)}


# --- a run -------------------------------------------------------------------------------------------------------------


def disturbed(
    place: Place,
    names: Sequence[str],
    seed: int,
    wanted: dict[str, Any],
    events: int,
    *,
    patience: float = PATIENCE_S,
) -> Row:
    """Evaluate the place's models, strike these faults at moments drawn from `seed`, and judge what comes of it.

    `wanted`: lm-eval's scores; `events`: their number in an undisturbed run (the one without names). The row's `broken`: the
    laws that do not hold, one line each.
    """
    chosen = [FAULTS[n] for n in names]
    label = "+".join(names)
    dice = random.Random(f"{label}/{seed}")
    site = Site.make(
        place,
        f"r{time.time_ns() % 10**10}-{seed}",
        partition="spare" if any(f.partition == "spare" for f in chosen) else "gpu",
        on_small=any(f.on_small for f in chosen),
        own_redis=any(f.own_redis for f in chosen),
    )
    if any(f.on_hosts for f in chosen):
        place.hosts.prepare()
    started = time.monotonic()
    with under_faults(site, place.hosts, dice) as run:
        for fault in chosen:
            run.begin(run.strike_after, fault, 1 + int(events * dice.uniform(*fault.span)))
        if len(chosen) > 1:  # together they may take every node
            run.begin(run.administer)
        run.await_end(patience * len(place.models))
        seconds = time.monotonic() - started
        run.join(60)
        found = scores(site)
        if found != wanted or len(site.evaluations()) != len(place.models):
            run.broken.append(f"other scores: {json.dumps(found)}")
        for folder in site.evaluations():
            run.broken += [f"{folder.name}: {law}" for law in laws_broken(site.events(folder))]
        run.broken += [
            f"left behind: {what}" for what in site.wait_clean(CLEAN_S) if not _is_named(what, site)
        ]
    place.mend()
    row = {
        "fault": label or "none",
        "seed": seed,
        "struck": dict(run.strikes),
        "recovered": run.recovered,
        "seconds": seconds,
        "events": len(site.events()),
        "scores": found,
        "broken": run.broken,
    }
    if not run.broken:
        site.remove()
    return row


def _is_named(what: str, site: Site) -> bool:
    """Weights that a killed precursor left on a node, of which its evaluation warns."""
    ends = [read_ended_summary(EvaluationPaths(folder)) for folder in site.evaluations()]
    warned = [text.partition(HOLDS_WEIGHTS) for end in ends if end for text in end.warnings]
    node = what.removeprefix("in memory of ").partition(":")[0]
    return any(found and node in first.replace(",", " ").split() for first, found, _ in warned)


def kept(file: str) -> list[Row]:
    """Rows of an earlier call that was cut off; a line that was being written is none, and is removed."""
    if not file or not Path(file).exists():
        return []
    whole = [line for line in Path(file).read_text().splitlines(keepends=True) if line.endswith("\n")]
    Path(file).write_text("".join(whole))
    return [json.loads(line) for line in whole]


def _keep(row: Row, rows: list[Row], file: str) -> None:
    rows.append(row)
    if file:
        with Path(file).open("a") as kept_rows:
            kept_rows.write(json.dumps(row) + "\n")


def measure(options: Options) -> tuple[Row, bool]:
    """A fault's counts are of runs: struck, of those with a law broken, and missed.

    `seconds_to_next_shard`: of each fault's runs, those from its end until another shard was counted, where one was left.
    """
    names = options.fault or list(FAULTS)
    seeds = range(options.first, options.first + options.seeds)
    dealt = [(faults, seed) for seed in seeds for faults in deal(names, seed, options.together)]
    rows = kept(options.keep)
    there = {(row["fault"], row["seed"]) for row in rows}
    left = [(faults, seed) for faults, seed in dealt if ("+".join(faults), seed) not in there]
    with place(options.checkpoints, accounting=any(FAULTS[name].accounting for name in names)) as where:
        if not rows:
            first = disturbed(where, (), 0, lm_evals(where), 0, patience=options.patience)
            _keep(first, rows, "" if first["broken"] else options.keep)
        calm = rows[0]
        for faults, seed in left if not calm["broken"] else []:
            _keep(
                disturbed(where, faults, seed, calm["scores"], calm["events"], patience=options.patience),
                rows,
                options.keep,
            )
            say(json.dumps({key: value for key, value in rows[-1].items() if key != "scores"}))
    counts = {name: Counter[str]() for name in names}
    runs = [row for row in rows if row["fault"] != "none"]
    for row in runs:
        for name in row["fault"].split("+"):
            struck = name in row["struck"]
            counts[name].update(struck=struck, broken=struck and bool(row["broken"]), missed=not struck)
    broken = [row for row in rows if row["broken"]]
    seconds = {n: sorted(r["recovered"][n] for r in runs if n in r.get("recovered", ())) for n in names}
    found = {"runs": len(runs), "faults": counts, "seconds_to_next_shard": seconds, "broken": broken}
    return found, not broken


OPTIONS = (
    option("--fault", text="again for more; default: all", action="append", choices=list(FAULTS)),
    option("--seeds", 1, "so many moments of each fault (1)", metavar="N"),
    option("--first", 0, "the first seed (0)"),
    option("--together", 1, "faults in a run, dealt anew for each seed (1)", metavar="K"),
    option("--patience", PATIENCE_S, "seconds for one evaluation (300)", metavar="S"),
    option("--keep", "", "a file of finished runs, after which the same command goes on", metavar="FILE"),
    option("--checkpoints", 1, "of a run; several: a daemon evaluates them (1)", metavar="N"),
)
if __name__ == "__main__":
    sys.exit(command("chaos", __doc__, measure, *OPTIONS, slurm=True))
