"""An evaluation in Chrome's trace format, which Perfetto and chrome://tracing open. Pure.

Source: "Trace Event Format", Google. Times are microseconds since the acceptance; a process is a node, a thread a lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MICRO = 1e6


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data`: of `evaluation_data`. Returns {"traceEvents": […], …}."""
    nodes = {node: i + 1 for i, node in enumerate(dict.fromkeys(lane[1] for lane in data["lanes"]))}
    events: list[dict[str, Any]] = [_name("process_name", pid, 0, node) for node, pid in nodes.items()]
    events.append(_name("process_name", 0, 0, "jobs without GPUs"))
    for number, (trial, node, _, _, begin, held, before, _, _) in enumerate(data["lanes"]):
        events.append(_name("thread_name", nodes[node], number, trial))
        events.append(_span("trial", "trial", nodes[node], number, begin, held, {"trial": trial}))
        events.append(_span("import, load, warm-up", "load", nodes[node], number, begin, min(before, held), {}))
    shards = data["shards"]
    for i, lane in enumerate(shards["lane"]):
        if lane < 0:
            continue
        said = {"shard": shards["name"][i], "predicted_seconds": shards["predicted"][i]}
        task = shards["tasks"][shards["task"][i]]
        pid = nodes[data["lanes"][lane][1]]
        events.append(_span(task, "shard", pid, lane, shards["begin"][i], shards["seconds"][i], said))
    for what, name, begin, seconds, row in data["jobs"]:
        events.append(_span(f"{what} {name}", what, 0, row, begin, seconds, {}))
    for at, about, text, _ in data["notes"]:
        events.append({"name": f"{about}: {text}", "ph": "i", "s": "g", "ts": at * MICRO, "pid": 0, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"evaluation": data["about"]["id"]}}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, category: str, pid: int, tid: int, begin: float, seconds: float, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "ts": begin * MICRO, "dur": seconds * MICRO, "args": said,
    }  # fmt: skip
