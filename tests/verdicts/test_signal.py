"""Laws of a task's signal and noise, and of how often it is asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.decide.verdicts.signal import MAX_INTERVAL, Signal, asking_cadences, signal_of


def published(models, last):
    """The formula of the paper: (relative dispersion of models' scores, relative standard deviation of last checkpoints)."""
    dispersion = max(abs(a - b) for a in models for b in models)
    return dispersion / np.mean(models), np.std(last) / np.mean(last)


def test_of_several_trainings_it_is_the_published_formula():
    trainings = np.random.default_rng(1).normal(0.5, 0.02, (4, 12))
    found = signal_of(trainings.tolist())
    last = trainings[:, -5:]
    signal, _ = published(last.mean(1), [0.5])
    assert found.signal == pytest.approx(signal)
    assert found.noise == pytest.approx(np.sqrt((last.std(1) ** 2).mean()) / last.mean())


def test_of_one_training_its_stages_are_the_models():
    values = np.linspace(0.3, 0.6, 20) + np.random.default_rng(2).normal(0, 0.01, 20)
    found = signal_of([values.tolist()])
    assert found == pytest.approx(published(values.reshape(4, 5).mean(1), values[-5:]))
    assert found.ratio > 2
    assert not found.says_nothing


def test_noise_alone_says_nothing():
    rng = np.random.default_rng(3)
    found = [signal_of([rng.normal(0.4, 0.02, 20).tolist()]) for _ in range(200)]
    assert np.mean([one.says_nothing for one in found]) > 0.85


@pytest.mark.parametrize("few", [[], [[]], [[0.1] * 5], [[0.1, 0.2, 0.3], [0.1]], [[0.0] * 8]])
def test_too_few_checkpoints_have_no_ratio(few):
    assert signal_of(few) is None


TASKS = st.dictionaries(
    st.text(max_size=3),
    st.tuples(st.none() | st.builds(Signal, st.floats(0, 2), st.floats(0, 0.5)), st.floats(0, 1e5)),
)


@given(TASKS)
def test_no_task_is_asked_more_rarely_than_the_rarest_and_unknown_ones_each_time(tasks):
    found = asking_cadences(tasks)
    assert found.keys() == tasks.keys()
    assert all(1 <= often <= MAX_INTERVAL for often in found.values())
    assert all(found[name] == 1 for name, (signal, _) in tasks.items() if signal is None)


@given(TASKS)
def test_the_share_of_seconds_is_kept_unless_all_are_as_rare_as_they_may_be(tasks):
    found = asking_cadences(tasks)
    spent = sum(seconds / found[name] for name, (_, seconds) in tasks.items())
    total = sum(seconds for _, seconds in tasks.values())
    known = [name for name, (signal, seconds) in tasks.items() if signal is not None and seconds > 0]
    assert spent <= 0.5 * total * (1 + 1e-9) or all(found[name] == MAX_INTERVAL for name in known)


def test_a_task_that_tells_more_for_its_seconds_is_asked_more_often():
    clear, dull = Signal(0.5, 0.01), Signal(0.1, 0.04)
    found = asking_cadences(
        {
            "clear and cheap": (clear, 10.0),
            "clear and dear": (clear, 1000.0),
            "dull and dear": (dull, 1000.0),
            "says nothing": (Signal(0.01, 0.01), 10.0),
        }
    )
    assert found["clear and cheap"] == 1
    assert 1 <= found["clear and dear"] < found["dull and dear"] <= found["says nothing"] == MAX_INTERVAL
