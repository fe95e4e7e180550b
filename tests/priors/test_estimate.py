"""Predictions: cold from nominal figures, warm from what was observed."""

from dataclasses import replace
from math import isfinite
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.written import observation

from priors.estimate import (
    Features,
    Prediction,
    PriorHistory,
    predict_batches,
    predict_load,
    predict_metric,
    rates_of,
)
from priors.hardware import nominal_rates
from priors.sizes import known_size, size_table

COLD = PriorHistory([])
SEVEN = Features(
    task="task0", model_parameters=7_000_000_000, hardware="nvidia_a100-sxm4-80gb", engine="hf", batch_size=8
)
CORE = replace(SEVEN, model_parameters=135_000_000, hardware="cpu", batch_size=4)
UNKNOWN = replace(SEVEN, hardware="frob")
HUMANEVAL = [8] * 20 + [4]  # 164 prompts of 149 tokens under a cap of 512


def seconds_of(history, prefill=(100_000,), caps=None, features=SEVEN):
    return sum(predict_batches(features, prefill, caps or [0] * len(prefill), PriorHistory(history)).seconds)


def spread_of(history, features=SEVEN):
    return predict_batches(features, [1000], [0], PriorHistory(history)).sigma


def run_of(seconds, at=0, number=0, **more):
    return observation(
        number, **{"hardware": SEVEN.hardware, "inference_seconds": seconds, "at": float(at), **more}
    )


SLOW_LOADS = PriorHistory([observation(n, load_seconds=40.0) for n in range(3)])
SLOW_SITE = [run_of(2 * 100_000 / 8914, n, n) for n in range(1, 21)]
FIGURES = {
    "a 7B model on an A100 reads": (rates_of(SEVEN).prefill_per_second, pytest.approx(9000, rel=0.05)),
    "and writes": (rates_of(SEVEN).generated_per_second, pytest.approx(270, rel=0.05)),
    "HumanEval there": (seconds_of([], [n * 149 for n in HUMANEVAL], [n * 512 for n in HUMANEVAL]), pytest.approx(114, rel=0.1)),
    "a 135M model on a core reads": (rates_of(CORE).prefill_per_second, pytest.approx(275, rel=0.46)),
    "and writes on it": (rates_of(CORE).generated_per_second, pytest.approx(13.5, rel=0.19)),
    "HumanEval's programs": (predict_metric("humaneval", 164, True, COLD).seconds, pytest.approx(43, rel=0.05)),
    "an unknown task's programs": (predict_metric("unheard-of", 1000, True, COLD).seconds, pytest.approx(251)),
    "its score": (predict_metric("unheard-of", 1000, False, COLD).seconds, pytest.approx(1.5)),
    "a score of nothing": (predict_metric("task0", 0, False, COLD).seconds, 0.0),
    "a score where runs took 500 s": (
        predict_metric("task0", 1000, False, PriorHistory([observation(documents=1000, metric_seconds=500.0)] * 3)).seconds,
        pytest.approx(500),
    ),
    "judges at once": (predict_metric("alpacaeval", 805, True, COLD).at_once, 1),
    "known programs at once": (predict_metric("humaneval", 164, True, COLD).at_once, None),
    "unknown programs at once": (predict_metric("unheard_of", 100, True, COLD).at_once, None),
    "scores of a judge's task at once": (predict_metric("alpacaeval", 805, False, COLD).at_once, None),
    "14 GB are loaded": (predict_load(14 * 10**9, "a100", COLD).seconds, pytest.approx(10, rel=0.05)),
    "140 GB are": (predict_load(140 * 10**9, "a100", COLD).seconds, pytest.approx(36, rel=0.05)),
    "14 GB where loads took 40 s": (predict_load(14 * 10**9, "a100", SLOW_LOADS).seconds, pytest.approx(40, rel=0.05)),
    "on other hardware than those": (predict_load(14 * 10**9, "h100", SLOW_LOADS).seconds, pytest.approx(10, rel=0.05)),
    "the 95th percentile without a spread": (Prediction(seconds=100.0, sigma=0.0).late, 100.0),
    "with one, in the log": (Prediction(seconds=100.0, sigma=0.4).late, pytest.approx(193, rel=0.01)),
    "a task without a run where all others take twice as long": (
        seconds_of(SLOW_SITE, [8000] * 13), pytest.approx(2 * seconds_of([], [8000] * 13), rel=0.1)
    ),
    "the spread after no run": (spread_of([]), pytest.approx(0.412, abs=0.002)),
    "after one": (spread_of([run_of(30.0)]), pytest.approx(0.141, abs=0.002)),
    "after three": (spread_of([run_of(30.0, at) for at in range(3)]), pytest.approx(0.115, abs=0.002)),
    "the L40S is an L40": (nominal_rates("NVIDIA L40S"), nominal_rates("l40")),
    "an unknown name is nothing": (nominal_rates("frobnicator"), None),
    "a group's leaf is found": (known_size("mmlu_anatomy"), known_size("mmlu")),
    "lm-eval's name is": (known_size("gsm8k").name, "gsm8k_5shot_lmeval"),
    "labels of choices": (known_size("hellaswag").labels, 4),
    "of generation": (known_size("squad2").labels, 0),
    "an unknown task is not": (known_size("nobody_knows"), None),
}  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_cold_figures_are_the_measured_ones(figure):
    """Measured or stated figures within a few percent, and what one run, three runs or a slow site make of them."""
    found, wanted = FIGURES[figure]
    assert found == wanted


