"""Cuts moved so that lanes end together."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import alike

from coordinator.planning.batch_sums import Even, running
from coordinator.planning.flow_shop import levelled
from coordinator.planning.model import Problem, WorkSet
from coordinator.planning.planner import plan


@st.composite
def problems(draw):
    lanes = draw(st.integers(2, 6))
    shortest = draw(st.floats(0.0, 5.0))
    sums, sizes = {}, {}
    for index in range(draw(st.integers(1, 4))):
        batches = draw(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=60))
        sums[index] = list(accumulate(batches, initial=0.0))
        ends = sorted(draw(st.sets(st.integers(1, len(batches) - 1), max_size=5)) | {len(batches)})
        at = [0, *ends]
        sizes[index] = [
            (draw(st.integers(0, lanes - 1)), sums[index][b] - sums[index][a])
            for a, b in zip(at, ends, strict=False)
        ]
    speeds = draw(st.lists(st.floats(0.5, 2.0), min_size=lanes, max_size=lanes))
    ends = [0.0] * lanes
    for chain in sizes.values():
        for lane, seconds in chain:
            ends[lane] += seconds / speeds[lane]
    return sizes, sums, ends, speeds, shortest


@given(problems())
def test_moved_cuts_cover_each_set_once_in_as_many_shards_none_too_short(problem):
    """As many shards as before, whole batches, each at least the shortest."""
    sizes, sums, ends, speeds, shortest = problem
    for index, cuts in levelled(sizes, sums, ends, speeds, shortest).items():
        assert len(cuts) == len(sizes[index])
        assert cuts[-1] == len(sums[index]) - 1
        for first, stop in zip([0, *cuts], cuts, strict=False):
            assert stop > first
            assert sums[index][stop] - sums[index][first] >= shortest * (1 - 1e-6)


@given(st.lists(st.floats(0.0, 50.0), min_size=2, max_size=12), st.integers(1, 4))
def test_a_set_that_reaches_every_lane_makes_them_end_together(others, each):
    """A set of fine documents with shards on all lanes evens them out to a document each."""
    lanes, documents, document = len(others), 600, 0.1
    sums = running(Even(each=document, number=lanes * each * documents))
    sizes = {0: [(number % lanes, document * documents) for number in range(lanes * each)]}
    before = [other + each * document * documents for other in others]
    cuts = levelled(sizes, {0: sums}, before, [1.0] * lanes, 0.0).get(0)
    after = before if cuts is None else list(others)
    for number, (first, stop) in enumerate(zip([0, *(cuts or [])], cuts or [], strict=False)):
        after[number % lanes] += sums[stop] - sums[first]
    assert max(after) - min(after) <= 2 * document * each + 1e-6


@pytest.mark.parametrize("lanes", [2, 8, 24, 32, 48, 64])
def test_one_large_set_alone_is_cut_so_that_no_lane_waits(lanes):
    """Without small sets for the gaps, a plan ends near the bound though a shard costs a second."""
    work = WorkSet(
        name="mmlu", batch_seconds=[4493.4 / 14042] * 14042, metric_seconds=4.0, metric_parallelism=1
    )
    made = plan(
        Problem([work], alike(lanes, per_node=8), load_seconds=20.0, shard_overhead_seconds=1.0, cpu_slots=64)
    )
    assert made.makespan_seconds <= 1.04 * made.lower_bound_seconds
