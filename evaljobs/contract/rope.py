"""Rotary embeddings whose scale follows a batch's longest row, as a model's config.json names them.

Rule: pure; reads a config as JSON. Called from `coordinator.intake.validate` and the trials' engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

DYNAMIC: Final = "dynamic"  # transformers keeps its scale from batch to batch until a short one comes
GROWING: Final = (DYNAMIC, "longrope", "su")  # "su": longrope in the first configs of Phi-3
_TABLES = ("rope_parameters", "rope_scaling")


def growing_rope(config: Mapping[str, Any]) -> str:
    """The kind of `GROWING` that a model's config, or a part of it, names; "" for none."""
    return next((kind for kind in _kinds(config, within=False) if kind in GROWING), "")


def _kinds(config: Mapping[str, Any], *, within: bool) -> Iterator[object]:
    """`within`: is it (a layer type's part of) a table of rotary embeddings?"""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _kinds(value, within=within or key in _TABLES)
        elif within and key in ("rope_type", "type"):
            yield value
