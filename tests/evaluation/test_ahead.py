"""The next checkpoint comes to nodes whose GPUs are busy: within its share of memory, once a node, and takes no GPU from a trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import another, coordinator_on
from support.node_memory import NodeMemory
from support.simulated.parts import Faults, record
from support.simulated.world import World, replay

from coordinator.allocation import demand, prefetch
from coordinator.allocation.allocate import Demand, Limits
from coordinator.cluster import Job, NodeState
from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.job_specs import precursor_memory_mb
from coordinator.evaluation.records import EvaluationRecord, JobName, evaluation_id
from coordinator.evaluation.state import JobInfo, NodeUse, Prefetch, State
from coordinator.runtime.loop import Coordinator
from evaljobs.contract.outcomes import Failed, Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import write_outcome
from evaljobs.staging.capacity import room
from evaljobs.staging.precursor import MARGIN

NAMES = [f"n{i}" for i in range(4)]
DIGESTS = st.sampled_from("abc")


@st.composite
def nodes(draw: st.DrawFn) -> list[NodeState]:
    made = []
    for name in NAMES:
        gpus, free = draw(st.integers(0, 8)), draw(st.integers(0, 1000))
        node = fake_node(name, gpus=gpus, memory_mb=free)
        made.append(node)
    return made


@st.composite
def candidates(draw: st.DrawFn) -> list[prefetch.Candidate]:
    return [
        prefetch.Candidate(
            demand=Demand(
                evaluation_id=f"e{i}",
                priority=draw(st.integers(-1, 1)),
                accepted_at=draw(st.integers(0, 3)),
                gpus=draw(st.integers(1, 20)),
                gpus_per_trial=draw(st.integers(1, 2)),
                in_use={},
            ),
            digest=draw(DIGESTS),
            memory_mb=draw(st.integers(1, 600)),
            known=frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2))),
        )
        for i in range(draw(st.integers(0, 4)))
    ]


held_there = st.dictionaries(
    st.sampled_from(NAMES), st.builds(prefetch.Held, inferring=st.sets(DIGESTS), ahead=st.sets(DIGESTS))
)


@given(
    nodes(), candidates(), held_there, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.none() | st.integers(1, 3)
)
def test_only_the_next_checkpoint_is_staged_ahead_and_within_its_share(
    there: list[NodeState],
    waiting: list[prefetch.Candidate],
    held: dict[str, prefetch.Held],
    share: float,
    most: int | None,
) -> None:
    """One checkpoint, that of the first in order; on nodes that serve us; new bytes within the share, counted once."""
    chosen = prefetch.choose(there, waiting, held, Limits(max_nodes=most), share=share)
    by_id = {c.demand.evaluation_id: c for c in waiting}
    first = min(
        waiting,
        key=lambda c: (-c.demand.priority, c.demand.accepted_at, c.demand.evaluation_id),
        default=None,
    )
    for name in {n for names in chosen.values() for n in names}:
        (node,) = (n for n in there if n.name == name)
        takers = [by_id[e] for e, names in chosen.items() if name in names]
        assert first is not None
        assert {c.digest for c in takers} == {first.digest}
        assert held[name].inferring
        assert not held[name].ahead - {first.digest}, "one checkpoint ahead a node"
        assert sum(c.memory_mb for c in takers) <= node.memory_free_mb, "each lease holder has its memory"
        if first.digest not in held[name].inferring | held[name].ahead:
            assert min(c.memory_mb for c in takers) <= share * node.memory_free_mb
        assert all(name not in c.known and node.gpus >= c.demand.gpus_per_trial for c in takers)
    assert share > 0 or not chosen
    assert all(len(names) <= (most or len(NAMES)) for names in chosen.values())


class _AheadWorld(World):
    """A world in which memory is offered first, and GPUs when the dice say so."""

    def nodes(self) -> None:
        nodes = self.state.nodes
        if self.state.builds.looked_up and not nodes.by_name and not nodes.prefetches:
            self.take([ev.MemoryOffered(at=self.now, nodes=tuple(self.node_names))])
        elif (nodes.by_name or nodes.prefetches) and self.dice.random() < 0.3:
            withdrawn = [n.name for n in nodes.by_name.values() if n.status == "withdrawn"]
            offers = tuple(ev.Offer(node=n, gpus=2, memory_mb=1000) for n in (*nodes.prefetches, *withdrawn))
            if offers and not self.state.winding_down:
                self.take([ev.NodesOffered(at=self.now, offers=offers)])


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), faults=st.booleans())
def test_staged_ahead_an_evaluation_holds_no_gpu_and_ends_as_any_other(seed: int, faults: bool) -> None:
    """Whatever dies meanwhile, all is scored, no trial starts before its offer, and the journal replays to the same."""
    dies = Faults(stage_fails=0.3, kill=0.03, submit_timeout=0.1, restart=0.02) if faults else Faults()
    world = _AheadWorld(seed, dies)
    world.run()
    offered = next(e.at for e in world.journal if isinstance(e, ev.NodesOffered))
    gpu_jobs = {n for n, i in world.state.jobs.by_name.items() if i.job.gpus}
    starts = [e.at for e in world.journal if isinstance(e, ev.JobSubmitted) and e.job in gpu_jobs]
    assert starts
    assert min(starts) >= offered
    assert not world.memory, "node memory is cleared"
    if not faults:
        assert {e.status for e in world.state.entries} == {"scored"}
        kinds = [e.kind for e in world.journal if _stages(e) or isinstance(e, ev.NodesOffered)]
        assert kinds[0] == "job-submitted", "staging comes first"
    assert replay(world.journal).nodes == world.state.nodes


def _stages(event: ev.AnyEvent) -> bool:
    return isinstance(event, ev.JobSubmitted) and "-stage-" in event.job


def _three(tmp_path: Path) -> tuple[Coordinator, FakeCluster, list[EvaluationRecord]]:
    """A coordinator of one node with two GPUs, and three evaluations of other checkpoints."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    base = record().checkpoint
    others = [base.model_copy(update={"digest": f"{number:016x}"}) for number in range(3)]
    records = [another(record().model_copy(update={"checkpoint": c}), n) for n, c in enumerate(others)]
    return coordinator_on(tmp_path, cluster), cluster, records


