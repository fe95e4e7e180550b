"""Chooses how many metric workers a plan starts with. Pure. Called by `make_plan`.

Rule: the fewest workers whose predicted end, metrics included, is within SLACK times that of the
most workers. Metrics are taken at a high percentile: a spare worker idles on a CPU, a missing one
delays the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planning.cpu_stage import FINEST, MetricJob, divided, metrics_end
from coordinator.planning.model import Plan, WorkSet

SLACK = 1.02  # longest accepted end, as a factor of the end with the most workers


class Crew:
    """The metric stage of one plan, for any number of workers of `cores` slots each.

    `metric_seconds`: CPU seconds of each set's metric, in place of the set's own. Lanes start after
    `load_seconds`.
    """

    def __init__(
        self,
        made: Plan,
        sets: Sequence[WorkSet],
        *,
        metric_seconds: Mapping[str, float],
        load_seconds: float,
        shard_overhead_seconds: float,
        cores: int,
    ) -> None:
        self._sets = sets
        self._seconds = [metric_seconds[work.name] for work in sets]
        self._cores = cores
        index = {work.name: number for number, work in enumerate(sets)}
        self._spans: list[tuple[float, int, float, int]] = []  # (end, set, inference seconds, batches)
        for lane in made.lanes:
            end = load_seconds
            for shard in lane.shards:
                end += shard.seconds + shard_overhead_seconds
                batches = shard.end_batch - shard.first_batch
                self._spans.append((end, index[shard.set], shard.seconds, batches))
        self._gpus_end = max((span[0] for span in self._spans), default=0.0)
        self._totals = [0.0] * len(sets)
        for _, number, seconds, _ in self._spans:
            self._totals[number] += seconds

    def end(self, workers: int) -> float:
        """Seconds from now until the last metric job has ended."""
        slots = workers * self._cores
        grain = FINEST * (sum(self._seconds) / slots + self._gpus_end)
        jobs: list[MetricJob] = []
        done: dict[int, float] = {}
        for end, number, seconds, batches in self._spans:
            work = self._sets[number]
            if work.metric == "execute" and self._totals[number]:
                cost = self._seconds[number] * seconds / self._totals[number]
                at_once = min(work.metric_parallelism, slots)
                jobs += divided(end, cost, number, at_once=at_once, documents=batches, grain=grain)
            else:
                done[number] = max(end, done.get(number, 0.0))
        jobs += [(end, self._seconds[number], number) for number, end in done.items()]
        parallelism = [work.metric_parallelism for work in self._sets]
        return max(self._gpus_end, metrics_end(jobs, parallelism, slots))

    def fewest(self, most: int) -> int:
        """Workers to start with, from 1 to `most`."""
        enough = SLACK * self.end(most)
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.end(middle) <= enough:
                high = middle
            else:
                low = middle + 1
        return high
