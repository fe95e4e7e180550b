"""Predictions: cold from nominal figures, warm from what was observed."""

from __future__ import annotations

from math import isfinite
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.written import observation

from priors.estimate import (
    Features,
    Learnt,
    Prediction,
    predict_batches,
    predict_load,
    predict_metric,
    rates_of,
)
from priors.hardware import nominal
from priors.sizes import known, table

SEVEN = Features(
    task="task0", model_parameters=7_000_000_000, hardware="nvidia_a100-sxm4-80gb", engine="hf", batch_size=8
)


def test_cold_figures_are_the_measured_ones():
    """A 7B model on an A100 within 5 %, HumanEval's 114 s there within 10 %, and a 135M model on a core."""
    cold = rates_of(SEVEN)
    assert cold.prefill_per_second == pytest.approx(9000, rel=0.05)
    assert cold.generated_per_second == pytest.approx(270, rel=0.05)
    batches = [8] * 20 + [4]  # 164 prompts of 149 tokens under a cap of 512
    got = predict_batches(SEVEN, [n * 149 for n in batches], [n * 512 for n in batches], Learnt([]))
    assert sum(got.seconds) == pytest.approx(114, rel=0.1)
    core = rates_of(
        Features(task="x", model_parameters=135_000_000, hardware="cpu", engine="hf", batch_size=4)
    )
    assert 150 <= core.prefill_per_second <= 400
    assert 11 <= core.generated_per_second <= 16


@given(st.integers(1, 10**12), st.sampled_from(["a100", "h100", "l4", "cpu", "something"]))
def test_larger_models_are_slower_on_anything(parameters, hardware):
    """Doubling the parameters never raises a rate."""
    one, two = (
        rates_of(Features(task="x", model_parameters=n, hardware=hardware, engine="hf", batch_size=8))
        for n in (parameters, 2 * parameters)
    )
    assert two.prefill_per_second < one.prefill_per_second
    assert two.generated_per_second < one.generated_per_second


def test_hardware_names_are_matched_to_the_longest_known_part():
    """`l40s` is no `l4`, `h200` no `h20`, and an unknown name matches none."""
    assert nominal("NVIDIA L40S") == nominal("l40")
    assert nominal("nvidia_h200") != nominal("h20")
    assert nominal("gh200") != nominal("h200")
    assert nominal("frobnicator") is None


def test_unknown_hardware_has_a_wider_spread():
    """The 95th percentile is further out until the hardware was seen once."""
    unknown = Features(task="x", model_parameters=10**9, hardware="frob", engine="hf", batch_size=8)
    before = predict_batches(unknown, [1000], [0], Learnt([])).sigma
    assert before > predict_batches(SEVEN, [1000], [0], Learnt([])).sigma
    assert predict_batches(unknown, [1000], [0], Learnt([observation(hardware="frob")])).sigma < before


def test_more_tokens_take_longer_and_every_batch_has_its_seconds():
    """Seconds follow each batch's own tokens; lengths must agree."""
    got = predict_batches(SEVEN, [100, 200, 200], [0, 0, 800], Learnt([]))
    assert got.seconds[0] < got.seconds[1] < got.seconds[2]
    with pytest.raises(ValueError, match="every batch"):
        predict_batches(SEVEN, [1, 2], [3], Learnt([]))


def test_a_slow_site_is_slow_for_a_task_without_a_run():
    """All of 20 tasks at half speed: a task never seen is predicted at half speed, too."""
    history = [
        observation(n, hardware=SEVEN.hardware, inference_seconds=2 * 100_000 / 8914) for n in range(1, 21)
    ]
    cold = sum(predict_batches(SEVEN, [8000] * 13, [0] * 13, Learnt([])).seconds)
    warm = sum(predict_batches(SEVEN, [8000] * 13, [0] * 13, Learnt(history)).seconds)
    assert warm == pytest.approx(2 * cold, rel=0.1)


def seconds_of(history):
    return sum(predict_batches(SEVEN, [100_000], [0], Learnt(history)).seconds)


def run_of(seconds, at, **more):
    return observation(0, hardware=SEVEN.hardware, inference_seconds=seconds, at=float(at), **more)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12))
def test_a_prediction_is_the_median_of_the_last_five_runs(seconds):
    """Of equal requests the median of their seconds, whatever was before the last five."""
    history = [run_of(each, at) for at, each in enumerate(seconds)]
    one = seconds_of([run_of(1.0, 0)])
    assert seconds_of(history) == pytest.approx(one * median(seconds[-5:]))


def test_runs_elsewhere_do_not_count():
    """Runs on other hardware, by another engine or of another task leave a task's own ratio as it is."""
    own = [run_of(30.0, 0)]
    others = [
        run_of(300.0, 1, **other) for other in ({"task": "task1"}, {"engine": "vllm"}, {"mode": "fast"})
    ]
    others.append(observation(0, hardware="h100", inference_seconds=300.0))
    assert seconds_of(own + others) == seconds_of(own)


