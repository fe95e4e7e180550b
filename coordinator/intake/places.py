"""Additional folders of a checkpoint: a copy with the same content, name and times is the same evaluation.

Rule: they only decide in which trainings' series the scores appear. Written if a known evaluation is requested again; read by
`report.load_series`.
"""

from __future__ import annotations

import contextlib

from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import find_record, write_record


class Places(StateRecord):
    """Full paths, besides the one in the evaluation's record, in the order of announcement."""

    schema_version: int = 1
    places: tuple[str, ...] = ()


def read_places(paths: EvaluationPaths) -> tuple[str, ...]:
    """Read the evaluation's additional folders; empty if there are none."""
    found = find_record(paths.places, Places)
    return () if found is None else found.places


def record_place(paths: EvaluationPaths, own: str, place: str) -> None:
    """Record that the evaluation of `own` was requested for `place`. Ignore a disk that refuses."""
    known = read_places(paths)
    if place not in (own, *known):
        with contextlib.suppress(OSError):
            write_record(paths.places, Places(places=(*known, place)))
