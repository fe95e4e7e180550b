"""Values of planning: work sets, lanes, shards and the plan.

Rule: a plan is a pure function of a `Problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Literal

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSet:
    """A request set to place.

    `batch_seconds`: predicted median GPU seconds of each fixed batch, in batch order, on a lane of
    speed 1; a shard is consecutive whole batches. `metric_seconds`: CPU seconds of the whole set's
    metric. A `score` is one CPU job after the last batch; an `execute` is one CPU job per shard, at
    most `metric_parallelism` of them at once. `sigma`: spread of log seconds.
    """

    name: str
    batch_seconds: Sequence[float]
    metric_seconds: float = 0.0
    metric: Literal["score", "execute"] = "score"
    metric_parallelism: int = UNLIMITED
    sigma: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One trial's GPUs: free `ready_at_seconds` from now, `speed` times as fast as predicted."""

    name: str
    node: str
    ready_at_seconds: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Sets to place on lanes, and what that costs.

    A lane works from max(its ready time, `stage_seconds`) + `load_seconds` on; a shard takes its seconds / the lane's speed +
    `shard_overhead_seconds`. `shards_per_task` forces that many nearly equal shards per set.
    """

    sets: Sequence[WorkSet]
    lanes: Sequence[Lane]
    _: KW_ONLY
    load_seconds: float
    shard_overhead_seconds: float = 0.05
    cpu_slots: int = 1
    shards_per_task: int | None = None
    stage_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """Batches `first_batch` … `end_batch - 1` of a set; `seconds` at speed 1, without the shard's overhead.

    `rank` is the global order: lower runs sooner (long CPU tails first, then longest).
    """

    set: str
    first_batch: int
    end_batch: int
    seconds: float
    rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """The initial shards of a lane, by rank; an empty lane runs stolen shards."""

    lane: str
    node: str
    shards: tuple[PlannedShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete plan. `gpu_seconds`: seconds that lanes are held, with loads and overheads. Lanes keep the given order."""

    lanes: tuple[LanePlan, ...]
    makespan_seconds: float
    lower_bound_seconds: float
    gpu_seconds: float


# --- batches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Even(Sequence[float]):
    """A sequence of `number` batches of `each` seconds, without slicing."""

    each: float
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        range(self.number)[index]  # raises IndexError like a list
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
    """Return the seconds of all batches."""
    return batches.each * batches.number if isinstance(batches, Even) else sum(batches)


def extreme_batches(batches: Sequence[float]) -> tuple[float, float]:
    """Return the shortest and the longest batch; zeros if there are none."""
    if not batches:
        return 0.0, 0.0
    if isinstance(batches, Even):
        return batches.each, batches.each
    return min(batches), max(batches)


def running_sums(batches: Sequence[float]) -> Sequence[float]:
    """Return the sums of the first 0, 1, … all batches."""
    return EvenSums(batches) if isinstance(batches, Even) else list(accumulate(batches, initial=0.0))
