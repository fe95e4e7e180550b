"""The file `nodes.json` in the work folder: when each cordon ends, and how often each node failed.

Rule: written before a node is withdrawn, so that a daemon that dies at once still leaves the node alone after its restart. A
node's back-off after failures is part of an evaluation's state and its journal; this file tells all evaluations, including
later ones, that it failed. `check-nodes` adds the nodes that it found bad, the daemon those it has checked. Each change is
made under a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import hold_lock, write_record

RECENT_SECONDS = 7 * 86400.0  # after which a failure is forgotten
MOST_FAILURES = 20  # latest failures kept per node


class Failure(StateRecord):
    """`at`: unix seconds; `seen_by`: an evaluation's id, or the command that found it."""

    at: float
    why: str
    seen_by: str


class Nodes(StateRecord):
    """Contents of `nodes.json`. `cordoned`: node -> unix seconds until which no evaluation takes it; `failures`: by node,
    oldest first; `checked`: node -> unix seconds until which it needs no check before its use.
    """

    schema_version: int = 1
    cordoned: Mapping[str, float] = {}
    failures: Mapping[str, tuple[Failure, ...]] = {}
    checked: Mapping[str, float] = {}


def _read(path: Path) -> Nodes:
    try:
        return Nodes.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Nodes()


def read_cordons(path: Path, now: float) -> dict[str, float]:
    """Read node -> unix seconds until which it is cordoned, without expired cordons. Raise OSError."""
    return {node: until for node, until in _read(path).cordoned.items() if until > now}


def cordon_nodes(path: Path, nodes: Iterable[str], until: float, now: float) -> Mapping[str, float]:
    """Cordon these nodes until then; a time in the past lifts the cordon. Raise OSError if the file cannot be written."""
    with hold_lock(path.with_suffix(".lock")):
        found = read_cordons(path, now) | dict.fromkeys(nodes, until)
        left = {node: at for node, at in found.items() if at > now}
        write_record(path, _read(path).model_copy(update={"cordoned": left}))
    return left


def checked_nodes(path: Path, now: float) -> set[str]:
    """Read the nodes that need no check before their use. Raise OSError."""
    return {node for node, until in _read(path).checked.items() if until > now}


def require_node_check(path: Path, after: Mapping[str, float], now: float) -> None:
    """Set when nodes need their next check (unix seconds). Raise OSError if the file cannot be written."""
    with hold_lock(path.with_suffix(".lock")):
        known = _read(path)
        left = {node: until for node, until in {**known.checked, **after}.items() if until > now}
        write_record(path, known.model_copy(update={"checked": left}))


def read_node_failures(path: Path, now: float) -> dict[str, tuple[Failure, ...]]:
    """Read node -> its failures of the last RECENT_SECONDS, oldest first. Raise OSError."""
    found = {
        node: tuple(f for f in own if f.at > now - RECENT_SECONDS)
        for node, own in _read(path).failures.items()
    }
    return {node: own for node, own in found.items() if own}


def record_node_failures(path: Path, new: Iterable[tuple[str, Failure]], now: float) -> None:
    """Add failures of nodes that are not yet recorded. Raise OSError if the file cannot be written."""
    met, known = tuple(new), read_node_failures(path, now)
    if all(failure in known.get(node, ()) for node, failure in met):
        return
    with hold_lock(path.with_suffix(".lock")):
        known = read_node_failures(path, now)
        for node, failure in met:
            if failure not in known.get(node, ()):
                known[node] = (*known.get(node, ()), failure)[-MOST_FAILURES:]
        write_record(path, _read(path).model_copy(update={"failures": known}))