def test_stated_spreads_are_those_of_one_and_three_runs():
    """0.14 after one checkpoint, 0.12 after three, of which 0.10 is the run's own."""
    spreads = [
        predict_batches(SEVEN, [9], [0], Learnt([run_of(30.0, at) for at in range(n)])).sigma
        for n in (0, 1, 3)
    ]
    assert spreads == pytest.approx([0.412, 0.141, 0.115], abs=0.002)


def test_history_order_does_not_matter():
    """Observations count by their time, not by their line."""
    history = [
        observation(0, inference_seconds=10.0 + n, hardware=SEVEN.hardware, at=float(n)) for n in range(9)
    ]
    assert predict_batches(SEVEN, [9], [0], Learnt(history)) == predict_batches(
        SEVEN, [9], [0], Learnt(history[::-1])
    )


def test_metric_seconds_are_measured_figures_first_and_history_then():
    """The table has HumanEval's 42 s; unknown scores are fast, programs slow; one run corrects."""
    assert predict_metric("humaneval", 164, True, Learnt([])).seconds == pytest.approx(43, rel=0.05)
    assert predict_metric("unheard-of", 1000, False, Learnt([])).seconds < 3
    assert predict_metric("unheard-of", 1000, True, Learnt([])).seconds > 100
    slow = [observation(0, documents=1000, metric_seconds=500.0)] * 3
    assert predict_metric("task0", 1000, False, Learnt(slow)).seconds > 100
    assert predict_metric("task0", 0, False, Learnt([])).seconds == 0.0


def test_a_judge_is_asked_one_at_a_time_and_programs_as_there_are_slots():
    """The shipped row's kind decides; a task without a row has no limit."""
    assert predict_metric("alpacaeval", 805, True, Learnt([])).at_once == 1
    assert predict_metric("humaneval", 164, True, Learnt([])).at_once is None
    assert predict_metric("unheard_of", 100, True, Learnt([])).at_once is None
    assert predict_metric("alpacaeval", 805, False, Learnt([])).at_once is None


def test_load_seconds_grow_with_the_model_and_follow_the_site():
    """14 GB take about 10 s; a site that was seen at 40 s is predicted near it."""
    slow = Learnt([observation(n, load_seconds=40.0) for n in range(3)])
    assert predict_load(14_000_000_000, "a100", Learnt([])).seconds == pytest.approx(10, rel=0.05)
    assert predict_load(140_000_000_000, "a100", Learnt([])).seconds > 30
    assert predict_load(14_000_000_000, "a100", slow).seconds > 30
    assert predict_load(14_000_000_000, "h100", slow).seconds < 11


def test_the_95th_percentile_is_beyond_the_median():
    """1.645 spreads out in the log."""
    assert Prediction(seconds=100.0, sigma=0.0).late == 100.0
    assert Prediction(seconds=100.0, sigma=0.4).late == pytest.approx(193, rel=0.01)


def test_the_shipped_table_is_whole_and_tasks_are_found_in_it():
    """86 rows; each is found by its own name and by lm-eval's; leaves are found by their group."""
    rows = {row.name: row for row in table().values()}
    assert len(rows) == 86
    names = [name for row in rows.values() for name in (row.name, *row.tasks.split())]
    assert len(names) == len(set(names)) == len(table())
    assert known("mmlu_anatomy") == known("mmlu")
    assert known("gsm8k").name == "gsm8k_5shot_lmeval"
    assert known("hellaswag").labels == 4
    assert known("squad2").labels == 0
    assert known("nobody_knows") is None


count = st.one_of(st.just(0), st.integers(0, 10**18))
some_seconds = st.one_of(st.just(0.0), st.floats(0, 1e9), st.floats(0, 1e-5))


@st.composite
def accepted(draw):
    """Any observation that a table accepts, absurd ones included."""
    return observation(
        draw(st.integers(0, 2)),
        model_parameters=draw(count),
        hardware=draw(st.sampled_from(["a100", "cpu", "something"])),
        batch_size=draw(st.sampled_from([1, 8, 100_000])),
        prefill_tokens=draw(count),
        generated_tokens=draw(count),
        documents=draw(count),
        inference_seconds=draw(some_seconds),
        metric_seconds=draw(some_seconds),
        load_seconds=draw(st.none() | some_seconds),
    )


@settings(max_examples=150)
@given(st.lists(accepted(), max_size=8), st.sampled_from(["a100", "cpu", "something"]))
def test_no_observation_makes_a_prediction_useless(history, hardware):
    """Whatever a table took in, seconds and spreads are finite and not below 0."""
    features = Features(
        task="task0", model_parameters=7_000_000_000, hardware=hardware, engine="hf", batch_size=8
    )
    got = predict_batches(features, [0, 1000], [0, 512], Learnt(history))
    metric = predict_metric("task0", 100, False, Learnt(history))
    load = predict_load(14_000_000_000, hardware, Learnt(history))
    values = [*got.seconds, got.sigma, metric.seconds, metric.sigma, load.seconds, load.late]
    assert all(isfinite(value) and value >= 0 for value in values)
