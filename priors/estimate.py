"""Predicts seconds, with a spread, of every batch, of a metric and of a model load. Pure.

    seconds = (batches · a + prefill / R_p + expected generated / R_d) · median ratio of the last five runs

Rule: predictions are medians; the spread is of log seconds. The ratio, real over formula, is of a task's runs on this
hardware and engine in this mode; of a task without a run there, the median over the tasks that have one; without any
run, 1. The order of observations counts only through their time. Called by `make_plan` and `from_suite`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, sqrt
from statistics import median

from priors.hardware import Rates, cold_rates, nominal_rates
from priors.sizes import known_size
from priors.table import MIN_SECONDS, RATIO_RUNS, Observation, Place

SIGMA_TASK = 0.4
"""Standard deviation of log seconds between tasks without a run (41 published runs: 0.40)."""
SIGMA_RUN = 0.1
"""Standard deviation of one task's log seconds from checkpoint to checkpoint."""
SIGMA_HARDWARE = 0.5
"""Additional standard deviation for hardware without nominal figures and without a run."""
SIGMA_METRIC = 0.7
"""Standard deviation of log metric seconds between tasks: most shipped figures are estimates."""
SIGMA_METRIC_RUN = 0.2
SCORE_SECONDS = 0.0005
"""Default seconds of a document's metric: exact match, likelihoods, BLEU (0.5 ms measured)."""
EXECUTE_SECONDS = 0.25
"""Default seconds of a document's program: MBPP 0.24 s, HumanEval 0.26 s, timeouts included."""
JOB_SECONDS = 1.0
"""Seconds to start a metric job."""
JUDGES_AT_ONCE = 1
"""Concurrent judge jobs, limited by the endpoint rather than the CPU slots (shipped portfolio)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Inputs of a prediction. `hardware`: a GPU type as Slurm names it, or `cpu`."""

    task: str
    model_parameters: int
    hardware: str
    engine: str
    batch_size: int
    mode: str = "exact"

    @property
    def place(self) -> Place:
        """As in `Observation`."""
        return self.hardware, self.engine, self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Real seconds relative to the formula's: median of the newest runs. `sigma`: standard deviation of the next log."""

    factor: float
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Median seconds and the standard deviation of their log. `at_once`: maximum concurrent jobs of a metric; None: unknown."""

    seconds: float
    sigma: float
    at_once: int | None = None

    @property
    def late(self) -> float:
        """Seconds that one run in twenty exceeds."""
        return self.seconds * exp(1.645 * self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrediction:
    """Median GPU seconds of every batch; `sigma`: standard deviation of the log of their sum."""

    seconds: tuple[float, ...]
    sigma: float


class PriorHistory:
    """A history prepared for many predictions: sorted, grouped by task and by place."""

    def __init__(self, history: Iterable[Observation]) -> None:
        self.all = sorted(history, key=lambda one: one.at)
        self.by_task: dict[str, list[Observation]] = defaultdict(list)
        self.runs: dict[tuple[str, Place], list[Observation]] = defaultdict(list)
        for one in self.all:
            self.by_task[one.task].append(one)
            if one.inference_seconds >= MIN_SECONDS:
                self.runs[one.task, one.place].append(one)
        factors: dict[Place, list[float]] = defaultdict(list)
        for task, place in self.runs:
            factors[place].append(self.ratio(task, place).factor)
        self.places = {place: median(each) for place, each in factors.items()}

    def ratio(self, task: str, place: Place) -> Ratio:
        """Return the ratio of a task's inference in a place."""
        if own := self.runs.get((task, place)):
            return _ratio([one.inference_seconds / _formula(one) for one in own], SIGMA_TASK, SIGMA_RUN)
        return Ratio(factor=self.places.get(place, 1.0), sigma=hypot(SIGMA_TASK, SIGMA_RUN))


