"""Baseline policies: how each partitions the work, and its run on GPUs that load from shared storage.

Rule: partitioners follow their sources to the document, with the sources' errors. Where a source
leaves a choice open, the one that is faster for the baseline is taken. Sources: OpenCompass
`partitioners/size.py`, `partitioners/num_worker.py`, `runners/slurm_sequential.py`. The policy of
Hu et al., NSDI 2024, is planned by `planning.round_robin`, for real runs too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from heapq import heappop, heappush
from math import ceil

from coordinator.planning.cpu_stage import MetricJob, metrics_end
from simulation.sampled_times import Truth

MAX_TASK_SIZE = 40_000
GEN_TASK_COEF = 20
MIN_TASK_DOCS = 16
MAX_RUNNING = 32
SUBMIT_SECONDS = 0.5
COSTLY = (
    "bbh*",
    "gsm8k*",
    "math*",
    "strategyqa*",
    "agieval-jec*",
    "agieval-gaokao-mathcloze",
    "agieval-math",
    "*professional_law",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set as a partitioner sees it; `labels` is 0 for generation."""

    name: str
    docs: int
    labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Documents `start_doc` … `end_doc - 1` of a data set."""

    dataset: str
    start_doc: int
    end_doc: int


Task = tuple[Piece, ...]
"""What one job runs, in order, after one load."""


def per_dataset(sources: Sequence[Source]) -> list[Task]:
    """One job per data set, in the given order."""
    return [(_whole(source),) for source in sources]


def size_factor(source: Source) -> int:
    """OpenCompass's cost per document: its labels, or 20 for generation; costly names count tenfold."""
    factor = source.labels or GEN_TASK_COEF
    return factor * 10 if any(fnmatch(source.name, pattern) for pattern in COSTLY) else factor


def opencompass_size(sources: Sequence[Source]) -> list[Task]:
    """SizePartitioner (`heuristic`): next-fit decreasing of sets and slices into tasks of 40,000."""
    chunks: list[tuple[int, Piece]] = []
    for source in sorted(sources, key=lambda one: one.docs * size_factor(one), reverse=True):
        factor = size_factor(source)
        if source.docs * factor <= MAX_TASK_SIZE:
            chunks.append((source.docs * factor, _whole(source)))
            continue
        step = MAX_TASK_SIZE // factor
        step = ceil(source.docs / ceil(source.docs / step))
        chunks += [(MAX_TASK_SIZE, piece) for piece in _slices(source, step)]
    chunks.sort(key=lambda chunk: chunk[0], reverse=True)
    tasks: list[Task] = []
    size, pieces = 0, []
    for index, (cost, piece) in enumerate(chunks):
        size += cost
        pieces.append(piece)
        if index == len(chunks) - 1 or size + chunks[index + 1][0] > MAX_TASK_SIZE:
            tasks.append(tuple(pieces))
            size, pieces = 0, []
    return tasks


def opencompass_num_worker(sources: Sequence[Source], workers: int) -> list[Task]:
    """NumWorkerPartitioner (`heuristic`): every set in `workers` pieces, dealt round-robin."""
    pieces: list[Piece] = []
    for source in sources:
        if source.docs > MIN_TASK_DOCS:
            pieces += _slices(source, max(ceil(source.docs / workers), MIN_TASK_DOCS))
        else:
            pieces.append(_whole(source))
    buckets: list[list[Piece]] = [[] for _ in range(workers)]
    for index, piece in enumerate(pieces):
        buckets[index % workers].append(piece)
    return [tuple(bucket) for bucket in buckets if bucket]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that each job of a policy pays. `storage`: a read of the weights, alone on the NIC."""

    preprocess: float
    storage: float
    load: float
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
    tasks: Sequence[Task],
    truth: Truth,
    costs: Costs,
    *,
    gpus: int,
    gpus_per_node: int,
) -> list[Ended]:
    """Run tasks in order on GPUs as these become free; loads on one node share its NIC equally."""
    return _Floor(tasks, truth, costs, gpus, gpus_per_node).run()


def metrics_after(ended: Sequence[Ended], truth: Truth, cpu_slots: int) -> float:
    """Seconds until the last score if every set's metric is one CPU job after all inference."""
    last = max((job.end for job in ended), default=0.0)
    jobs: list[MetricJob] = [(last, seconds, index) for index, seconds in enumerate(truth.metric_seconds)]
    return max(last, metrics_end(jobs, [1] * len(truth.sets), cpu_slots))


