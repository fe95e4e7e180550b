"""The instance of 63 data sets with time scaled down, and what each set will really take. Pure.

Rule: one truth for every runner: a set's seconds are drawn around its prior by the simulator's own `Truth`, along its
documents, so they are the same however the set is cut.
"""

from __future__ import annotations

import json
from functools import cached_property
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import NamedTuple

from simulation import baselines
from simulation.sampled_times import Predicted, Truth

from coordinator.decide.planning.instance import DataSet, parse_instance
from coordinator.decide.planning.lower_bound import Bound

BATCH_SECONDS = 2.0  # of a set's batch, about, before time is scaled: shards are cut between batches


def instance_text(gpus: int) -> str:
    """The shipped instance, which is of one node of 8 GPUs, on so many GPUs, with two CPU slots each."""
    given = json.loads(Path(__file__).with_name("portfolio63.instance.json").read_text())
    return json.dumps({**given, "gpus": gpus, "cpu_slots": 2 * gpus})


class Set(NamedTuple):
    """A set as it will be run: its batches' predicted and true GPU seconds, and its metric's.

    `alone`: its metric's jobs run one at a time (a judge's endpoint limits them).
    """

    name: str
    predicted: tuple[float, ...]
    seconds: tuple[float, ...]
    metric_predicted: float
    metric_seconds: float
    executes: bool
    alone: bool = False


class Portfolio:
    """The instance on 32 GPUs, every second divided by `scale`, drawn once."""

    def __init__(self, *, scale: float, sigma: float | None, seed: int) -> None:
        whole = json.loads(instance_text(32))
        for table in (whole, *whole["datasets"]):
            table.update({key: value / scale for key, value in table.items() if "seconds" in key})
        self.scale, self.instance = scale, parse_instance(json.dumps(whole))
        self.truth = Truth(Predicted(self.instance.sets()), sigma=sigma, seed=seed)

    def bound(self) -> Bound:
        """No schedule on these GPUs and CPU slots beats it, in scaled seconds."""
        one = self.instance
        costs = {"load_seconds": one.load_seconds, "stage_seconds": one.staging_seconds}
        return self.truth.bound(one.lanes(), cpu_slots=one.cpu_slots, **costs)

    @cached_property
    def sets(self) -> list[Set]:
        return [self._set(index, one) for index, one in enumerate(self.instance.datasets)]

    def _set(self, index: int, one: DataSet) -> Set:
        executes = one.metric == "execute"
        count = min(one.docs, max(1, ceil(one.gpu_seconds * self.scale / BATCH_SECONDS)))
        if executes:
            count = one.docs  # its CPU work follows its documents
        ends = [one.docs * number // count for number in range(count + 1)]
        pairs = list(pairwise(ends))
        return Set(
            name=one.name,
            predicted=tuple(one.gpu_seconds * (end - first) / one.docs for first, end in pairs),
            seconds=tuple(self.truth.gpu(index, first, end) for first, end in pairs),
            metric_predicted=one.metric_seconds,
            metric_seconds=self.truth.metric_seconds[index],
            executes=executes,
            alone=executes and one.metric_parallelism == 1,
        )

    # --- what others would run: GPU seconds of each job ----------------------------------------------------------

    def per_dataset(self) -> list[float]:
        """One job a set, in the portfolio's order."""
        return self._inference(baselines.per_dataset(self.instance.datasets))

    def num_worker(self) -> list[float]:
        """OpenCompass's num-worker tasks, as many as GPUs."""
        return self._inference(baselines.opencompass_num_worker(self.instance.datasets, self.instance.gpus))

    def _inference(self, tasks: list[baselines.Task]) -> list[float]:
        truth = self.truth
        return [sum(truth.gpu(truth.index[name], *span) for name, *span in task) for task in tasks]
