"""The instance with time scaled down, and what each set will really take. Pure.

Rule: one truth for every runner: a set's seconds are drawn around its prior by the simulator's own `Truth`, along its
documents, so they are the same however the set is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from simulation import baselines
from simulation.sampled_times import Predicted, Truth

from coordinator.planning.instance import DataSet, Instance, parse_instance
from coordinator.planning.lower_bound import Bound
from priors.sizes import known

INSTANCE = Path(__file__).with_name("portfolio63_32gpus.instance.json")
BATCH_SECONDS = 2.0  # of a set's batch, about, before time is scaled: shards are cut between batches
FIXED = (
    "load_seconds",
    "shard_overhead_seconds",
    "storage_seconds_alone",
    "staging_seconds",
    "preprocess_seconds",
)


def scaled(instance: Instance, scale: float) -> Instance:
    """The same instance with every second divided by `scale`."""

    def shorter(one: DataSet) -> DataSet:
        seconds = {"gpu_seconds": one.gpu_seconds / scale, "metric_seconds": one.metric_seconds / scale}
        return one.model_copy(update=seconds)

    sets = tuple(map(shorter, instance.datasets))
    fixed = {name: getattr(instance, name) / scale for name in FIXED}
    return instance.model_copy(update={**fixed, "datasets": sets})


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A set as it will be run: its batches' predicted and true GPU seconds, and its metric's.

    `alone`: its metric's jobs run one at a time (a judge's endpoint limits them).
    """

    name: str
    predicted: tuple[float, ...]
    seconds: tuple[float, ...]
    metric_predicted: float
    metric_seconds: float
    executes: bool
    alone: bool


class Portfolio:
    """An instance, drawn once."""

    def __init__(self, text: str, *, scale: float, sigma: float | None, seed: int) -> None:
        self.scale = scale
        self.instance = scaled(parse_instance(text), scale)
        self.truth = Truth(Predicted(self.instance.sets()), sigma=sigma, seed=seed)

    def bound(self) -> Bound:
        """No schedule on these GPUs and CPU slots beats it, in scaled seconds."""
        return self.truth.bound(
            self.instance.lanes(),
            load_seconds=self.instance.load_seconds,
            cpu_slots=self.instance.cpu_slots,
            stage_seconds=self.instance.staging_seconds,
        )

    @cached_property
    def sets(self) -> list[Set]:
        return [self._set(index, one) for index, one in enumerate(self.instance.datasets)]

    def _set(self, index: int, one: DataSet) -> Set:
        count = min(one.docs, max(1, ceil(one.gpu_seconds * self.scale / BATCH_SECONDS)))
        if one.metric == "execute":
            count = one.docs  # its CPU work follows its documents
        ends = [one.docs * number // count for number in range(1, count + 1)]
        pairs = list(zip([0, *ends], ends, strict=False))
        return Set(
            name=one.name,
            predicted=tuple(one.gpu_seconds * (end - first) / one.docs for first, end in pairs),
            seconds=tuple(self.truth.gpu(index, first, end) for first, end in pairs),
            metric_predicted=one.metric_seconds,
            metric_seconds=self.truth.metric_seconds[index],
            executes=one.metric == "execute",
            alone=one.metric == "execute" and one.metric_parallelism == 1,
        )

    # --- what others would run -----------------------------------------------------------------------------------

    def _sources(self) -> list[baselines.Source]:
        return [
            baselines.Source(
                name=one.name, docs=one.docs, labels=row.labels if (row := known(one.name)) else 0
            )
            for one in self.instance.datasets
        ]

    def per_dataset(self) -> list[float]:
        """GPU seconds of each job, one a set, in the portfolio's order."""
        return [self._inference(task) for task in baselines.per_dataset(self._sources())]

    def num_worker(self) -> list[float]:
        """GPU seconds of each of OpenCompass's num-worker tasks, as many as GPUs."""
        tasks = baselines.opencompass_num_worker(self._sources(), self.instance.gpus)
        return [self._inference(task) for task in tasks]

    def _inference(self, task: baselines.Task) -> float:
        truth = self.truth
        return sum(truth.gpu(truth.index[p.dataset], p.start_doc, p.end_doc) for p in task)
