"""Fields of every record that one version writes and another reads: `python -m support.shapes > FILE`, in a commit's clone."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

READ = {
    "journal": "coordinator.evaluation.events:EVENT",
    "specs": "evaljobs.contract.specs:SPEC",
    "outcomes": "evaljobs.contract.outcomes:OUTCOME",
    "responses": "evaljobs.contract.storage:ShardHead",
    "request sets": "evaljobs.contract.specs:RequestSetManifest",
    "entries": "evaljobs.contract.specs:EntryManifest",
    "batches": "evaljobs.contract.specs:BatchIndex",
    "judgements": "evaljobs.judges.records:Judgement",
    "redis/address.json": "evaljobs.queue.redis_client:RedisAddress",
    "redis/server.json": "coordinator.services.redis_server:ServerRecord",
    "status.json ended": "coordinator.runtime.status_file:Ended",
    "status.json parked": "coordinator.runtime.status_file:Parked",
    "nodes.json": "coordinator.allocation.cordons:Nodes",
    "places.json": "coordinator.intake.places:Places",
    "news.json": "coordinator.monitor.owed:NewsFile",
    "pending.json": "coordinator.intake.pending:PendingFile",
    "notices": "coordinator.intake.sources:Notice",
    "submissions": "coordinator.runtime.submission:Submission",
    "commands": "coordinator.runtime.operator_commands:Command",
    "observations": "priors.table:Observation",
}
Shape = dict[str, dict[str, Any]]  # record -> {field: [needed?, its fixed words]}


@functools.cache
def shapes() -> dict[str, Shape]:
    """What is read -> its records; without those that this commit does not have."""
    found = {}
    for what, place in READ.items():
        module, _, name = place.partition(":")
        try:
            read = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        schema = (read if isinstance(read, TypeAdapter) else TypeAdapter(read)).json_schema()
        records = schema.pop("$defs", {}) | {"": schema}
        found[what] = {name: _fields(record) for name, record in records.items() if "properties" in record}
    return found


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    needed = record.get("required", ())
    return {name: [name in needed, sorted(set(_words(each)))] for name, each in record["properties"].items()}


def _words(schema: Any) -> Iterator[str]:
    """The words that a field's type fixes."""
    if isinstance(schema, dict):
        yield from [str(schema["const"])] if "const" in schema else map(str, schema.get("enum", ()))
        for inner in schema.values():
            yield from _words(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _words(inner)


if __name__ == "__main__":
    json.dump(shapes(), sys.stdout, sort_keys=True)
