"""The next checkpoint comes to nodes whose GPUs are busy: within its share of memory, once a node, and takes no GPU from a trial."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.loops import another
from support.simulated.parts import record

from coordinator.decide.allocation import demand
from coordinator.decide.allocation.allocate import (
    Candidate,
    Demand,
    HeldCheckpoints,
    Limits,
    choose_prefetches,
)
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.state import JobInfo, NodeUse
from coordinator.site.cluster import Job
from evaljobs.contract.outcomes import Failed
from evaljobs.staging.capacity import measure_room
from evaljobs.staging.precursor import FREE_MARGIN_BYTES

NAMES = [f"n{i}" for i in range(4)]
DIGESTS = st.sampled_from("abc")
some = st.tuples(st.integers(0, 8), st.integers(0, 1000))
nodes = st.tuples(*[some] * len(NAMES)).map(
    lambda sizes: [fake_node(n, gpus=g, memory_mb=mb) for n, (g, mb) in zip(NAMES, sizes, strict=True)]
)
candidate = st.builds(
    Candidate,
    demand=st.builds(
        Demand,
        evaluation_id=st.sampled_from("wxyz"),
        priority=st.integers(-1, 1),
        accepted_at=st.integers(0, 3),
        gpus=st.integers(1, 20),
        gpus_per_trial=st.integers(1, 2),
        in_use=st.just({}),
    ),
    digest=DIGESTS,
    memory_mb=st.integers(1, 600),
    known=st.frozensets(st.sampled_from(NAMES), max_size=2),
)
waiting_ones = st.lists(candidate, max_size=4, unique_by=lambda c: c.demand.evaluation_id)
held_there = st.dictionaries(
    st.sampled_from(NAMES), st.builds(HeldCheckpoints, inferring=st.sets(DIGESTS), ahead=st.sets(DIGESTS))
)


@given(nodes, waiting_ones, held_there, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.none() | st.integers(1, 3))
def test_only_the_next_checkpoint_is_staged_ahead_and_within_its_share(there, waiting, held, share, most):
    """One checkpoint, that of the first in order; on nodes that serve us; new bytes within the share, counted once."""
    chosen = choose_prefetches(there, waiting, held, Limits(max_nodes=most), share=share)
    by_id = {c.demand.evaluation_id: c for c in waiting}
    order = sorted(waiting, key=lambda c: (-c.demand.priority, c.demand.accepted_at, c.demand.evaluation_id))
    for name in {n for names in chosen.values() for n in names}:
        (node,) = (n for n in there if n.name == name)
        takers = [by_id[e] for e, names in chosen.items() if name in names]
        first = order[0].digest
        assert {c.digest for c in takers} == {first}
        assert held[name].inferring
        assert not held[name].ahead - {first}, "one checkpoint ahead a node"
        assert sum(c.memory_mb for c in takers) <= node.memory_free_mb, "each lease holder has its memory"
        if first not in held[name].inferring | held[name].ahead:
            assert min(c.memory_mb for c in takers) <= share * node.memory_free_mb
        assert all(name not in c.known and node.gpus >= c.demand.gpus_per_trial for c in takers)
    assert share > 0 or not chosen
    assert all(len(names) <= (most or len(NAMES)) for names in chosen.values())


@pytest.mark.parametrize("fits", [True, False])
def test_the_precursor_itself_keeps_to_its_share_of_the_node(world, fits):
    """It stages where its bytes are within the share of what is free there; else it says so, fails, and leaves nothing."""
    checkpoint = world.checkpoint()
    free = measure_room(world.root).free
    share = 1.0 if fits else (checkpoint.bytes + FREE_MARGIN_BYTES) / free / 2
    spec = world.spec(checkpoint, share=share)
    process = world.start(spec)
    if fits:
        assert world.staged().rung == "shm"
        world.release()
        assert process.wait(120) == 0
    else:
        assert process.wait(120) == 1
        failed = world.outcome("failed")
        assert isinstance(failed, Failed)
        assert failed.blame == "retry"
        assert "not prefetched" in failed.error
    assert world.nothing_left()


@given(
    free=st.integers(0, 1000),
    wanted=st.integers(0, 1000),
    phase=st.sampled_from(["pending", "running"]),
    waited=st.sampled_from([0.0, 29.0, 31.0]),
    others=st.lists(st.tuples(st.integers(1, 400), st.integers(-1, 1), st.booleans()), max_size=4),
)
def test_weights_that_wait_leave_their_memory_to_who_has_the_gpus(free, wanted, phase, waited, others):
    """Only where its precursor has waited for memory for three looks and they would make room; no more than that takes,
    the last to be served first, and none that has no memory itself."""

    def holding(number, memory_mb, priority, *, lanes, member):
        rec = another(record(), number).model_copy(update={"priority": priority})
        state, _ = machine.start_evaluation(ev.Accepted(at=0.0, record=rec))
        job = Job(name="stage", argv=("x",), log="x", node="n1", memory_mb=memory_mb, purpose="stage")
        state.jobs.by_name["stage"] = JobInfo(
            job=job, members={0: member}, phase="submitted", changed_at=100.0
        )
        state.nodes.by_name["n1"] = NodeUse(name="n1", lanes=lanes, status="staging", precursor=job.name)
        return state

    owner = holding(9, wanted, 0, lanes=2, member=phase)
    waiting = [
        holding(i, mb, p, lanes=0, member="running" if there else "pending")
        for i, (mb, p, there) in enumerate(others)
    ]
    node = dataclasses.replace(fake_node("n1", memory_mb=1000), memory_free_mb=free)
    gone = demand.nodes_in_the_way([owner, *waiting], [node], 100.0 + waited)
    waiting = [s for s, (_, _, there) in zip(waiting, others, strict=True) if there]
    held = {s.evaluation_id: s.jobs.by_name["stage"].job.memory_mb for s in waiting}
    room = free + sum(held[name] for name, _ in gone)
    if phase == "running" or waited < 30 or wanted <= free or free + sum(held.values()) < wanted:
        assert not gone
        return
    assert room >= wanted
    assert room - held[gone[-1][0]] < wanted
    order = sorted(waiting, key=lambda s: (-s.record.priority, s.record.accepted_at))
    assert [name for name, _ in gone] == [s.evaluation_id for s in order[::-1][: len(gone)]]
