"""Draws the true seconds of a simulated run around the predicted ones.

Rule: one draw per set (the error of its prior) and smaller draws along the set (documents differ).
A shard costs the sum of its documents, however the set is cut, so every policy runs the same truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, sqrt
from random import Random

from coordinator.decide.planning.lower_bound import Bound, Size, measured_bound
from coordinator.decide.planning.model import Lane, WorkSet, extreme_batches, running_sums

BLOCKS = 16
"""Blocks of equal predicted seconds in a set, with an inner draw each."""
WITHIN = 0.25
"""Share of the spread that the inner draws have; its square and that of the draw per set sum to 1."""


class Predicted:
    """Sets and the running sums of their predicted seconds: the same for every draw."""

    def __init__(self, sets: Sequence[WorkSet]) -> None:
        self.sets = list(sets)
        self.index = {work.name: index for index, work in enumerate(self.sets)}
        self.sums = [running_sums(work.batch_seconds) for work in self.sets]
        self.ends = [extreme_batches(work.batch_seconds) for work in self.sets]  # shortest and longest batch


class Truth:
    """True GPU and metric seconds of every set.

    `sigma` is the spread of log seconds: None takes each set's own; 0 makes every prediction right.
    """

    def __init__(self, predicted: Predicted, *, sigma: float | None, seed: int) -> None:
        random = Random(seed)
        self.predicted, self.sets, self.index = predicted, predicted.sets, predicted.index
        self._factors: list[list[float]] = []  # per set and block: true seconds per predicted second
        self.metric_seconds: list[float] = []
        for work in self.sets:
            spread = work.sigma if sigma is None else sigma
            whole = exp(spread * sqrt(1 - WITHIN**2) * random.gauss())
            self._factors.append([whole * exp(spread * WITHIN * random.gauss()) for _ in range(BLOCKS)])
            self.metric_seconds.append(work.metric_seconds * exp(spread * random.gauss()))
        self._steps = [list(accumulate(blocks, initial=0.0)) for blocks in self._factors]

    def _at(self, index: int, batch: int) -> float:
        """True seconds of the first `batch` batches of a set."""
        sums = self.predicted.sums[index]
        if not sums[-1]:
            return 0.0
        place = min(sums[batch] / sums[-1], 1.0) * BLOCKS
        block = min(int(place), BLOCKS - 1)
        return (self._steps[index][block] + (place - block) * self._factors[index][block]) * sums[-1] / BLOCKS

    def gpu(self, index: int, first: int, end: int) -> float:
        """True GPU seconds of batches `first` … `end - 1` at speed 1."""
        return self._at(index, end) - self._at(index, first)

    def gpu_total(self, index: int) -> float:
        return self._steps[index][-1] * self.predicted.sums[index][-1] / BLOCKS

    def metric_share(self, index: int, first: int, end: int) -> float:
        """True CPU seconds of an `execute` shard, by its predicted share (by batches where 0)."""
        sums = self.predicted.sums[index]
        part, whole = (sums[end] - sums[first], sums[-1]) if sums[-1] else (end - first, len(sums) - 1)
        return self.metric_seconds[index] * part / whole

    def bound(
        self, lanes: Sequence[Lane], *, load_seconds: float, cpu_slots: int, stage_seconds: float
    ) -> Bound:
        """The bound of the drawn seconds; a batch takes at least its prediction times the least factor."""
        sizes = []
        for index, work in enumerate(self.sets):
            if work.batch_seconds:
                shortest, longest = (min(self._factors[index]) * end for end in self.predicted.ends[index])
                parallel = min(work.metric_parallelism, cpu_slots) if work.metric == "execute" else 0
                seconds = (self.gpu_total(index), shortest, longest, self.metric_seconds[index])
                sizes.append(Size(work.name, *seconds, parallel))
        costs = {"load_seconds": load_seconds, "cpu_slots": cpu_slots, "stage_seconds": stage_seconds}
        return measured_bound(sizes, lanes, **costs)