def test_the_daemon_stages_the_next_evaluation_while_gpus_are_busy(tmp_path: Path) -> None:
    """Only the second in order, without a GPU; once GPUs come free it is ready at once; the third waits its turn."""
    coordinator, cluster, (first, second, third) = _three(tmp_path)
    running = coordinator.accept(first)
    coordinator.tick()
    (holder,) = (j for j in cluster.submitted if j.purpose == "stage")
    busy = cluster.submit(Job(name="busy", argv=("x",), log="x", gpus=2, node="n1"))
    cluster.advance(1)
    later, last = coordinator.accept(second), coordinator.accept(third)
    coordinator.tick()
    assert not later.state.nodes.prefetches, "not before the first is staged"
    _staged(running.paths, holder.name)
    coordinator.tick()
    coordinator.tick()
    (use,) = later.state.nodes.prefetches.values()
    assert (use.status, later.state.nodes.by_name) == ("staging", {})
    assert not last.state.nodes.prefetches
    job = later.state.jobs.by_name[use.precursor or ""].job
    assert job.gpus == 0
    assert (second, job.memory_mb) == (later.state.record, precursor_memory_mb(second))
    _staged(later.paths, job.name)
    coordinator.tick()
    assert (use.status, later.state.nodes.by_name, later.state.trials.live) == ("ready", {}, {})
    cluster.end(busy)
    coordinator.cancel(first.evaluation_id, "done with")
    coordinator.tick()
    taken = later.state.nodes.by_name["n1"]
    assert (taken.lanes, taken.status, taken.precursor) == (2, "ready", job.name), "no second staging"
    assert sum("-stage-" in n for n in later.state.jobs.by_name) == 1
    assert not running.state.ending.reason + later.state.ending.reason + last.state.ending.reason


def test_a_refused_precursor_costs_an_evaluation_nothing(tmp_path: Path) -> None:
    """What was only tried ahead of GPUs leaves no error behind; with its GPUs the node is staged on as usual."""
    coordinator, cluster, (first, second, _) = _three(tmp_path)
    running = coordinator.accept(first)
    coordinator.tick()
    busy = cluster.submit(Job(name="busy", argv=("x",), log="x", gpus=2, node="n1"))
    cluster.advance(1)
    later = coordinator.accept(second)
    _staged(running.paths, next(j.name for j in cluster.submitted if j.purpose == "stage"))
    coordinator.tick()
    coordinator.tick()
    (use,) = later.state.nodes.prefetches.values()
    holder = use.precursor or ""
    write_outcome(
        later.paths, Failed(name=holder, job="stage", blame="retry", error="no room ahead", node="n1")
    )
    cluster.advance(1)
    cluster.end(later.state.jobs.by_name[holder].job_id, state="FAILED")
    coordinator.tick()
    coordinator.tick()
    assert (use.status, use.precursor, later.state.warnings) == ("over", None, [])
    assert sum("-stage-" in n for n in later.state.jobs.by_name) == 1, "not tried again without GPUs"
    cluster.end(busy)
    coordinator.cancel(first.evaluation_id, "done with")
    coordinator.tick()
    taken = later.state.nodes.by_name["n1"]
    assert (taken.lanes, taken.status, taken.attempts) == (2, "staging", 1)
    assert not later.state.ending.reason