def predict_batches(
    features: Features,
    prefill_tokens: Sequence[int],
    generated_tokens: Sequence[int],
    learnt: PriorHistory,
) -> BatchPrediction:
    """Predict the seconds of every batch from its prefill tokens and its summed cap of generated tokens.

    Raise ValueError if the two sequences differ in length.
    """
    rates, own = rates_of(features), learnt.ratio(features.task, features.place)
    seconds = tuple(
        own.factor * _seconds(rates, 1, prefill, cap, features.batch_size)
        for prefill, cap in zip(prefill_tokens, generated_tokens, strict=True)
    )
    hardware = features.hardware
    seen = (
        hardware == "cpu" or nominal_rates(hardware) is not None or hardware in {h for h, *_ in learnt.places}
    )
    return BatchPrediction(seconds=seconds, sigma=own.sigma if seen else hypot(own.sigma, SIGMA_HARDWARE))


def predict_metric(
    task: str, documents: int, executes: bool, learnt: PriorHistory, *, together: int = 1
) -> Prediction:
    """Predict the CPU seconds of a task's metric; `executes`: it runs programs or sends requests to a judge.

    `together`: tasks that one job scores, such as a group's, which share its start.
    """
    row = known_size(task)
    each = EXECUTE_SECONDS if executes else SCORE_SECONDS
    if row is not None and row.documents and executes == (row.kind in {"code", "judge"}):
        each = row.metric_seconds / row.documents
    own = _ratio(
        [
            one.metric_seconds / (JOB_SECONDS / one.together + one.documents * each)
            for one in learnt.by_task.get(task, ())
            if one.metric_seconds >= MIN_SECONDS and one.documents
        ],
        SIGMA_METRIC,
        SIGMA_METRIC_RUN,
    )
    return Prediction(
        seconds=own.factor * (JOB_SECONDS / together + documents * each) if documents else 0.0,
        sigma=own.sigma,
        at_once=JUDGES_AT_ONCE if executes and row is not None and row.kind == "judge" else None,
    )


def predict_load(model_bytes: int, hardware: str, learnt: PriorHistory) -> Prediction:
    """Predict the seconds from a trial's start to its first batch: interpreter, imports, weights from node memory."""

    def cold(size: int) -> float:
        # 14 GB to a GPU in 10 s, with start-up (shipped portfolio); tmpfs gives 4.8 GB/s
        return 7.0 + size / (2e9 if hardware == "cpu" else 4.8e9)

    seen = [
        one.load_seconds / cold(2 * one.model_parameters)
        for one in learnt.all
        if one.hardware == hardware and one.load_seconds and one.load_seconds >= MIN_SECONDS
    ]
    own = _ratio(seen, SIGMA_METRIC, SIGMA_METRIC_RUN)
    return Prediction(seconds=own.factor * cold(model_bytes), sigma=own.sigma)


def rates_of(one: Features | Observation) -> Rates:
    """Return tokens per second without a run."""
    return cold_rates(
        model_parameters=one.model_parameters,
        hardware=one.hardware,
        engine=one.engine,
        batch_size=one.batch_size,
    )


def _ratio(seen: Sequence[float], between: float, within: float) -> Ratio:
    """Combine `seen` ratios, oldest first. `between` tasks and `within` one task's runs: standard deviations of the log."""
    newest = seen[-RATIO_RUNS:]
    if not newest:
        return Ratio(factor=1.0, sigma=hypot(between, within))
    return Ratio(factor=median(newest), sigma=within * sqrt(1 + 1 / len(newest)))


def _formula(one: Observation) -> float:
    batches = one.batches or max(1.0, one.documents / one.batch_size)
    requests = (one.batches or 0) * one.batch_size or one.documents  # as in predictions, if batches are known
    return _seconds(rates_of(one), batches, one.prefill_tokens, one.generated_tokens, requests)


def _seconds(rates: Rates, batches: float, prefill: int, cap: int, requests: float) -> float:
    """Return seconds of requests under a summed cap, of which 0.35 and 4 per request are generated (shipped portfolio)."""
    generated = min(cap, 0.35 * cap + 4 * requests)
    return (
        batches * rates.batch_seconds
        + prefill / rates.prefill_per_second
        + generated / rates.generated_per_second
    )
