"""Cordoned nodes: `nodes.json` in the work folder says until when no evaluation takes them.

Rule: written before a node is given back, so that a daemon which dies at once still leaves the node alone after its
restart. A node's back-off after failures is part of an evaluation's state, and its journal holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_record


class Nodes(Kept):
    """`nodes.json`. `cordoned`: node -> unix seconds until which no evaluation takes it."""

    schema_version: int = 1
    cordoned: Mapping[str, float]


def read(path: Path, now: float) -> dict[str, float]:
    """Node -> unix seconds until which it is cordoned; cordons that are over are left out. OSError."""
    try:
        cordoned = Nodes.model_validate_json(path.read_bytes()).cordoned
    except (FileNotFoundError, ValidationError):
        return {}
    return {node: until for node, until in cordoned.items() if until > now}


def cordon(path: Path, nodes: Iterable[str], until: float, now: float) -> Mapping[str, float]:
    """Cordon these nodes until then; a time that is over ends their cordon. OSError where it cannot be written."""
    found = read(path, now) | dict.fromkeys(nodes, until)
    left = {node: at for node, at in found.items() if at > now}
    write_record(path, Nodes(cordoned=left))
    return left
