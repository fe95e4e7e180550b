"""Nodes that a person asked back, and until when they are not taken again.

Rule: written to the work folder before a node is given back, so a daemon that dies at once comes back without it.
It does not know: what runs on a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evaljobs.contract.storage import write_atomic

_FILE = TypeAdapter(dict[str, float])


def read(path: Path, now: float) -> dict[str, float]:
    """Node -> unix seconds until which it is kept back; those whose time is over are left out. OSError."""
    try:
        until = _FILE.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}
    return {node: at for node, at in until.items() if at > now}


def keep(path: Path, nodes: Iterable[str], until: float, now: float) -> Mapping[str, float]:
    """Keep these back until then; a time that is over lets them be taken again. OSError where it cannot be written."""
    found = read(path, now) | dict.fromkeys(nodes, until)
    left = {node: at for node, at in found.items() if at > now}
    write_atomic(path, _FILE.dump_json(left))
    return left
