"""Nodes that are given back: those that cost the least, and not taken again before their time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.parts import record

from coordinator.allocation import cordons
from coordinator.allocation.demand import LOSS, Use, to_give_back
from coordinator.base import clock
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.runner import Running

USES = st.lists(
    st.builds(
        Use,
        evaluation_id=st.sampled_from(["a", "b"]),
        node=st.sampled_from(["n1", "n2", "n3", "n4"]),
        status=st.sampled_from(list(LOSS)),
        gpus=st.integers(0, 8),
        trials=st.integers(0, 8),
    ),
    max_size=8,
    unique_by=lambda use: (use.evaluation_id, use.node),
)


@given(USES, st.integers(1, 40))
def test_as_many_nodes_as_are_asked_for_and_the_cheapest(uses: list[Use], gpus: int) -> None:
    """No node without GPUs; enough, where there are enough; none too many; none that loses more than one that is kept."""
    chosen = to_give_back(uses, gpus)
    hold = {n: sum(u.gpus for u in uses if u.node == n) for n in {u.node for u in uses}}
    loss = {
        n: (
            max(LOSS[u.status] for u in uses if u.node == n),
            sum(u.trials for u in uses if u.node == n),
        )
        for n in hold
    }
    assert all(hold[n] for n in chosen)
    assert sum(hold[n] for n in chosen) >= min(gpus, sum(hold.values()))
    assert sum(hold[n] for n in chosen[:-1]) < gpus
    kept = [n for n in hold if hold[n] and n not in chosen]
    assert all(loss[a] <= loss[b] for a, b in itertools.product(chosen, kept))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 100)), max_size=8))
def test_the_last_word_on_a_node_counts_until_its_time_is_over(
    tmp_path_factory: pytest.TempPathFactory, words: list[tuple[str, float, float]]
) -> None:
    """Out of use to the second; a time that is over takes back what was said before; nothing else is forgotten."""
    path = tmp_path_factory.mktemp("w") / "nodes.json"
    said: dict[str, float] = {}
    now = 0.0
    for node, until, passed in words:
        now += passed
        left = cordons.cordon(path, [node], until, now)
        said[node] = until
        assert left == cordons.read(path, now) == {n: at for n, at in said.items() if at > now}


def staging(tmp_path: Path) -> tuple[FakeCluster, Coordinator, Running]:
    """An evaluation that has begun to stage on the only node, n1."""
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record())
    coordinator.tick()
    return cluster, coordinator, running


def test_a_node_that_is_given_back_is_left_alone_until_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs are cancelled and it is offered to no evaluation, by the next coordinator neither; after its time, or where that is
    taken back, it is used again."""
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    cluster, coordinator, running = staging(tmp_path)
    (holder,) = (j for j in cluster.submitted if j.purpose == "stage")
    coordinator.cordon(("n1",), now + 60)
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].status == "withdrawn"
    assert not [j for j in cluster.jobs() if j.name == holder.name and j.phase != "ended"]
    coordinator = coordinator_on(tmp_path, cluster)
    running = coordinator.accept(record())
    now += 59
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].status == "withdrawn"
    now += 2
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].status == "staging"
    coordinator.cordon(("n1",), now + 60)
    coordinator.tick()
    coordinator.cordon(("n1",), now)
    coordinator.tick()
    assert running.state.nodes.by_name["n1"].status == "staging"


def test_a_resting_or_retried_node_is_given_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that rests gives its memory back and does not return by itself; a retry takes no node that is out of use."""
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    cluster, coordinator, running = staging(tmp_path)
    node = running.state.nodes.by_name["n1"]
    node.status, node.back_off_until = "back-off", now + 5
    coordinator.cordon(("n1",), now + 600)
    assert node.status == "withdrawn"
    now += 10
    coordinator.tick()
    assert node.status == "withdrawn"
    assert not [j for j in cluster.jobs() if j.node == "n1" and j.phase != "ended"]
    coordinator.cancel(record().evaluation_id, "asked")
    for job in cluster.jobs():
        cluster.end(job.job_id)
    coordinator.tick()
    assert running.state.ended_at is not None
    coordinator.retry(record().evaluation_id)
    coordinator.tick()
    assert node.status == "withdrawn"
    now += 600
    coordinator.tick()
    assert node.status == "staging"