def test_a_copied_checkpoint_has_jobs_of_its_own() -> None:
    """Two folders of one content are two evaluations, and no job of one is taken for the other's."""
    base = record()
    ids = {
        evaluation_id(base.checkpoint.model_copy(update={"source": f"/run/step-{i}"}), base.suite, base.model)
        for i in (1, 2)
    }
    assert len({str(JobName.of(i, "stage", "n1", 0)) for i in ids}) == 2


def _staged(paths: EvaluationPaths, holder: str) -> None:
    write_outcome(
        paths,
        Staged(name=holder, node="n1", path="/s", rung="shm", bytes=1, storage_bytes=1, seconds=1.0),
    )


@pytest.mark.parametrize("fits", [True, False])
def test_the_precursor_itself_keeps_to_its_share_of_the_node(world: NodeMemory, fits: bool) -> None:
    """It stages where its bytes are within the share of what is free there; else it says so, fails, and leaves nothing."""
    checkpoint = world.checkpoint()
    free = room(world.root).free
    share = 1.0 if fits else (checkpoint.bytes + MARGIN) / free / 2
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
def test_weights_that_wait_leave_their_memory_to_who_has_the_gpus(
    free: int, wanted: int, phase: Any, waited: float, others: list[tuple[int, int, bool]]
) -> None:
    """Only where its precursor has waited for memory for three looks and they would make room; no more than that takes,
    the last to be served first, and none that has no memory itself."""

    def holding(number: int, memory_mb: int, priority: int, *, lanes: int, member: Any) -> State:
        rec = record().model_copy(update={"evaluation_id": f"e{number}-s-0000000{number}"})
        rec = rec.model_copy(update={"priority": priority, "accepted_at": float(number)})
        state, _ = machine.start(ev.Accepted(at=0.0, record=rec))
        job = Job(
            name=f"stage-{number}", argv=("x",), log="x", node="n1", memory_mb=memory_mb, purpose="stage"
        )
        info = JobInfo(job=job, members={0: member}, phase="submitted", changed_at=100.0)
        state.jobs.by_name[job.name] = info
        if lanes:
            state.nodes.by_name["n1"] = NodeUse(name="n1", lanes=lanes, status="staging", precursor=job.name)
        else:
            state.nodes.prefetches["n1"] = Prefetch(name="n1", status="staging", precursor=job.name)
        return state

    owner = holding(9, wanted, 0, lanes=2, member=phase)
    waiting = [
        holding(i, mb, p, lanes=0, member="running" if there else "pending")
        for i, (mb, p, there) in enumerate(others)
    ]
    node = dataclasses.replace(fake_node("n1", memory_mb=1000), memory_free_mb=free)
    gone = demand.in_the_way([owner, *waiting], [node], 100.0 + waited)
    waiting = [s for s, (_, _, there) in zip(waiting, others, strict=True) if there]
    held = {
        s.evaluation_id: s.jobs.by_name[s.nodes.prefetches["n1"].precursor or ""].job.memory_mb
        for s in waiting
    }
    room = free + sum(held[name] for name, _ in gone)
    if phase == "running" or waited < 30 or wanted <= free or free + sum(held.values()) < wanted:
        assert not gone
        return
    assert room >= wanted
    assert room - held[gone[-1][0]] < wanted
    order = sorted(waiting, key=lambda s: (-s.record.priority, s.record.accepted_at))
    assert [name for name, _ in gone] == [s.evaluation_id for s in order[::-1][: len(gone)]]


def test_weights_staged_ahead_go_with_their_evaluation(tmp_path: Path) -> None:
    """A cancelled evaluation releases the precursors of nodes whose GPUs it never had."""
    coordinator, cluster, (first, second, _) = _three(tmp_path)
    running = coordinator.accept(first)
    coordinator.tick()
    cluster.submit(Job(name="busy", argv=("x",), log="x", gpus=2, node="n1"))
    cluster.advance(1)
    later = coordinator.accept(second)
    _staged(running.paths, next(j.name for j in cluster.submitted if j.purpose == "stage"))
    coordinator.tick()
    coordinator.tick()
    (use,) = later.state.nodes.prefetches.values()
    _staged(later.paths, use.precursor or "")
    coordinator.tick()
    coordinator.cancel(second.evaluation_id, "done with")
    coordinator.tick()
    assert later.paths.release_file(use.precursor or "").exists()
