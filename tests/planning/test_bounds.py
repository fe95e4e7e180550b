"""The bound's terms, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.lower_bound import Capacity, MeasuredSet, bound, measured_lower_bound
from coordinator.planning.model import Lane, WorkSet

TWO = [Lane(name="a", node="n"), Lane(name="b", node="n")]


def test_gpu_time_binds():
    """4.5 staging + 10 load + 100 s over 2 GPUs."""
    sets = [WorkSet(name="x", batch_seconds=[1.0] * 100, metric_seconds=1.0, metric="execute")]
    got = bound(sets, TWO, load_seconds=10, cpu_slots=4, stage_seconds=4.5)
    assert got.gpu_seconds == pytest.approx(64.5)
    assert got.seconds == pytest.approx(64.5)
    assert got.binding == "GPU time"


def test_the_tail_of_an_execute_metric_binds():
    """10 load + one batch of 1 s + 300 s over min(3 allowed, 4 slots)."""
    sets = [
        WorkSet(
            name="x",
            batch_seconds=[1.0] * 100,
            metric_seconds=300.0,
            metric="execute",
            metric_parallelism=3,
        )
    ]
    got = bound(sets, TWO, load_seconds=10, cpu_slots=4)
    assert got.seconds == pytest.approx(111.0)
    assert got.binding == "the tail of x"


def test_the_tail_of_a_score_metric_waits_for_its_whole_set():
    """10 load + 100 s over 2 GPUs + 30 s on one slot; one long batch makes its set wait."""
    spread = WorkSet(name="x", batch_seconds=[1.0] * 100, metric_seconds=30.0)
    assert bound([spread], TWO, load_seconds=10, cpu_slots=4).seconds == pytest.approx(90.0)
    single = WorkSet(name="x", batch_seconds=[80.0, 20.0], metric_seconds=30.0)
    assert bound([single], TWO, load_seconds=10, cpu_slots=4).seconds == pytest.approx(120.0)


def test_cpu_slots_bind():
    """10 load + the first batch anywhere + 600 CPU s over 2 slots."""
    sets = [
        WorkSet(name=name, batch_seconds=[2.0] * 3, metric_seconds=300.0, metric="execute")
        for name in ("x", "y")
    ]
    got = bound(sets, TWO, load_seconds=10, cpu_slots=2)
    assert got.cpu_seconds == pytest.approx(312.0)
    assert got.binding == "CPU slots"


def test_late_and_fast_lanes_fill_like_water():
    """One lane from 0 s at speed 1, one from 10 s at speed 3: 30 s of work is done at 15 s."""
    capacity = Capacity(
        [Lane(name="a", node="n"), Lane(name="b", node="n", ready_at_seconds=10.0, speed=3.0)], 0.0, 0.0
    )
    assert capacity.earliest(30.0) == pytest.approx(15.0)
    assert capacity.earliest(10.0) == pytest.approx(10.0)
    assert capacity.earliest(4.0) == pytest.approx(4.0)
    assert capacity.earliest_single(12.0) == pytest.approx(12.0)
    assert capacity.earliest_single(60.0) == pytest.approx(30.0)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=8),
    st.floats(0, 500),
)
def test_earliest_is_when_capacity_equals_the_work(pairs, work):
    """At the returned time the lanes have worked exactly the asked-for seconds."""
    on = [
        Lane(name=str(i), node="n", ready_at_seconds=at, speed=speed) for i, (at, speed) in enumerate(pairs)
    ]
    at = Capacity(on, 3.0, 0.0).earliest(work)
    done = sum(lane.speed * max(0.0, at - lane.ready_at_seconds - 3.0) for lane in on)
    assert done == pytest.approx(work, abs=1e-6)


def test_a_measured_run_is_bounded_by_the_same_formula():
    """before + load + the largest term, from measured seconds; documents are the smallest piece."""
    sets = [
        MeasuredSet(name="x", gpu_seconds=100.0, documents=50, metric_seconds=90.0, executes=True),
        MeasuredSet(name="y", gpu_seconds=60.0, documents=10, metric_seconds=70.0, executes=False),
    ]
    got = measured_lower_bound(sets, gpus=4, cpu_slots=2, load_seconds=10.0, before_seconds=5.0)
    # the terms: GPU time 50, the tail of x 57, the tail of y 10 + 15 + 70, CPU slots 92
    assert got == pytest.approx(100.0)


def test_nothing_to_do_is_bounded_by_nothing():
    """No set, no seconds."""
    assert bound([], TWO, load_seconds=10, cpu_slots=1).seconds == 0.0
