"""Seconds of batches and their running sums, without a list where all batches are equal.

Rule: `Even` behaves as a list of equal numbers; arithmetic serves millions of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Even(Sequence[float]):
    """`number` batches of `each` seconds. Slices of it are not taken."""

    each: float
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        range(self.number)[index]  # raises IndexError, as a list does
        return self.each


class EvenSums(Sequence[float]):
    """Running sums of equal batches, from 0.0 on: one more than there are batches."""

    __slots__ = ("each", "number")

    def __init__(self, even: Even) -> None:
        self.each, self.number = even.each, even.number

    def __len__(self) -> int:
        return self.number + 1

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return self.each * range(self.number + 1)[index]


def seconds_of(batches: Sequence[float]) -> float:
    """Seconds of all batches."""
    return batches.each * batches.number if isinstance(batches, Even) else sum(batches)


def extremes(batches: Sequence[float]) -> tuple[float, float]:
    """The shortest and the longest batch; zeros where there is none."""
    if not batches:
        return 0.0, 0.0
    if isinstance(batches, Even):
        return batches.each, batches.each
    return min(batches), max(batches)


def running(batches: Sequence[float]) -> Sequence[float]:
    """Sums of the first 0, 1, … all batches."""
    return EvenSums(batches) if isinstance(batches, Even) else list(accumulate(batches, initial=0.0))
