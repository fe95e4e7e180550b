"""lm-eval's bootstrap of a standard error, on all cores of the job, with repeated values computed once.

Rule: the values equal lm-eval's to the last digit: the same chunks of draws from the same seeds (lm_eval.api.metrics,
`_bootstrap_internal`), the same statistic, in the same order. A metric of a confusion matrix only depends on how often each
(gold, predicted) pair was drawn, so it is computed once per such count. Called from `score`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from evaljobs.trial.engines.tied import die_with_parent

CHUNK = 1000  # draws per seed
BY_COUNTS = frozenset({"matthews_corrcoef", "f1_score"})  # metrics of a confusion matrix

Statistic = Callable[[Sequence[Any]], float]


def replicates(statistic: Statistic, values: Sequence[Any], draws: int, cores: int) -> list[float]:
    """Return the statistic of `draws` resamples (in whole chunks), chunk by chunk."""
    size = min(CHUNK, draws)
    chunks = range(draws // size)
    resampled = _resampled(statistic, values, size)
    if cores < 2 or len(chunks) < 2:
        return [value for chunk in chunks for value in resampled(chunk)]
    context = multiprocessing.get_context("fork")
    processes = min(cores, len(chunks))
    with context.Pool(processes, initializer=_start, initargs=(resampled, os.getpid())) as pool:
        return [value for part in pool.imap(_chunk, chunks) for value in part]


def _resampled(statistic: Statistic, values: Sequence[Any], size: int) -> Callable[[int], list[float]]:
    """Return a function that computes a chunk's resamples from its number, which is the seed."""
    if getattr(statistic, "__name__", "") in BY_COUNTS and all(isinstance(v, Hashable) for v in values):
        kinds = list(dict.fromkeys(values))
        statistic = _of_counts(statistic, kinds)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        values = [numbers[value] for value in values]

    def resampled(chunk: int) -> list[float]:
        rnd = random.Random(chunk)
        return [statistic(rnd.choices(values, k=len(values))) for _ in range(size)]

    return resampled


def _of_counts(statistic: Statistic, kinds: Sequence[Any]) -> Statistic:
    """Return the statistic of drawn positions in `kinds`, computed once per count of each."""
    known: dict[tuple[int, ...], float] = {}

    def of_counts(drawn: Sequence[int]) -> float:
        counts = tuple(map(drawn.count, range(len(kinds))))
        if counts not in known:
            pairs = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
            known[counts] = statistic(pairs)
        return known[counts]

    return of_counts


_inherited: Callable[[int], list[float]] | None = None  # set in each process of the pool


def _start(resampled: Callable[[int], list[float]], parent: int) -> None:
    global _inherited  # noqa: PLW0603 (inherited by the fork: values are not sent chunk by chunk)
    die_with_parent(signal.SIGKILL, parent)
    _inherited = resampled


def _chunk(number: int) -> list[float]:
    assert _inherited is not None
    return _inherited(number)


@contextlib.contextmanager
def in_lm_eval() -> Iterator[None]:
    """Replace lm-eval's bootstrap by this one within the context."""
    from lm_eval.api import metrics  # noqa: PLC0415

    def bootstrap_stderr(f: Statistic, xs: Sequence[Any], iters: int) -> float:
        return float(metrics.sample_stddev(replicates(f, xs, iters, len(os.sched_getaffinity(0)))))

    before = metrics.bootstrap_stderr
    metrics.bootstrap_stderr = bootstrap_stderr
    try:
        yield
    finally:
        metrics.bootstrap_stderr = before
