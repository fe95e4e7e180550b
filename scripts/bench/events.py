"""What an event costs the state machine, and a restart its journal. No cluster, no files but the journal's."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from large import SITE, Large, plain_step

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation.state import State
from coordinator.runtime.journal import Journal, read_events, replayed

GPUS = 8
WHOLE = ("request-sets-found", "nodes-offered", "planned")  # each comes once and carries all nodes or shards


def events(nodes: int) -> dict[str, Any]:
    """CPU milliseconds of `step` by kind of event, over an evaluation of 4 shards a trial from its start to its end."""
    spent: dict[str, list[float]] = defaultdict(list)

    def step(state: State, event: ev.AnyEvent) -> list[do.Action]:
        kind = event.outcome.kind if isinstance(event, ev.OutcomeSeen) else event.kind
        began = time.process_time_ns()
        actions = plain_step(state, event)
        spent[kind].append((time.process_time_ns() - began) / 1e6)
        return actions

    Large(nodes, GPUS, step=step).run()
    each = [ms for kind, found in spent.items() if kind not in WHOLE for ms in found]
    return {
        "nodes": nodes,
        "trials": nodes * GPUS,
        "events": len(each),
        "mean_ms": round(sum(each) / len(each), 4),
        "p99_ms": round(sorted(each)[int(0.99 * len(each))], 4),
        "mean_ms_by_kind": {kind: round(sum(ms) / len(ms), 4) for kind, ms in sorted(spent.items())},
    }


def replay(nodes: int, count: int) -> dict[str, Any]:
    """Write the journal of such an evaluation with about `count` events, read it back as a restarted coordinator does."""
    made = Large(nodes, GPUS, shards=max(1, count // (nodes * GPUS)))
    made.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        journal = Journal(path)
        journal.append(made.journal)
        journal.close()
        began, cpu = time.perf_counter(), time.process_time()
        state = replayed(read_events(path), SITE)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        size = path.stat().st_size
    assert state is not None
    assert state.ended_at is not None
    return {
        "nodes": nodes,
        "events": len(made.journal),
        "journal_mb": round(size / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }
