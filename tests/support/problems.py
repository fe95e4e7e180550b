"""Random planning problems for the property tests."""

import json

from hypothesis import strategies as st

from coordinator.decide.planning.model import UNLIMITED, Lane, WorkSet


def alike(count, per_node=10**6):
    """Lanes that are free at once, of one speed; a node holds `per_node` of them."""
    return [Lane(name=str(index), node=str(index // per_node)) for index in range(count)]


def work(name="x", number=100, each=1.0, tail=0.0, metric="score", **more):
    """A set of equal batches."""
    return WorkSet(name=name, batch_seconds=[each] * number, metric_seconds=tail, metric=metric, **more)


seconds = st.floats(min_value=0.0, max_value=200.0, allow_nan=False)


@st.composite
def work_sets(draw, most=12):
    """A few sets of few batches, metrics of all kinds, tails from none to long."""
    count = draw(st.integers(1, most))
    return [
        WorkSet(
            name=f"set{index}",
            batch_seconds=draw(st.lists(seconds, min_size=1, max_size=30)),
            metric_seconds=draw(st.one_of(st.just(0.0), st.floats(0, 3000))),
            metric=draw(st.sampled_from(["score", "execute"])),
            metric_parallelism=draw(st.sampled_from([1, 3, UNLIMITED])),
        )
        for index in range(count)
    ]


@st.composite
def lanes(draw, most=12):
    """Lanes on a few nodes, some late, some of another speed."""
    count = draw(st.integers(1, most))
    late = draw(st.booleans())
    fast = draw(st.booleans())
    return [
        Lane(
            name=f"lane{index}",
            node=f"node{index // 4}",
            ready_at_seconds=draw(st.floats(0, 300)) if late else 0.0,
            speed=draw(st.sampled_from([1.0, 1.7])) if fast else 1.0,
        )
        for index in range(count)
    ]


fixed = st.fixed_dictionaries(
    {
        "load_seconds": st.sampled_from([0.0, 5.0, 60.0]),
        "shard_overhead_seconds": st.sampled_from([0.0, 0.05, 1.0]),
        "cpu_slots": st.sampled_from([1, 2, 16]),
        "stage_seconds": st.sampled_from([0.0, 4.5]),
    }
)


JUDGE = {"metric": "execute", "metric_parallelism": 1}
BASE = {
    "schema_version": 1,
    "gpus": 4,
    "gpus_per_node": 2,
    "cpu_slots": 4,
    "load_seconds": 20.0,
    "shard_overhead_seconds": 1.0,
    "storage_seconds_alone": 4.5,
    "staging_seconds": 4.5,
    "preprocess_seconds": 45.0,
    "datasets": [
        {"name": "mmlu_5shot", "docs": 1400, "gpu_seconds": 4493.4, "metric_seconds": 4.0, "metric": "score"},
        {"name": "judge", "docs": 80, "gpu_seconds": 200, "metric_seconds": 900.0, "sigma": 0.5, **JUDGE},
        {"name": "squad2", "docs": 900, "gpu_seconds": 300.0},
    ],
}


def instance_text(**changes):
    """A planning instance of three sets, as JSON, with these fields instead."""
    return json.dumps(BASE | changes)


DATA_SET = st.fixed_dictionaries(
    {
        "docs": st.integers(1, 60),
        "gpu_seconds": st.floats(0, 500),
        "metric_seconds": st.floats(0, 500),
        "metric": st.sampled_from(["score", "execute"]),
        "metric_parallelism": st.integers(1, 5),
        "labels": st.integers(0, 5),
    }
)
SIZES = {"gpus": st.integers(1, 10), "gpus_per_node": st.integers(1, 4), "cpu_slots": st.integers(1, 6)}


@st.composite
def instances(draw):
    """Instances of a few sets, every optional cost present or absent."""
    data_sets = [
        one | {"name": f"set{n}"} for n, one in enumerate(draw(st.lists(DATA_SET, min_size=1, max_size=10)))
    ]
    return instance_text(**draw(st.fixed_dictionaries(SIZES)), datasets=data_sets)
