"""Words for lists of names, for messages and screens. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of the rest: "a, b and 3 more"; "" without any."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
