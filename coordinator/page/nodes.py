"""How the nodes of evaluations stand: in use, in back-off, withdrawn or cordoned, why and until when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.runtime.summary import Summary

# the worst comes first where several evaluations use a node
ORDER = ("cordoned", "back-off", "withdrawn", "ready", "staging", "offered")


def standing(summaries: Iterable[Summary], cordoned: Mapping[str, float]) -> list[list[Any]]:
    """A row per node: name, status, why, until (unix seconds, or None). `cordoned`: node -> unix seconds."""
    found: dict[str, list[Any]] = {}
    for node in (node for summary in summaries for node in summary.nodes):
        _put(found, [node.name, node.status, node.why, node.until])
    for name, until in cordoned.items():
        why = "an operator gave it back (evalspan release)"
        _put(found, [name, "cordoned", why, until])
    return [found[name] for name in sorted(found)]


def _put(found: dict[str, list[Any]], row: list[Any]) -> None:
    known = found.get(row[0])
    if known is None or ORDER.index(row[1]) < ORDER.index(known[1]):
        found[row[0]] = row