def test_other_hardware_and_more_work_are_told_apart():
    """The longest known part of a name counts; unknown hardware is unsure until it was seen; more tokens take longer."""
    assert nominal_rates("nvidia_h200") != nominal_rates("h20")
    assert nominal_rates("gh200") != nominal_rates("h200")
    assert spread_of([], UNKNOWN) > spread_of([])
    assert spread_of([observation(hardware="frob")], UNKNOWN) < spread_of([], UNKNOWN)
    got = predict_batches(SEVEN, [100, 200, 200], [0, 0, 800], COLD)
    assert got.seconds[0] < got.seconds[1] < got.seconds[2]
    with pytest.raises(ValueError, match="shorter"):
        predict_batches(SEVEN, [1, 2], [3], COLD)


@given(st.integers(1, 10**12), st.sampled_from(["a100", "h100", "l4", "cpu", "something"]))
def test_larger_models_are_slower_on_anything(parameters, hardware):
    """Doubling the parameters never raises a rate."""
    one, two = (
        rates_of(replace(SEVEN, model_parameters=n, hardware=hardware)) for n in (parameters, 2 * parameters)
    )
    assert two.prefill_per_second < one.prefill_per_second
    assert two.generated_per_second < one.generated_per_second


ELSEWHERE = [{"task": "task1"}, {"engine": "vllm"}, {"mode": "fast"}, {"hardware": "h100"}]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_prediction_is_the_median_of_the_last_five_runs(seconds, dice):
    """Of equal requests the median of the newest by their time, not their line; runs of another task, engine, mode or on
    other hardware leave it as it is."""
    history = [run_of(each, at) for at, each in enumerate(seconds)]
    history += [run_of(300.0, len(seconds), **other) for other in ELSEWHERE]
    dice.shuffle(history)
    assert seconds_of(history) == pytest.approx(seconds_of([run_of(1.0)]) * median(seconds[-5:]))


def test_the_shipped_table_is_whole_and_tasks_are_found_in_it():
    """113 rows; each is found by its own name and by lm-eval's."""
    rows = {row.name: row for row in size_table().values()}
    names = [name for row in rows.values() for name in (row.name, *row.tasks.split())]
    assert len(rows) == 113
    assert len(names) == len(set(names)) == len(size_table())


count = st.one_of(st.just(0), st.integers(0, 10**18))
some_seconds = st.one_of(st.just(0.0), st.floats(0, 1e9), st.floats(0, 1e-5))
accepted = st.fixed_dictionaries(
    {
        "number": st.integers(0, 2),
        "hardware": st.sampled_from(["a100", "cpu", "something"]),
        "batch_size": st.sampled_from([1, 8, 100_000]),
        "load_seconds": st.none() | some_seconds,
        **dict.fromkeys(("model_parameters", "prefill_tokens", "generated_tokens", "documents"), count),
        **dict.fromkeys(("inference_seconds", "metric_seconds"), some_seconds),
    }
).map(lambda fields: observation(**fields))


@settings(max_examples=150)
@given(st.lists(accepted, max_size=8), st.sampled_from(["a100", "cpu", "something"]))
def test_no_observation_makes_a_prediction_useless(history, hardware):
    """Whatever a table took in, absurd ones included: seconds and spreads are finite and not below 0."""
    learnt = PriorHistory(history)
    got = predict_batches(replace(SEVEN, hardware=hardware), [0, 1000], [0, 512], learnt)
    metric, load = predict_metric("task0", 100, False, learnt), predict_load(14 * 10**9, hardware, learnt)
    values = [*got.seconds, got.sigma, metric.seconds, metric.sigma, load.seconds, load.late]
    assert all(isfinite(value) and value >= 0 for value in values)