def _whole(source: Source) -> Piece:
    return Piece(dataset=source.name, start_doc=0, end_doc=source.docs)


def _slices(source: Source, step: int) -> list[Piece]:
    return [
        Piece(dataset=source.name, start_doc=start, end_doc=min(start + step, source.docs))
        for start in range(0, source.docs, step)
    ]


class _Nic:
    """A node's link to storage, shared equally by the jobs that read at a moment."""

    def __init__(self) -> None:
        self.readers: dict[int, float] = {}  # job -> seconds that it still needs as the only reader
        self.at = 0.0
        self.turn = 0  # events of earlier turns are out of date

    def advance(self, now: float) -> None:
        if self.readers:
            each = (now - self.at) / len(self.readers)
            self.readers = {job: left - each for job, left in self.readers.items()}
        self.at = now
        self.turn += 1

    def next_end(self) -> float | None:
        return self.at + min(self.readers.values()) * len(self.readers) if self.readers else None


class _Floor:
    def __init__(
        self, tasks: Sequence[Task], truth: Truth, costs: Costs, gpus: int, gpus_per_node: int
    ) -> None:
        self.tasks, self.truth, self.costs = tasks, truth, costs
        self.gpus, self.gpus_per_node = gpus, gpus_per_node
        self.nics = [_Nic() for _ in range(ceil(gpus / gpus_per_node))]
        self.events: list[tuple[float, int, str, int, int]] = []  # (time, number, what, job or node, turn)
        self.number = 0
        self.gpu_of: dict[int, int] = {}
        self.began: dict[int, float] = {}
        self.ended: dict[int, Ended] = {}
        self.slots = costs.metric_slots
        self.metrics: deque[int] = deque()  # jobs that wait for a CPU slot, their GPU held

    def run(self) -> list[Ended]:
        waiting = list(range(len(self.tasks)))[::-1]
        idle = list(range(self.gpus))
        may_submit = now = 0.0
        while True:
            while waiting and idle and self.gpus - len(idle) < self.costs.running:
                may_submit = max(may_submit, now)
                self._begin(waiting.pop(), heappop(idle), may_submit)
                may_submit += self.costs.gap
            if not self.events:
                return [self.ended[job] for job in sorted(self.ended)]
            now, _, what, subject, turn = heappop(self.events)
            freed = self._happen(now, what, subject, turn)
            if freed is not None:
                heappush(idle, freed)

    def _push(self, time: float, what: str, subject: int, turn: int = 0) -> None:
        self.number += 1
        heappush(self.events, (time, self.number, what, subject, turn))

    def _begin(self, job: int, gpu: int, now: float) -> None:
        self.gpu_of[job], self.began[job] = gpu, now
        self._push(now + self.costs.preprocess, "reads", job)

    def _happen(self, now: float, what: str, subject: int, turn: int) -> int | None:
        """Handle one event; the GPU that became free, if any."""
        if what == "ends":
            if self.costs.metric_slots:
                self.slots += 1
                self._score(now)
            return self.gpu_of[subject]
        if what == "inferred":
            self.metrics.append(subject)
            self._score(now)
            return None
        node = subject if what == "read" else self.gpu_of[subject] // self.gpus_per_node
        nic = self.nics[node]
        if what == "read" and turn != nic.turn:
            return None
        nic.advance(now)
        if what == "reads":
            nic.readers[subject] = self.costs.storage
        for job in [job for job, left in nic.readers.items() if left <= 1e-9]:
            del nic.readers[job]
            self._infer(job, now + self.costs.load)
        end = nic.next_end()
        if end is not None:
            self._push(end, "read", node, nic.turn)
        return None

    def _infer(self, job: int, now: float) -> None:
        index = self.truth.index
        busy = sum(self.truth.gpu(index[p.dataset], p.start_doc, p.end_doc) for p in self.tasks[job])
        end = now + busy
        self.ended[job] = Ended(end=end, held=end - self.began[job], busy=busy)
        self._push(end, "inferred" if self.costs.metric_slots else "ends", job)

    def _score(self, now: float) -> None:
        """Start metrics of waiting jobs on free slots."""
        while self.metrics and self.slots:
            job = self.metrics.popleft()
            self.slots -= 1
            end = now
            for piece in self.tasks[job]:
                index = self.truth.index[piece.dataset]
                end += self.truth.metric_share(index, piece.start_doc, piece.end_doc)
            self.ended[job] = replace(self.ended[job], end=end, held=end - self.began[job])
            self._push(end, "ends", job)
