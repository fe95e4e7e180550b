"""Baseline policies: how each partitions the work, and its run on GPUs that load from shared storage.

Rule: partitioners follow their sources to the document, with the sources' errors. Where a source
leaves a choice open, the one that is faster for the baseline is taken. Sources: OpenCompass
`partitioners/num_worker.py`, `runners/slurm_sequential.py`. The policy of Hu et al., NSDI 2024, is planned by
`planning.planner`, for real runs too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil
from typing import Any, NamedTuple

from coordinator.decide.planning.flow_shop import MetricJob, metrics_end
from coordinator.decide.planning.instance import DataSet
from simulation.sampled_times import Truth

MIN_TASK_DOCS = 16
MAX_RUNNING, SUBMIT_SECONDS = 32, 0.5


class Piece(NamedTuple):
    """Documents `start_doc` … `end_doc - 1` of a data set."""

    dataset: str
    start_doc: int
    end_doc: int


Task = tuple[Piece, ...]
"""What one job runs, in order, after one load."""


def per_dataset(sets: Sequence[DataSet]) -> list[Task]:
    """One job per data set, in the given order."""
    return [(Piece(one.name, 0, one.docs),) for one in sets]


def opencompass_num_worker(sets: Sequence[DataSet], workers: int) -> list[Task]:
    """NumWorkerPartitioner (`heuristic`): every set in `workers` pieces, dealt round-robin."""
    pieces: list[Piece] = []
    for one in sets:
        whole = one.docs <= MIN_TASK_DOCS
        step = one.docs if whole else max(ceil(one.docs / workers), MIN_TASK_DOCS)
        pieces += [Piece(one.name, at, min(at + step, one.docs)) for at in range(0, one.docs, step)]
    return [tuple(pieces[first::workers]) for first in range(min(workers, len(pieces)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that each job of a policy pays. `storage`: a read of the weights, alone on the NIC."""

    preprocess: float = 0.0
    storage: float = 0.0
    load: float = 0.0
    gap: float = 0.0  # between two submissions
    running: int = 1 << 30  # most jobs at once
    metric_slots: int = 0  # jobs with a metric at once, their GPU held; 0: metrics run elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One job: its end in seconds from the start, and the seconds that its GPU was held and inferred."""

    end: float
    held: float
    busy: float


def run_tasks(
    tasks: Sequence[Task], truth: Truth, costs: Costs, *, gpus: int, gpus_per_node: int
) -> list[Ended]:
    """Run tasks in order on GPUs as these become free; loads on one node share its NIC equally."""
    floor = _Floor(tasks, truth, costs, gpus_per_node)
    waiting, idle = deque(range(len(tasks))), list(range(gpus))
    may_submit = now = 0.0
    while True:
        while waiting and idle and gpus - len(idle) < costs.running:
            may_submit = max(may_submit, now)
            floor.begin(waiting.popleft(), heappop(idle), may_submit)
            may_submit += costs.gap
        if not floor.events:
            return [floor.ended[job] for job in sorted(floor.ended)]
        now, _, happens, subject = heappop(floor.events)
        freed = happens(now, subject)
        if freed is not None:
            heappush(idle, freed)


def metrics_after(ended: Sequence[Ended], truth: Truth, cpu_slots: int) -> float:
    """Seconds until the last score if every set's metric is one CPU job after all inference."""
    last = max((job.end for job in ended), default=0.0)
    jobs: list[MetricJob] = [(last, seconds, index) for index, seconds in enumerate(truth.metric_seconds)]
    return max(last, metrics_end(jobs, [1] * len(truth.sets), cpu_slots))


@dataclass(slots=True)
class _Nic:
    """A node's link to storage, shared equally by the jobs that read at a moment."""

    readers: dict[int, float] = field(
        default_factory=dict
    )  # job -> seconds that it still needs as sole reader
    at: float = 0.0
    turn: int = 0  # events of earlier turns are out of date


class _Floor:
    """What happens to jobs on their GPUs; each event's method returns the GPU that became free, if any."""

    def __init__(self, tasks: Sequence[Task], truth: Truth, costs: Costs, gpus_per_node: int) -> None:
        self.tasks, self.truth, self.costs, self.gpus_per_node = tasks, truth, costs, gpus_per_node
        self.nics: dict[int, _Nic] = {}
        self.events: list[tuple[float, int, Callable[[float, Any], int | None], Any]] = []
        self.count = 0  # of events, so that those of one moment happen in the order in which they were found
        self.gpu_of: dict[int, int] = {}
        self.began: dict[int, float] = {}
        self.ended: dict[int, Ended] = {}
        self.slots = costs.metric_slots
        self.metrics: deque[int] = deque()  # jobs that wait for a CPU slot, their GPU held

    def _later(self, time: float, happens: Callable[[float, Any], int | None], subject: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, happens, subject))

    def begin(self, job: int, gpu: int, now: float) -> None:
        self.gpu_of[job], self.began[job] = gpu, now
        self._later(now + self.costs.preprocess, self._reads, job)

    def _reads(self, now: float, job: int) -> None:
        node = self.gpu_of[job] // self.gpus_per_node
        self._share(now, node, {job: self.costs.storage})

    def _read(self, now: float, subject: tuple[int, int]) -> None:
        node, turn = subject
        if turn == self.nics[node].turn:
            self._share(now, node, {})

    def _share(self, now: float, node: int, new: dict[int, float]) -> None:
        """Advance a node's link to now: who has read all infers, and the next end depends on who reads."""
        nic = self.nics.setdefault(node, _Nic())
        each = (now - nic.at) / max(1, len(nic.readers))
        left = {job: seconds - each for job, seconds in nic.readers.items()} | new
        nic.readers = {job: seconds for job, seconds in left.items() if seconds > 1e-9}
        nic.at, nic.turn = now, nic.turn + 1
        for job in (job for job in left if job not in nic.readers):
            self._infer(job, now + self.costs.load)
        if nic.readers:
            self._later(now + min(nic.readers.values()) * len(nic.readers), self._read, (node, nic.turn))

    def _infer(self, job: int, now: float) -> None:
        pieces = ((self.truth.index[name], start, end) for name, start, end in self.tasks[job])
        busy = sum(self.truth.gpu(*piece) for piece in pieces)
        end = now + busy
        self.ended[job] = Ended(end=end, held=end - self.began[job], busy=busy)
        self._later(end, self._inferred if self.costs.metric_slots else self._ends, job)

    def _inferred(self, now: float, job: int) -> None:
        self.metrics.append(job)
        self._score(now)

    def _ends(self, now: float, job: int) -> int:
        if self.costs.metric_slots:
            self.slots += 1
            self._score(now)
        return self.gpu_of[job]

    def _score(self, now: float) -> None:
        """Start metrics of waiting jobs on free slots."""
        while self.metrics and self.slots:
            job = self.metrics.popleft()
            self.slots -= 1
            pieces = ((self.truth.index[name], start, end) for name, start, end in self.tasks[job])
            end = now + sum(self.truth.metric_share(*piece) for piece in pieces)
            self.ended[job] = replace(self.ended[job], end=end, held=end - self.began[job])
            self._later(end, self._ends, job)
