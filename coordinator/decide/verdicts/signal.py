"""Signal and noise of a task's scores over a training, and how often the task is worth its price. Pure.

Rule: signal and noise are those of Heineman et al., "Signal and Noise: A Framework for Reducing Uncertainty in Language
Model Evaluation" (2025): the largest difference between models, and the scatter of the last checkpoints of a training, both over
their means. Models are the final scores of several trainings; of a single one its stages, LAST checkpoints each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

STAGE_CHECKPOINTS = 5  # checkpoints, at most, of a stage, and of the noise
MIN_CHECKPOINTS = 6  # checkpoints of a single training, below which there are no two stages of three
NOISE_RATIO = 2.0  # ratio below which stages of checkpoints that differ by noise alone are about as far apart
ASKED_SHARE = (
    0.5  # of the GPU seconds of asking all tasks at each checkpoint, that `asking_cadences` keeps to
)
MAX_RATIO = 1000.0  # ratio, from which a larger one makes no difference
SCALE_HALVINGS = 50  # of the scale between ratios and how often a task is asked
MAX_INTERVAL = 10  # checkpoints, at most, from one at which a task is asked to the next


class Signal(NamedTuple):
    """Of one task's score; both are shares of its mean."""

    signal: float
    noise: float

    @property
    def ratio(self) -> float:
        """Infinite where the last checkpoints do not differ, 0 where no model does."""
        return self.signal / self.noise if self.noise else math.inf if self.signal else 0.0

    @property
    def says_nothing(self) -> bool:
        return self.ratio < NOISE_RATIO


def signal_of(trainings: Sequence[Sequence[float]]) -> Signal | None:
    """Return signal and noise of scores at the checkpoints of one or several trainings, in order; None: too few checkpoints.

    Of several trainings the noise is the root mean square of each one's.
    """
    if len(trainings) == 1:
        (values,) = trainings
        size = min(STAGE_CHECKPOINTS, len(values) // 2)
        stages = [values[end - size : end] for end in range(len(values), size - 1, -size)] if size else []
        if len(values) < MIN_CHECKPOINTS:
            return None
        last = [values[-size:]]
    else:
        stages = last = [
            values[-STAGE_CHECKPOINTS:] for values in trainings if len(values) >= MIN_CHECKPOINTS // 2
        ]
        if len(stages) < 2:
            return None
    models, mean = [fmean(stage) for stage in stages], fmean(value for one in last for value in one)
    if not mean or not (middle := fmean(models)):
        return None
    noise = math.sqrt(fmean(pstdev(one) ** 2 for one in last))
    return Signal((max(models) - min(models)) / abs(middle), noise / abs(mean))


def asking_cadences(tasks: Mapping[str, tuple[Signal | None, float]]) -> dict[str, int]:
    """Return the cadence of each task: 1 asks it at each checkpoint, k at each k-th one; at most MAX_INTERVAL.

    `tasks`: with the GPU seconds of asking it. All together take ASKED_SHARE of the seconds of asking each at each checkpoint, which are
    divided as Neyman's allocation has it: a task is asked as often as its ratio over the root of its seconds. A task whose signal
    is not known is asked at each checkpoint, one that says nothing as rarely as any.
    """
    worth = {
        name: 0.0 if signal.says_nothing else min(signal.ratio, MAX_RATIO) / math.sqrt(seconds)
        for name, (signal, seconds) in tasks.items()
        if signal is not None and seconds > 0
    }

    def every(scale: float) -> dict[str, int]:
        often = {name: min(1.0, max(1 / MAX_INTERVAL, scale * one)) for name, one in worth.items()}
        return {name: math.ceil(1 / often.get(name, 1.0) - 1e-9) for name in tasks}

    budget = ASKED_SHARE * sum(seconds for _, seconds in tasks.values())
    low, high = 0.0, 1 / min(filter(None, worth.values()), default=1.0)
    for _ in range(SCALE_HALVINGS):
        middle = (low + high) / 2
        spent = sum(tasks[name][1] / often for name, often in every(middle).items())
        low, high = (middle, high) if spent <= budget else (low, middle)
    return every(low)
