"""Random clusters, demands of evaluations and limits, as `allocate` takes them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from coordinator.allocation.allocate import Demand, Limits
from coordinator.cluster import NodeState
from support.fake_cluster import fake_node


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeState]:
    made = []
    for number in range(draw(st.integers(0, 8))):
        gpus = draw(st.integers(0, 8))
        drawn = {
            "usable": draw(st.booleans()),
            "gpus_free": draw(st.integers(0, gpus)),
            "memory_free_mb": draw(st.integers(0, 1000)),
            "counts_memory": draw(st.booleans()),
            "partitions": tuple(draw(st.sets(st.sampled_from(["gpu", "spare"])))),
            "best_effort": draw(st.booleans()),
        }
        made.append(replace(fake_node(f"n{number}", gpus=gpus, cpus=8, memory_mb=1000), **drawn))
    return made


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    return [
        Demand(
            evaluation_id=f"e{number}",
            priority=draw(st.integers(-2, 2)),
            accepted_at=draw(st.integers(0, 5)),
            gpus=draw(st.integers(1, 40)),
            gpus_per_trial=draw(st.integers(1, 4)),
            in_use=draw(
                st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.integers(1, 4), max_size=3)
            ),
            avoid=draw(st.frozensets(st.sampled_from([f"n{i}" for i in range(8)]), max_size=2)),
            precursor_mb=draw(st.integers(0, 1200)),
            trial_mb=draw(st.integers(0, 400)),
        )
        for number in range(draw(st.integers(0, 5)))
    ]


limits = st.builds(
    Limits,
    max_nodes=st.none() | st.integers(1, 8),
    max_gpus=st.none() | st.integers(0, 30),
    leave_nodes_free=st.integers(0, 4),
)
