"""Baseline policies: how each partitions the work, and its run on GPUs that load from shared storage.

Rule: partitioners follow their sources to the document, with the sources' errors. Where a source
leaves a choice open, the one that is faster for the baseline is taken. Sources: OpenCompass
`partitioners/size.py`, `partitioners/num_worker.py`, `runners/slurm_sequential.py`. The policy of
Hu et al., NSDI 2024, is planned by `planning.round_robin`, for real runs too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from heapq import heappop, heappush
from math import ceil
from typing import Any, NamedTuple

from coordinator.planning.cpu_stage import MetricJob, metrics_end
from coordinator.planning.instance import Instance
from priors.sizes import known
from simulation.sampled_times import Truth

MAX_TASK_SIZE, GEN_TASK_COEF, MIN_TASK_DOCS = 40_000, 20, 16
MAX_RUNNING, SUBMIT_SECONDS = 32, 0.5
COSTLY = ("bbh*", "gsm8k*", "math*", "strategyqa*", "agieval-jec*", "agieval-gaokao-mathcloze")
COSTLY += ("agieval-math", "*professional_law")


class Source(NamedTuple):
    """A data set as a partitioner sees it; `labels` is 0 for generation."""

    name: str
    docs: int
    labels: int = 0

    @property
    def cost(self) -> int:
        """OpenCompass's cost per document: its labels, or 20 for generation; costly names count tenfold."""
        factor = self.labels or GEN_TASK_COEF
        return factor * 10 if any(fnmatch(self.name, pattern) for pattern in COSTLY) else factor

    def slices(self, step: int) -> list[Piece]:
        return [Piece(self.name, at, min(at + step, self.docs)) for at in range(0, self.docs, step)]


class Piece(NamedTuple):
    """Documents `start_doc` … `end_doc - 1` of a data set."""

    dataset: str
    start_doc: int
    end_doc: int


Task = tuple[Piece, ...]
"""What one job runs, in order, after one load."""


def sources_of(instance: Instance) -> list[Source]:
    """Labels scored per document: as given, else of the shipped table, else 0 (generation)."""

    def labels(name: str, given: int | None) -> int:
        row = known(name)
        return given if given is not None else row.labels if row else 0

    return [Source(one.name, one.docs, labels(one.name, one.labels)) for one in instance.datasets]


def per_dataset(sources: Sequence[Source]) -> list[Task]:
    """One job per data set, in the given order."""
    return [(Piece(source.name, 0, source.docs),) for source in sources]


def opencompass_size(sources: Sequence[Source]) -> list[Task]:
    """SizePartitioner (`heuristic`): next-fit decreasing of sets and slices into tasks of 40,000."""
    chunks: list[tuple[int, Piece]] = []
    for source in sorted(sources, key=lambda one: one.docs * one.cost, reverse=True):
        size = source.docs * source.cost
        step = source.docs
        if size > MAX_TASK_SIZE:
            step = ceil(source.docs / ceil(source.docs / (MAX_TASK_SIZE // source.cost)))
        chunks += [(min(size, MAX_TASK_SIZE), piece) for piece in source.slices(step)]
    chunks.sort(key=lambda chunk: chunk[0], reverse=True)
    tasks: list[Task] = []
    left = 0
    for cost, piece in chunks:
        if not tasks or cost > left:
            tasks.append(())
            left = MAX_TASK_SIZE
        tasks[-1] += (piece,)
        left -= cost
    return tasks


def opencompass_num_worker(sources: Sequence[Source], workers: int) -> list[Task]:
    """NumWorkerPartitioner (`heuristic`): every set in `workers` pieces, dealt round-robin."""
    pieces: list[Piece] = []
    for source in sources:
        whole = source.docs <= MIN_TASK_DOCS
        pieces += source.slices(source.docs if whole else max(ceil(source.docs / workers), MIN_TASK_DOCS))
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
