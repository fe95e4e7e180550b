"""Who may use which free GPUs, and which waiting checkpoints are dropped: laws over random clusters and demands."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.allocation import Demand, Limits, allocate
from coordinator.backlog import Waiting, stale
from coordinator.cluster import NodeState


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeState]:
    made = []
    for number in range(draw(st.integers(0, 8))):
        gpus = draw(st.integers(0, 8))
        made.append(
            NodeState(
                name=f"n{number}",
                usable=draw(st.booleans()),
                state="?",
                gpus=gpus,
                gpus_free=draw(st.integers(0, gpus)),
                cpus=8,
                cpus_free=8,
                memory_mb=1000,
                memory_free_mb=1000,
                partitions=tuple(draw(st.sets(st.sampled_from(["gpu", "spare"])))),
                best_effort=draw(st.booleans()),
            )
        )
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
        )
        for number in range(draw(st.integers(0, 5)))
    ]


limits = st.builds(
    Limits,
    max_nodes=st.none() | st.integers(1, 8),
    max_gpus=st.none() | st.integers(0, 30),
    leave_nodes_free=st.integers(0, 4),
    partition=st.none() | st.sampled_from(["gpu", "spare"]),
)


promises = st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.integers(0, 8))


@given(clusters(), demands(), limits, st.integers(0, 20), promises)
def test_offers_keep_every_limit(
    nodes: list[NodeState], asked: list[Demand], limit: Limits, used: int, promised: dict[str, int]
) -> None:
    """Never more than is free and not promised, asked for or allowed; whole trials; a node to one evaluation a time; spared
    nodes stay spared; on a node of its own an evaluation keeps what it has and grows."""
    offers = allocate(nodes, asked, limit, gpus_in_use=used, promised=promised)
    by_name = {n.name: n for n in nodes}
    given_ = [
        (d, o, o.gpus - d.in_use.get(o.node, 0)) for d in asked for o in offers.get(d.evaluation_id, ())
    ]
    assert len({o.node for _, o, _ in given_}) == len(given_), "a node is offered once"
    for demand, offer, more in given_:
        node = by_name[offer.node]
        assert node.usable
        assert 0 < more <= node.gpus_free - promised.get(node.name, 0)
        assert offer.gpus <= node.gpus, "what it has there may have ended and look free"
        assert more % demand.gpus_per_trial == 0
        assert offer.node not in demand.avoid
        assert limit.partition is None or limit.partition in node.partitions
    for demand in asked:
        mine = [(o, more) for d, o, more in given_ if d is demand]
        assert sum(more for _, more in mine) <= demand.gpus
        if limit.max_nodes is not None:
            fresh = [o for o, _ in mine if o.node not in demand.in_use]
            assert not fresh or len(fresh) + len(demand.in_use) <= limit.max_nodes
    if limit.max_gpus is not None:
        assert sum(more for _, _, more in given_) <= max(0, limit.max_gpus - used)
    fits = [n for n in nodes if n.usable and (limit.partition is None or limit.partition in n.partitions)]
    idle = {n.name for n in fits if n.gpus and n.gpus_free == n.gpus and not promised.get(n.name)}
    left = idle - {o.node for _, o, _ in given_}
    assert len(left) >= min(limit.leave_nodes_free, len(idle))


@given(clusters(), demands(), st.integers(0, 30))
def test_the_first_in_priority_gets_what_it_would_get_alone(
    nodes: list[NodeState], asked: list[Demand], gpus: int
) -> None:
    """Others change nothing for whoever stands first: by priority, then age."""
    if not asked:
        return
    first = min(asked, key=lambda d: (-d.priority, d.accepted_at, d.evaluation_id))
    limit = Limits(max_gpus=gpus)
    together = allocate(nodes, asked, limit, gpus_in_use=0)
    alone = allocate(nodes, [first], limit, gpus_in_use=0)
    assert together[first.evaluation_id] == alone[first.evaluation_id]


@st.composite
def waiting(draw: st.DrawFn) -> list[Waiting]:
    return [
        Waiting(
            evaluation_id=f"e{i}",
            series=draw(st.sampled_from("ab")),
            order=float(draw(st.integers(0, 9))),
            started=draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, 12)))
    ]


policies: Any = st.one_of(st.just("all"), st.just("latest"), st.integers(1, 5))


@given(waiting(), policies)
def test_a_started_or_newest_checkpoint_is_never_dropped(items: list[Waiting], policy: Any) -> None:
    """And each drop has its reason; "all" drops none; "latest" leaves one unstarted a series."""
    dropped = stale(items, policy)
    assert not dropped or policy != "all"
    assert all(dropped.values())
    for series in "ab":
        mine = sorted((w for w in items if w.series == series), key=lambda w: (w.order, w.evaluation_id))
        if not mine:
            continue
        assert mine[-1].evaluation_id not in dropped
        assert not any(w.started for w in mine if w.evaluation_id in dropped)
        if policy == "latest":
            assert [w for w in mine if not w.started and w.evaluation_id not in dropped] in ([], [mine[-1]])


@given(waiting(), st.integers(1, 5))
def test_every_kth_checkpoint_is_kept(items: list[Waiting], every: int) -> None:
    """`backlog = k` keeps the first of each k in order of step."""
    dropped = stale(items, every)
    for series in "ab":
        mine = sorted((w for w in items if w.series == series), key=lambda w: (w.order, w.evaluation_id))
        assert all(w.evaluation_id not in dropped for w in mine[::every])
