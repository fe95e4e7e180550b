"""Equal batches without a list answer as the list would."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.batch_sums import Even, extremes, running, seconds_of
from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import plan


@given(st.integers(0, 40), st.sampled_from([0.0, 0.25, 1.0, 3.5]), st.integers(-50, 50))
def test_even_batches_are_a_list_of_equal_numbers(count, each, index):
    """Length, items, sums and extremes are those of the list."""
    even, listed = Even(each=each, number=count), [each] * count
    assert list(even) == listed
    assert len(even) == len(listed)
    assert seconds_of(even) == seconds_of(listed)
    assert extremes(even) == extremes(listed)
    assert list(running(even)) == list(running(listed)) == list(accumulate(listed, initial=0.0))
    for sequence, of in ((even, listed), (running(even), running(listed))):
        try:
            wanted = of[index]
        except IndexError:
            with pytest.raises(IndexError):
                sequence[index]
        else:
            assert sequence[index] == wanted


def test_a_plan_of_even_batches_is_the_plan_of_their_list():
    """Binary fractions, so that no sum rounds: the two plans are equal."""
    on = [Lane(name=str(index), node="n") for index in range(12)]
    shapes = [(0.25, 4000, 30.0, "execute"), (2.0, 700, 5.0, "score"), (0.5, 33, 0.0, "score")]
    made = [
        plan(
            Problem(
                [
                    WorkSet(
                        name=str(number), batch_seconds=make(each, count), metric_seconds=tail, metric=metric
                    )
                    for number, (each, count, tail, metric) in enumerate(shapes)
                ],
                on,
                load_seconds=20.0,
                shard_overhead_seconds=0.5,
                cpu_slots=8,
            )
        )
        for make in (lambda each, count: Even(each=each, number=count), lambda each, count: [each] * count)
    ]
    assert made[0] == made[1]
