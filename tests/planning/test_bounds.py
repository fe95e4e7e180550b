"""The bound's terms, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.lower_bound import Capacity, MeasuredSet, bound, measured_lower_bound
from coordinator.planning.model import Lane, Problem, WorkSet

TWO = [Lane(name="a", node="n"), Lane(name="b", node="n")]


def work(name: str = "x", batches: list[float] | None = None, tail: float = 0.0, **more) -> WorkSet:
    return WorkSet(name=name, batch_seconds=batches or [1.0] * 100, metric_seconds=tail, **more)


PROGRAMS = {"metric": "execute"}


@pytest.mark.parametrize(
    ("sets", "slots", "stage", "seconds", "binding"),
    [
        # staging + load + the work of two GPUs
        ([work(tail=1.0, **PROGRAMS)], 4, 4.5, 4.5 + 10 + 100 / 2, "GPU time"),
        # load + a batch + the tail over min(3 allowed, 4 slots)
        ([work(tail=300.0, metric_parallelism=3, **PROGRAMS)], 4, 0.0, 10 + 1 + 300 / 3, "the tail of x"),
        # the score of a whole set waits for its last batch, on one slot; one long batch makes its set wait
        ([work(tail=30.0)], 4, 0.0, 10 + 100 / 2 + 30, "the tail of x"),
        ([work(batches=[80.0, 20.0], tail=30.0)], 4, 0.0, 10 + 80 + 30, "the tail of x"),
        # load + the first batch anywhere + all CPU seconds over the slots
        ([work(n, [2.0] * 3, 300.0, **PROGRAMS) for n in "xy"], 2, 0.0, 10 + 2 + 600 / 2, "CPU slots"),
        ([], 1, 0.0, 0.0, "GPU time"),
    ],
)
def test_the_bound_is_its_largest_term_and_names_it(sets, slots, stage, seconds, binding):
    """By hand, on two GPUs and a load of 10 s."""
    got = bound(Problem(sets, TWO, load_seconds=10, cpu_slots=slots, stage_seconds=stage))
    assert got.seconds == pytest.approx(seconds)
    assert got.binding == binding


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
