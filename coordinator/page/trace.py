"""An evaluation in Chrome's trace format, which Perfetto and chrome://tracing open. Pure.

Source: "Trace Event Format", Google. Times are microseconds since the acceptance; a process is a node, a thread a lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MICRO = 1e6
Place = tuple[int, int]  # process and thread


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data`: of `evaluation_data`. Returns {"traceEvents": […], …}."""
    report, shards = data["report"], data["shards"]
    nodes = {node: i + 1 for i, node in enumerate(dict.fromkeys(g["node"] for g in report["gpus"]))}
    places = [(nodes[g["node"]], number) for number, g in enumerate(report["gpus"])]
    events = [_event("M", (pid, 0), "process_name", args={"name": node}) for node, pid in nodes.items()]
    events.append(_event("M", (0, 0), "process_name", args={"name": "jobs without GPUs"}))
    for place, g in zip(places, report["gpus"], strict=True):
        begin, before = g["started_at"] - report["accepted_at"], g["imports"] + g["load"] + g["warm"]
        events.append(_event("M", place, "thread_name", args={"name": g["trial"]}))
        events.append(_span("trial", "trial", place, (begin, g["held"]), {"trial": g["trial"]}))
        events.append(_span("import, load, warm-up", "load", place, (begin, min(before, g["held"]))))
    columns = (shards[name] for name in ("lane", "task", "name", "begin", "seconds", "predicted"))
    for lane, task, name, begin, seconds, predicted in zip(*columns, strict=True):
        if lane >= 0:
            more = {"shard": name, "predicted_seconds": predicted}
            events.append(_span(shards["tasks"][task], "shard", places[lane], (begin, seconds), more))
    kinds = {s.row: "metrics" if s.what in ("execute", "score") else s.what for s in data["jobs"]}
    events += [_event("M", (0, row), "thread_name", args={"name": kind}) for row, kind in kinds.items()]
    events += [_span(f"{s.what} {s.name}", s.what, (0, s.row), (s.begin, s.seconds)) for s in data["jobs"]]
    events += [_event("i", (0, 0), f"{n.about}: {n.text}", s="g", ts=n.at * MICRO) for n in data["notes"]]
    told = {"evaluation": report["evaluation_id"]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _event(kind: str, place: Place, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": kind, "pid": place[0], "tid": place[1], **more}


def _span(
    name: str, category: str, place: Place, time: tuple[float, float], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    begin, seconds = (at * MICRO for at in time)
    return _event("X", place, name, cat=category, ts=begin, dur=seconds, args=dict(more or {}))
