"""Learns from observations the speed of each hardware and engine, and each task's deviation. Pure.

    seconds = (batches · a + p · prefill / R_p + d · expected generated / R_d) · exp(task's residual)

p and d belong to a hardware, an engine and a mode and are shrunk to 1. Residuals belong to a task and a mode, are
shrunk to 0 (σ₀ = 0.4) and follow the newest runs (EWMA). The order of observations counts only
through their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from priors.hardware import cold_rates
from priors.table import MEASURABLE, Observation

SIGMA_TASK = 0.4
"""σ₀: spread of log seconds between tasks without observations (41 published runs: 0.40)."""
SIGMA_RUN = 0.1
"""Spread of one task's log seconds from checkpoint to checkpoint."""
SIGMA_MOVED = 0.25
"""Spread of a task's residual from runs on other hardware or another engine only."""
SIGMA_RATE = 0.7
"""Spread of log p and log d without observations of a hardware and engine."""
MEMORY = 0.1
"""Weight of the newest run among many; among few all runs weigh the same."""
MOST_OBSERVATIONS = 1000
"""Newest observations of a hardware and engine that its rates are fitted to."""


def expected_generated(cap: float, requests: float) -> float:
    """Expected generated tokens under a summed cap: 0.35 of it and 4 per request (shipped portfolio)."""
    return min(cap, 0.35 * cap + 4 * requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Log factors on cold seconds of prefill and generation, fitted to `observations` runs."""

    prefill: float = 0.0
    generated: float = 0.0
    observations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A task's log(real / predicted), shrunk; `sigma`: spread of the next run around it."""

    mean: float
    sigma: float
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Cold seconds of a run by cause."""

    fixed: float
    prefill: float
    generated: float

    def at(self, speed: Speed) -> float:
        return self.fixed + self.prefill * exp(speed.prefill) + self.generated * exp(speed.generated)


def parts_of(one: Observation) -> Parts:
    """The prediction for an observation without any learning."""
    rates = cold_rates(
        model_parameters=one.model_parameters,
        hardware=one.hardware,
        engine=one.engine,
        batch_size=one.batch_size,
    )
    return Parts(
        fixed=rates.batch_seconds * max(1.0, one.documents / one.batch_size),
        prefill=one.prefill_tokens / rates.prefill_per_second,
        generated=expected_generated(one.generated_tokens, one.documents) / rates.generated_per_second,
    )


Place = tuple[str, str, str]  # `Observation.place`


def fit_speed(history: Sequence[Observation], place: Place) -> Speed:
    """Speed of a hardware, engine and mode: Gauss-Newton on log seconds, every task weighing the same."""
    own = [one for one in history if one.place == place][-MOST_OBSERVATIONS:]
    if not own:
        return Speed()
    counts: dict[str, int] = defaultdict(int)
    for one in own:
        counts[one.task] += 1
    rows = [
        (parts_of(one), log(one.inference_seconds), 1 / counts[one.task] / (SIGMA_TASK**2 + SIGMA_RUN**2))
        for one in own
    ]
    prefill = generated = 0.0
    for _ in range(12):
        a11 = a22 = 1 / SIGMA_RATE**2
        a12 = 0.0
        b1, b2 = -prefill / SIGMA_RATE**2, -generated / SIGMA_RATE**2
        for parts, real, weight in rows:
            p, g = parts.prefill * exp(prefill), parts.generated * exp(generated)
            whole = parts.fixed + p + g
            x1, x2, miss = p / whole, g / whole, real - log(whole)
            a11 += weight * x1 * x1
            a12 += weight * x1 * x2
            a22 += weight * x2 * x2
            b1 += weight * x1 * miss
            b2 += weight * x2 * miss
        determinant = a11 * a22 - a12 * a12
        step, other = (b1 * a22 - b2 * a12) / determinant, (b2 * a11 - b1 * a12) / determinant
        prefill, generated = prefill + step, generated + other
        if abs(step) + abs(other) < 1e-9:
            break
    return Speed(prefill=prefill, generated=generated, observations=len(own))


def residual(logs: Sequence[float], *, sigma_before: float, sigma_run: float) -> Residual:
    """The shrunk EWMA of logs (oldest first) and the spread of the next one around it.

    The mean of n runs with equal weights while n is small, so that three runs count as three.
    """
    mean = share = 0.0
    for number, value in enumerate(logs, start=1):
        weight = max(1 / number, MEMORY)
        mean += weight * (value - mean)
        share = share * (1 - weight) ** 2 + weight**2  # variance of the mean / variance of one run
    if not logs:
        return Residual(mean=0.0, sigma=sqrt(sigma_before**2 + sigma_run**2), observations=0)
    noise = sigma_run**2 * share
    kept = sigma_before**2 / (sigma_before**2 + noise)
    return Residual(mean=kept * mean, sigma=sqrt(kept * noise + sigma_run**2), observations=len(logs))


class Learnt:
    """A history prepared for many predictions: sorted, grouped by task, each speed fitted once."""

    def __init__(self, history: Iterable[Observation]) -> None:
        self.all = sorted(history, key=lambda one: one.at)
        self.timed = [one for one in self.all if one.inference_seconds >= MEASURABLE]
        self.by_task: dict[str, list[Observation]] = defaultdict(list)
        for one in self.all:
            self.by_task[one.task].append(one)
        self._speeds: dict[Place, Speed] = {}

    def speed(self, place: Place) -> Speed:
        if place not in self._speeds:
            self._speeds[place] = fit_speed(self.timed, place)
        return self._speeds[place]

    def residual(self, task: str, place: Place) -> Residual:
        """A task's deviation: by runs in this place, else by runs in this mode elsewhere, else 0."""
        runs = (one for one in self.by_task.get(task, ()) if one.mode == place[-1])
        own = [one for one in runs if one.inference_seconds >= MEASURABLE]
        here = [one for one in own if one.place == place]
        logs = [log(one.inference_seconds / parts_of(one).at(self.speed(one.place))) for one in here or own]
        run = SIGMA_RUN if here or not own else SIGMA_MOVED
        return residual(logs, sigma_before=SIGMA_TASK, sigma_run=run)
