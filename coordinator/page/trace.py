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
    places = [(nodes[lane[1]], number) for number, lane in enumerate(data["lanes"])]
    events: list[dict[str, Any]] = [_name("process_name", (pid, 0), node) for node, pid in nodes.items()]
    events.append(_name("process_name", (0, 0), "jobs without GPUs"))
    for place, (trial, _, _, _, begin, held, before, _, _) in zip(places, data["lanes"], strict=True):
        events.append(_name("thread_name", place, trial))
        events.append(_span("trial", "trial", place, (begin, held), {"trial": trial}))
        events.append(_span("import, load, warm-up", "load", place, (begin, min(before, held))))
    shards = data["shards"]
    for i, lane in enumerate(shards["lane"]):
        if lane < 0:
            continue
        more = {"shard": shards["name"][i], "predicted_seconds": shards["predicted"][i]}
        time = (shards["begin"][i], shards["seconds"][i])
        events.append(_span(shards["tasks"][shards["task"][i]], "shard", places[lane], time, more))
    kinds = {row: "metrics" if what in ("execute", "score") else what for what, _, _, _, row in data["jobs"]}
    events += [_name("thread_name", (0, row), kind) for row, kind in kinds.items()]
    for what, name, begin, seconds, row in data["jobs"]:
        events.append(_span(f"{what} {name}", what, (0, row), (begin, seconds)))
    for at, about, text, _ in data["notes"]:
        events.append({"name": f"{about}: {text}", "ph": "i", "s": "g", "ts": at * MICRO, "pid": 0, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"evaluation": data["about"]["id"]}}


Place = tuple[int, int]  # process and thread


def _name(kind: str, place: Place, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": place[0], "tid": place[1], "args": {"name": name}}


def _span(
    name: str, category: str, place: Place, time: tuple[float, float], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    begin, seconds = time
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": begin * MICRO,
        "dur": seconds * MICRO,
        "args": dict(more or {}),
    }
