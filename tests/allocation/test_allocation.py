"""Who may use which free GPUs, and which waiting checkpoints are dropped: laws over random clusters and demands."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.demands import clusters, demands, limits
from support.fake_cluster import fake_node

from coordinator.allocation.allocate import Demand, Limits, allocate
from coordinator.allocation.backlog import Past, Seen, stale
from coordinator.cluster import NodeState
from coordinator.cluster.node_choice import exclude

promises = st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.integers(0, 8))


had = st.tuples(st.integers(0, 20), st.sets(st.sampled_from(["n0", "n5", "n7"])))


@given(clusters(), demands(), limits, had, promises)
def test_offers_keep_every_limit(
    nodes: list[NodeState],
    asked: list[Demand],
    limit: Limits,
    before: tuple[int, set[str]],
    promised: dict[str, int],
) -> None:
    """Never more than is free and not promised, asked for or allowed; whole trials; a node to one evaluation a time; spared
    nodes stay spared; on a node of its own an evaluation keeps what it has and grows."""
    used, others = before
    both = {name: (gpus, 0) for name, gpus in promised.items()}
    offers = allocate(nodes, asked, limit, gpus_in_use=used, nodes_in_use=others, promised=both)
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
    for demand in asked:
        assert sum(more for d, _, more in given_ if d is demand) <= demand.gpus
    if limit.max_nodes is not None:
        ours = set(others).union(*(d.in_use for d in asked))
        fresh = {o.node for _, o, _ in given_} - ours
        assert not fresh or len(fresh | ours) <= limit.max_nodes, "of all evaluations together"
    if limit.max_gpus is not None:
        assert sum(more for _, _, more in given_) <= max(0, limit.max_gpus - used)
    fits = [n for n in nodes if n.usable]
    idle = {n.name for n in fits if n.gpus and n.gpus_free == n.gpus and not promised.get(n.name)}
    left = idle - {o.node for _, o, _ in given_}
    assert len(left) >= min(limit.leave_nodes_free, len(idle))


@given(
    clusters(),
    demands(),
    st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.integers(-500, 800)),
)
def test_an_offer_fits_into_the_nodes_free_memory(
    nodes: list[NodeState], asked: list[Demand], promised_mb: dict[str, int]
) -> None:
    """Its precursor and one trial at least, as many trials as fit; unless no node of the cluster could ever hold them."""
    promised = {name: (0, megabytes) for name, megabytes in promised_mb.items()}
    offers = allocate(nodes, asked, Limits(), gpus_in_use=0, promised=promised)
    by_name = {n.name: n for n in nodes}
    for demand in asked:
        least = demand.precursor_mb + demand.trial_mb
        if not any(n.gpus and (not n.counts_memory or n.memory_mb >= least) for n in nodes):
            unbound = allocate(nodes, [replace(demand, precursor_mb=0, trial_mb=0)], Limits(), gpus_in_use=0)
            alone = allocate(nodes, [demand], Limits(), gpus_in_use=0, promised=promised)
            assert [(o.node, o.gpus) for o in alone[demand.evaluation_id]] == [
                (o.node, o.gpus) for o in unbound[demand.evaluation_id]
            ]
            continue
        for offer in offers[demand.evaluation_id]:
            node, has = by_name[offer.node], demand.in_use.get(offer.node, 0)
            trials = (offer.gpus - has) // demand.gpus_per_trial
            once = 0 if has else demand.precursor_mb
            room = node.memory_free_mb - promised_mb.get(node.name, 0)
            assert not node.counts_memory or once + trials * demand.trial_mb <= room


def test_a_node_too_small_is_not_offered_and_a_tight_one_gives_fewer_lanes() -> None:
    small, tight, wide = (
        fake_node(f"n{i}", gpus=8, memory_mb=mb) for i, mb in enumerate((4000, 17_000, 99_000))
    )
    demand = Demand(
        evaluation_id="e",
        priority=0,
        accepted_at=0,
        gpus=24,
        gpus_per_trial=1,
        in_use={},
        precursor_mb=900,
        trial_mb=4096,
    )
    (offers,) = allocate([small, tight, wide], [demand], Limits(), gpus_in_use=0).values()
    assert {o.node: o.gpus for o in offers} == {"n1": 3, "n2": 8}
    # where the settings leave only what is too small, the cluster's refusal says why
    (offers,) = allocate(
        [small, exclude(wide, "[nodes] include")], [demand], Limits(), gpus_in_use=0
    ).values()
    assert {o.node: o.gpus for o in offers} == {"n0": 8}


@given(clusters(), demands(), st.integers(0, 30))
def test_the_first_in_priority_gets_what_it_would_get_alone(
    nodes: list[NodeState], asked: list[Demand], gpus: int
) -> None:
    """Others change nothing for the first demand: by priority, then age."""
    if not asked:
        return
    first = min(asked, key=lambda d: (-d.priority, d.accepted_at, d.evaluation_id))
    limit = Limits(max_gpus=gpus)
    together = allocate(nodes, asked, limit, gpus_in_use=0)
    alone = allocate(nodes, [first], limit, gpus_in_use=0)
    assert together[first.evaluation_id] == alone[first.evaluation_id]


@st.composite
def history(draw: st.DrawFn) -> list[Seen]:
    return [
        Seen(
            evaluation_id=f"e{i}",
            series=draw(st.sampled_from("ab")),
            order=(float(draw(st.integers(0, 9))), float(draw(st.integers(0, 3)))),
            phase=draw(st.sampled_from(["waiting", "started", "over"])),
        )
        for i in range(draw(st.integers(0, 12)))
    ]


@given(history(), st.none() | st.integers(1, 5))
def test_a_started_or_newest_checkpoint_is_never_dropped(items: list[Seen], every: int | None) -> None:
    """And each drop has its reason; without `keep_every` one that waits is left in a series."""
    dropped = stale(items, every)
    assert all(dropped.values())
    for series in "ab":
        mine = sorted((s for s in items if s.series == series), key=lambda s: (s.order, s.evaluation_id))
        open_ones = [s for s in mine if s.phase != "over"]
        if not open_ones:
            continue
        assert open_ones[-1].evaluation_id not in dropped
        assert not any(s.phase != "waiting" for s in mine if s.evaluation_id in dropped)
        left = [s for s in open_ones if s.phase == "waiting" and s.evaluation_id not in dropped]
        assert every is not None or left in ([], [open_ones[-1]])


@given(history(), st.none() | st.integers(1, 5), st.randoms())
def test_of_what_is_over_its_place_in_the_series_is_enough(
    items: list[Seen], every: int | None, dice: random.Random
) -> None:
    """The same choice as with all evaluations at hand, in whatever order they ended, also where one came back."""
    items = list({(s.series, s.order): s for s in items}.values())
    past = Past()
    over = [s for s in items if s.phase == "over"]
    for one in dice.sample(over, len(over)) * 2 + [s for s in items if dice.random() < 0.3]:
        past.add(one)
    assert stale([s for s in items if s.phase != "over"], every, past.orders) == stale(items, every)


@given(st.integers(1, 5), st.integers(1, 30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_every_kth_checkpoint_is_kept_however_they_arrive(every: int, count: int, ends: list[bool]) -> None:
    """One by one, and whatever has ended meanwhile: kept are the first, the k-th after it and so on, and the newest."""
    seen: dict[str, Seen] = {}
    dropped: set[str] = set()
    for step in range(count):
        name = f"e{step:02}"
        seen[name] = Seen(evaluation_id=name, series="a", order=(float(step), 0.0), phase="waiting")
        for gone in stale(seen.values(), every):
            dropped.add(gone)
            seen[gone] = replace(seen[gone], phase="over")
        if ends[step] and step % every == 0:
            seen[name] = replace(seen[name], phase="over")
    assert dropped == {f"e{step:02}" for step in range(count - 1) if step % every}
