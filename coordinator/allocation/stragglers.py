"""Which trials are stragglers: slower than the prior by three sigma while the others are not. Pure.

Rule: a trial's pace is the log of what its shards took over what was predicted of them. What all share is the prior's
mistake: a trial is judged by how far it lies above the median of the others, in units of the prior's
own spread or of theirs, whichever is wider.
The report names them. What holds up the end is run by a second trial, too (`evaljobs.queue.lua`, `copy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import median

SIGMAS = 3.0
LEAST_SIGMA = 0.1  # of log seconds: what shards of one set differ by on one GPU (priors.fit.SIGMA_RUN)
LEAST_SHARDS = 2  # one may be an odd one
LEAST_SECONDS = 10.0  # what took less is noise, not pace
LEAST_OTHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one trial: seconds that its shards took, seconds predicted of them, how many they are."""

    took: float = 0.0
    predicted: float = 0.0
    shards: int = 0

    def and_done(self, took: float, predicted: float) -> Pace:
        """With one more shard."""
        return Pace(took=self.took + took, predicted=self.predicted + predicted, shards=self.shards + 1)

    def and_in_hand(self, elapsed: float, predicted: float, done: int, batches: int) -> Pace:
        """With the shard in hand where it is late already: it took `elapsed` for `done` batches and part of one more."""
        due = predicted * min(1.0, (done + 1) / batches) if batches else predicted
        return self.and_done(elapsed, due) if elapsed > due else self

    @property
    def tells(self) -> bool:
        """Is it enough to judge by?"""
        return self.shards >= LEAST_SHARDS and self.took >= LEAST_SECONDS and self.predicted > 0

    @property
    def log(self) -> float:
        return log(self.took / self.predicted)


def stragglers(paces: Mapping[str, Pace], sigma: float) -> dict[str, float]:
    """Straggling trials, with how many times as long as the others each takes. `sigma`: the prior's, of log seconds."""
    logs = {trial: pace.log for trial, pace in paces.items() if pace.tells}
    found = {}
    for trial, own in logs.items():
        others = [other for name, other in logs.items() if name != trial]
        if len(others) < LEAST_OTHERS:
            continue
        middle = median(others)
        # the median deviation, as a normal distribution's sigma: one more straggler among them hardly widens it
        theirs = 1.4826 * median(abs(other - middle) for other in others)
        if own - middle > SIGMAS * max(sigma, theirs, LEAST_SIGMA):
            found[trial] = exp(own - middle)
    return found
