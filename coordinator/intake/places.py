"""Further folders of a checkpoint: a copy with the same content, name and times is the same evaluation.

Rule: they decide nothing but in which trainings' series the evaluation's scores are. Written where a known
evaluation is asked for again; read by `report.load_series`.
"""

from __future__ import annotations

import contextlib

from pydantic import ValidationError

from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import read_record, write_record


class Places(Kept):
    """Full paths, besides the one in the evaluation's record, in the order in which they were announced."""

    schema_version: int = 1
    places: tuple[str, ...] = ()


def read(paths: EvaluationPaths) -> tuple[str, ...]:
    """The evaluation's further folders; empty where there is none."""
    try:
        return read_record(paths.places, Places).places
    except (OSError, ValidationError):
        return ()


def keep(paths: EvaluationPaths, own: str, place: str) -> None:
    """Note that the evaluation of `own` was asked for as that of `place`, where the disk takes it."""
    known = read(paths)
    if place not in (own, *known):
        with contextlib.suppress(OSError):
            write_record(paths.places, Places(places=(*known, place)))
