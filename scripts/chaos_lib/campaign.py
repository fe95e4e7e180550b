"""What every campaign shares: a coordinator under faults, how a fault strikes it, and the laws that hold afterwards.

Rule: laws are read from what is on disk and on the cluster afterwards, never from what the coordinator prints.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dev_cluster import procs

from chaos_lib.site import Site

T = TypeVar("T")
CLEAN_S = 60.0  # a controller that was away ends its jobs later


@dataclass(slots=True, kw_only=True)
class Run:
    """A coordinator under faults: its process is replaced where a fault ends it."""

    site: Site
    process: subprocess.Popen[str]
    dice: random.Random
    patience: float = math.inf  # seconds that it may take
    strikes: list[tuple[str, str]] = field(default_factory=list)  # (fault, what was hit)
    missed: Counter[str] = field(default_factory=Counter)  # faults whose moment came too late
    broken: list[str] = field(default_factory=list)  # laws, one line each
    over: bool = False
    # held from its kill until its successor's start
    replacing: threading.Lock = field(default_factory=threading.Lock)

    def found(self, look: Callable[[], T | None]) -> T | None:
        """What `look` finds, once it finds something; None where the run is over before."""
        while (what := look()) is None:
            if self.over:
                return None
            time.sleep(0.05)
        return what

    def wait(self, law: Callable[[], bool]) -> bool:
        """False where the run is over before `law` holds."""
        return self.found(lambda: law() or None) is not None

    def victim(self, verb: str) -> int | None:
        """Host pid of one of the site's jobs of this verb, once there is one; None where the run is over."""
        pids = self.found(lambda: self.site.processes_of(verb) or None)
        return self.dice.choice(pids) if pids else None

    def strike(self, name: str, fault: Callable[[Run], str | None], moment: str) -> bool:
        """Whether the fault hit something. What it raises counts as a broken law, and the run goes on."""
        try:
            hit = None if self.over else fault(self)
        except Exception as error:  # noqa: BLE001
            self.broken.append(f"{name} could not be struck: {type(error).__name__}: {error}")
            return False
        if hit is None:
            self.missed[name] += 1
        else:
            self.strikes.append((name, f"{moment}: {hit}"))
        return hit is not None

    def await_end(self, seconds: float, who: str) -> bool:
        """Wait through the kills of the coordinator for its own end; True where that comes in time and with status 0."""

        def ended() -> bool:
            process = self.process
            if process.poll() is None:
                return False
            with self.replacing:  # a fault that ends it puts another in its place
                self.over = process is self.process
            return self.over

        in_time = procs.poll(ended, deadline_s=seconds, every_s=0.1)
        self.over = True
        if not in_time:
            self.broken.append(f"{who} did not end within {seconds:g} s")
            self.process.kill()
        status = self.process.wait()
        if in_time and status != 0:
            self.broken.append(f"{who} ended with {status}: {self.site.last_words()}")
        return in_time and status == 0


@contextlib.contextmanager
def under_faults(site: Site, dice: random.Random, patience: float = math.inf) -> Iterator[Run]:
    """A run of the site's coordinator. Afterwards no process of it is left; what broke a law is swept from the cluster."""
    run = Run(site=site, process=site.start(), dice=dice, patience=patience)
    try:
        yield run
    finally:
        run.over = True
        run.process.kill()
        run.process.wait()
        if run.broken:
            site.sweep()


def scores(evaluation: Path) -> dict[str, Any]:
    """Task -> its results, or why it failed; empty without results."""
    results = evaluation / "results.json"
    if not results.exists():
        return {}
    found = json.loads(results.read_text())
    return {**found["results"], **{task: {"failed": why} for task, why in found.get("failed", {}).items()}}


def laws_broken(
    events: Sequence[dict[str, Any]], found: dict[str, Any], wanted: dict[str, Any]
) -> Iterator[str]:
    """What an evaluation's journal and its scores show that must not be; without `wanted` scores are not compared."""
    if wanted and found != wanted:
        yield f"other scores: {json.dumps(found)}"
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
