"""Finds stragglers: trials slower than the prior by three sigma while the others are not. Pure.

Rule: a trial's pace is the log of (seconds taken / seconds predicted) of its shards. A deviation
common to all trials is the prior's error. So a trial is measured against the median of the others,
in units of the prior's spread or of theirs, whichever is wider. The report names stragglers; a
second trial copies the shard that holds up the end (`evaljobs.queue.lua`, `copy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import median

SIGMAS = 3.0
LEAST_SIGMA = 0.1  # spread of log seconds of one set's shards on one GPU (priors.estimate.SIGMA_RUN)
LEAST_SHARDS = 2  # fewest shards to judge a trial by: one may be odd
LEAST_SECONDS = 10.0  # least seconds of shards to judge a trial by: less is noise
LEAST_OTHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One trial's shards: seconds that they took, seconds predicted, their number."""

    took: float = 0.0
    predicted: float = 0.0
    shards: int = 0

    def and_done(self, took: float, predicted: float) -> Pace:
        """The pace with one more shard."""
        return Pace(took=self.took + took, predicted=self.predicted + predicted, shards=self.shards + 1)

    def and_in_hand(self, elapsed: float, predicted: float, done: int, batches: int) -> Pace:
        """The pace with the running shard, if late: `elapsed` seconds for `done` batches and a part."""
        due = predicted * min(1.0, (done + 1) / batches) if batches else predicted
        return self.and_done(elapsed, due) if elapsed > due else self

    @property
    def tells(self) -> bool:
        """Is there enough to judge by?"""
        return self.shards >= LEAST_SHARDS and self.took >= LEAST_SECONDS and self.predicted > 0

    @property
    def log(self) -> float:
        return log(self.took / self.predicted)


def stragglers(paces: Mapping[str, Pace], sigma: float) -> dict[str, float]:
    """Straggler -> its time / the others' time. `sigma`: the prior's, of log seconds."""
    logs = {trial: pace.log for trial, pace in paces.items() if pace.tells}
    found = {}
    for trial, own in logs.items():
        others = [other for name, other in logs.items() if name != trial]
        if len(others) < LEAST_OTHERS:
            continue
        middle = median(others)
        # sigma from the median deviation: another straggler among the others hardly widens it
        theirs = 1.4826 * median(abs(other - middle) for other in others)
        if own - middle > SIGMAS * max(sigma, theirs, LEAST_SIGMA):
            found[trial] = exp(own - middle)
    return found
