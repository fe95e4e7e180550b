"""Our bootstrap beside lm-eval's."""

import random

import pytest
from lm_eval.api import metrics

from evaljobs.scoring import bootstrap

RNG = random.Random(3)
PAIRS = [(RNG.randrange(2), RNG.randrange(2)) for _ in range(40)]
NUMBERS = [RNG.uniform(-9, 0) for _ in range(40)]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("statistic", "values"),
    [
        (metrics.matthews_corrcoef, PAIRS),
        (metrics.f1_score, PAIRS),
        (metrics.perplexity, NUMBERS),
        (metrics.median, NUMBERS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_replicate_is_lm_evals(statistic, values, cores, monkeypatch):
    """Equal draw for draw, on one core and on several; so is the standard error."""
    draws = 1000 if values is NUMBERS else 50  # lm-eval takes milliseconds for one of a confusion matrix
    chunk = draws // 5
    monkeypatch.setattr(bootstrap, "CHUNK", chunk)
    ours = bootstrap.replicates(statistic, values, draws, cores)
    theirs = [
        x for number in range(5) for x in metrics._bootstrap_internal(statistic, chunk)((number, values))
    ]
    assert ours == theirs
    monkeypatch.undo()
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    error = metrics.stderr_for_metric(statistic, draws)(values)
    with bootstrap.in_lm_eval():
        assert metrics.stderr_for_metric(statistic, draws)(values) == error
