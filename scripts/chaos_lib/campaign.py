"""One disturbed evaluation and its verdict.

Rule: the verdict is made of what is on disk and on the cluster afterwards, never of what the coordinator says of itself.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dev_cluster.api import Cluster

from chaos_lib.faults import FAULTS, Fault, Run
from chaos_lib.site import Place, Site

PATIENCE_S = 300.0
AWAY_S = 10.0  # that a node stays away where several faults strike
CLEAN_S = 60.0  # a controller that was away ends its jobs later


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one run. `broken`: the laws that do not hold, one line each. `missed`: the moment never came."""

    fault: str
    seed: int
    struck: dict[str, str]
    seconds: float
    events: int
    scores: dict[str, Any]
    broken: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        if self.broken:
            return "broken"
        return "same" if self.struck or self.fault == "none" else "missed"


def disturbed(
    place: Place,
    names: Sequence[str],
    seed: int,
    scores: dict[str, Any],
    events: int,
    *,
    patience: float = PATIENCE_S,
) -> Verdict:
    """Run an evaluation, strike these faults at moments drawn from `seed`, and judge what comes of it.

    `scores`, `events`: of the undisturbed run (the one without names); without scores they are not compared. `patience`:
    seconds until its end.
    """
    chosen = [FAULTS[n] for n in names]
    dice = random.Random(f"{'+'.join(names)}/{seed}")
    label = "+".join(names) or "none"
    site = Site.make(
        place,
        f"r{time.time_ns() % 10**10}-{seed}",
        partition="spare" if any(f.partition == "spare" for f in chosen) else "gpu",
        on_small=any(f.on_small for f in chosen),
        own_clock=any(f.own_clock for f in chosen),
    )
    started = time.monotonic()
    run = Run(site=site, process=site.start(), dice=dice, patience=patience)
    broken: list[str] = []
    threads = [
        threading.Thread(target=_strike, args=(run, fault, _moment(fault, dice, events), broken), daemon=True)
        for fault in chosen
    ]
    if len(chosen) > 1:  # together they may take every node
        threads.append(threading.Thread(target=_administer, args=(run, place.cluster), daemon=True))
    for thread in threads:
        thread.start()
    found = _finish(run, broken)
    seconds = time.monotonic() - started
    for thread in threads:
        thread.join(timeout=60)
    broken += _judge(run, found, scores)
    if broken:
        site.sweep()
    place.mend()
    verdict = Verdict(
        fault=label,
        seed=seed,
        struck=dict(run.struck),
        seconds=round(seconds, 1),
        events=len(site.events()),
        scores=found,
        broken=broken,
    )
    if not broken:
        site.remove()
    return verdict


def _moment(fault: Fault, dice: random.Random, events: int) -> int:
    low, high = fault.span
    return 1 + int(events * dice.uniform(low, high))


def _strike(run: Run, fault: Fault, moment: int, broken: list[str]) -> None:
    try:
        if run.wait(lambda: len(run.site.events()) >= moment):
            hit = fault.strike(run)
            if hit is not None:
                run.struck[fault.name] = f"after {moment} events: {hit}"
    except Exception as error:  # noqa: BLE001 (said in the verdict; the evaluation goes on)
        broken.append(f"{fault.name} could not be struck: {type(error).__name__}: {error}")


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


def _finish(run: Run, broken: list[str]) -> dict[str, Any]:
    """Wait for the evaluation, through the kills of its coordinator; its scores."""
    end = time.monotonic() + run.patience
    while not run.over:
        process = run.process
        if process.poll() is not None:
            with run.replacing:  # a fault that ends it puts another in its place
                run.over = process is run.process
        elif time.monotonic() > end:
            run.over = True
            broken.append(f"not ended within {run.patience:g} s")
            process.kill()
            process.wait()
            return {}
        else:
            time.sleep(0.1)
    out = process.stdout.read() if process.stdout is not None else ""
    if process.returncode != 0:
        broken.append(f"ended with {process.returncode}: {run.site.last_words()}")
        return {}
    return dict(json.loads(out)["results"])


def _judge(run: Run, found: dict[str, Any], scores: dict[str, Any]) -> list[str]:
    events = run.site.events()
    broken = [*laws_broken(events, found, scores)]
    if run.site.own_clock:
        broken += _untimely(run, events)
    broken += [f"left behind: {what}" for what in run.site.wait_clean(CLEAN_S)]
    return broken


def laws_broken(
    events: Sequence[dict[str, Any]], found: dict[str, Any], scores: dict[str, Any]
) -> Iterator[str]:
    """What an evaluation's journal and its scores show that must not be; without `scores` those are not compared."""
    if scores and found != scores:
        yield f"other scores: {json.dumps(found)}"
    planned = [s for e in events if e["kind"] == "planned" for x in e["leaves"] for s in x["shards"]]
    counted = Counter(s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"])
    again = Counter(e["shard"] for e in events if e["kind"] == "shard-corrupted")
    if len(planned) != len(set(planned)):
        yield "a shard was planned twice"
    for shard in planned:
        if counted[shard] != 1 + again[shard]:
            yield f"{shard} was counted {counted[shard]} times, corrupted {again[shard]} times"
    entries = [
        e["outcome"]["entry"]
        for e in events
        if e["kind"] == "outcome-seen" and e["outcome"]["kind"] == "scored"
    ]
    if sorted(entries) != sorted(set(entries)):
        yield f"scored twice: {entries}"


def _untimely(run: Run, events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What an evaluation whose clock jumped shows that an undisturbed one does not."""
    times = [e["at"] for e in events]
    # events of one look carry the time of its begin, what came of them in between a later one
    if any(before - after > CLEAN_S for before, after in pairwise(times)):
        yield "the journal's times run backwards"
    # how long a coordinator was away its successor knows by the clock alone
    spans = sum(b["at"] - a["at"] for a, b in pairwise(events) if b["kind"] != "restarted")
    if spans > run.patience:
        yield f"the journal spans {spans:.0f} s"
    if "trial-hung" not in run.struck and any(e["kind"] == "trial-hung" for e in events):
        yield "a trial that no fault stopped was judged hung"
