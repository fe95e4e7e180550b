"""Predicts seconds, with a spread, of every batch, of a metric and of a model load. Pure.

Rule: predictions are medians; the spread is of log seconds, so the 95th percentile is
median · exp(1.645 sigma). Called by `make_plan` and `from_suite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from priors.fit import Learnt, Residual, expected_generated, residual
from priors.hardware import Rates, cold_rates, nominal
from priors.sizes import known
from priors.table import MEASURABLE

__all__ = [
    "BatchPrediction",
    "Features",
    "Learnt",
    "MetricPrediction",
    "Rates",
    "load_percentile_95",
    "percentile_95",
    "predict_batches",
    "predict_load",
    "predict_metric",
    "rates",
]

SIGMA_HARDWARE = 0.5
"""Added spread of hardware without nominal figures and without observations."""
SIGMA_METRIC = 0.7
"""Spread of log metric seconds between tasks: most shipped figures are estimates."""
SIGMA_METRIC_RUN = 0.2
SCORE_SECONDS = 0.0005
"""Seconds of a document's metric without a figure: exact match, likelihoods, BLEU (0.5 ms measured)."""
EXECUTE_SECONDS = 0.25
"""Seconds of a document's program without a figure: MBPP 0.24 s, HumanEval 0.26 s, time-outs included."""
JOB_SECONDS = 1.0
"""Seconds that a metric job takes to start."""
JUDGES_AT_ONCE = 1
"""Judge jobs at once: the endpoint limits them, not the CPU slots (shipped portfolio)."""


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
    def place(self) -> tuple[str, str, str]:
        """As of `Observation`."""
        return self.hardware, self.engine, self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrediction:
    """Median GPU seconds of every batch; `sigma`: spread of the log of their sum."""

    seconds: tuple[float, ...]
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPrediction:
    """Median CPU seconds of a task's whole metric. `at_once`: its most jobs at once; None: unknown."""

    seconds: float
    sigma: float
    at_once: int | None = None


def percentile_95(median: float, sigma: float) -> float:
    """Seconds that one run in twenty exceeds."""
    return median * exp(1.645 * sigma)


def rates(features: Features, learnt: Learnt) -> Rates:
    """Learnt tokens per second of a model on this hardware and engine, without task residuals."""
    cold = cold_rates(
        model_parameters=features.model_parameters,
        hardware=features.hardware,
        engine=features.engine,
        batch_size=features.batch_size,
    )
    speed = learnt.speed(features.place)
    return Rates(
        prefill_per_second=cold.prefill_per_second / exp(speed.prefill),
        generated_per_second=cold.generated_per_second / exp(speed.generated),
        batch_seconds=cold.batch_seconds,
    )


def predict_batches(
    features: Features,
    prefill_tokens: Sequence[int],
    generated_tokens: Sequence[int],
    learnt: Learnt,
) -> BatchPrediction:
    """Seconds of every batch from its prefill tokens and its summed cap of generated tokens.

    ValueError: the two sequences differ in length.
    """
    if len(prefill_tokens) != len(generated_tokens):
        raise ValueError("every batch needs its prefill and its generated tokens")
    at = rates(features, learnt)
    own = learnt.residual(features.task, features.place)
    factor = exp(own.mean)
    seconds = tuple(
        factor
        * (
            at.batch_seconds
            + prefill / at.prefill_per_second
            + expected_generated(cap, features.batch_size) / at.generated_per_second
        )
        for prefill, cap in zip(prefill_tokens, generated_tokens, strict=True)
    )
    known_hardware = features.hardware == "cpu" or nominal(features.hardware) is not None
    seen = known_hardware or any(one.hardware == features.hardware for one in learnt.timed)
    sigma = own.sigma if seen else sqrt(own.sigma**2 + SIGMA_HARDWARE**2)
    return BatchPrediction(seconds=seconds, sigma=sigma)


def predict_metric(
    task: str, documents: int, executes: bool, learnt: Learnt, *, together: int = 1
) -> MetricPrediction:
    """CPU seconds of a task's metric; `executes`: it runs programs or sends requests to a judge.

    `together`: tasks that one job scores, such as a group's: they share its start.
    """
    logs = [
        log(one.metric_seconds / _cold_metric(task, one.documents, executes))
        for one in learnt.by_task.get(task, ())
        if one.metric_seconds >= MEASURABLE and one.documents > 0
    ]
    own = residual(logs, sigma_before=SIGMA_METRIC, sigma_run=SIGMA_METRIC_RUN)
    row = known(task)
    return MetricPrediction(
        seconds=_cold_metric(task, documents, executes, together) * exp(own.mean) if documents else 0.0,
        sigma=own.sigma,
        at_once=JUDGES_AT_ONCE if executes and row is not None and row.kind == "judge" else None,
    )


def predict_load(model_bytes: int, hardware: str, learnt: Learnt) -> float:
    """Seconds from a trial's start to its first batch: interpreter, imports, weights from node memory."""
    own = _load_residual(hardware, learnt)
    return _cold_load(model_bytes, hardware) * exp(own.mean)


def load_percentile_95(model_bytes: int, hardware: str, learnt: Learnt) -> float:
    """Seconds that one load in twenty exceeds."""
    own = _load_residual(hardware, learnt)
    return percentile_95(_cold_load(model_bytes, hardware) * exp(own.mean), own.sigma)


def _load_residual(hardware: str, learnt: Learnt) -> Residual:
    logs = [
        log(one.load_seconds / _cold_load(2 * one.model_parameters, hardware))
        for one in learnt.all
        if one.hardware == hardware and one.load_seconds and one.load_seconds >= MEASURABLE
    ]
    return residual(logs, sigma_before=SIGMA_METRIC, sigma_run=SIGMA_METRIC_RUN)


def _cold_metric(task: str, documents: int, executes: bool, together: int = 1) -> float:
    row = known(task)
    if row is not None and row.documents and executes == (row.kind in {"code", "judge"}):
        return JOB_SECONDS / together + documents * row.metric_seconds / row.documents
    return JOB_SECONDS / together + documents * (EXECUTE_SECONDS if executes else SCORE_SECONDS)


def _cold_load(model_bytes: int, hardware: str) -> float:
    """14 GB to a GPU in 10 s, with start-up (shipped portfolio); tmpfs gives 4.8 GB/s."""
    return 7.0 + max(0, model_bytes) / (2e9 if hardware == "cpu" else 4.8e9)
