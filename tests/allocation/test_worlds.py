"""Nodes that others take, that a limit on jobs keeps away, or that are given back: laws over whole evaluations."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.parts import FakeJob, Faults, record
from support.simulated.shared import Shared, Tenant

from coordinator.allocation import cordons
from coordinator.allocation.demand import LOSS, Use, to_give_back
from coordinator.allocation.job_limits import kept_out
from coordinator.base import clock
from coordinator.cluster import JobState
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.runner import Running


def finish(world: Shared, turns: int) -> float:
    """The time at which all evaluations are scored, with nothing left."""
    world.run(turns)
    for tenant in world.tenants:
        tenant.assert_scored()
        tenant.assert_nothing_left()
    return world.now


class Seized(Shared):
    """From some moment on a node's GPUs go to another user for good, as they become free; at first it is the only one."""

    def __init__(self, seed: int, after: float) -> None:
        super().__init__(seed, Faults())
        self.after, self.names = after, ["n0"]
        self.foreign = {"n0": 0, "n1": 0}
        self.contention = self.outages = 0.0

    def change(self) -> None:
        super().change()
        if self.now >= self.after:
            self.foreign["n0"] += max(0, self.gpus - self.used("n0")[0])
        if self.now >= self.after + 60.0 and "n1" not in self.names:
            self.names.append("n1")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), after=st.floats(0.0, 400.0))
def test_an_evaluation_whose_offered_gpus_are_taken_goes_where_there_is_room(seed: int, after: float) -> None:
    """Evaluations whose only node is taken before their trials start are scored on the next one that is free."""
    finish(Seized(seed, after), 1000)


# --- a limit on this user's jobs -----------------------------------------------------------------------------------------

REASON = "QOSMaxJobsPerUserLimit"
PLACES = 3  # MaxJobsPerUser=4, of which the daemon's own job has one


class Limited(Shared):
    """Three nodes; of all evaluations together so many jobs run, the one that was submitted first before the others."""

    def __init__(self, seed: int, evaluations: int, share: float) -> None:
        super().__init__(seed, Faults())
        self.names, self.gpus, self.memory, self.share = ["n0", "n1", "n2"], 2, 3000, share
        self.foreign = dict.fromkeys(self.names, 0)
        self.contention = self.outages = self.releases = 0.0
        self.limits = type(self.limits)()
        self.arrivals = [0.0] * evaluations
        self.seed, self.order = seed, list[FakeJob]()

    def arrives(self) -> Tenant:
        return Tenant(self.seed, self, len(self.tenants))

    def living(self, phase: str) -> list[FakeJob]:
        jobs = (job for tenant in self.tenants for job in tenant.jobs.values())
        return [job for job in jobs for member in job.members.values() if member.phase == phase]

    def starts(self, job: FakeJob, _dice: random.Random) -> bool:
        self.order += [j for j in self.living("pending") if j not in self.order]
        waiting = [j for j in self.order if any(m.phase == "pending" for m in j.members.values())]
        return len(self.living("running")) < PLACES and job is waiting[0]

    def kept_out(self) -> dict[str, str]:
        full = len(self.living("running")) >= PLACES
        return {j.job.name: REASON for j in self.living("pending")} if full else {}


def test_a_job_that_waits_for_a_limit_is_known_by_its_reason() -> None:
    rows = [
        JobState(job_id=name, name=name, index=0, phase=phase, state=phase.upper(), reason=reason)
        for name, phase, reason in (
            ("a", "pending", REASON),
            ("b", "pending", "Resources"),
            ("c", "running", REASON),
        )
    ]
    assert kept_out(rows) == {"a": REASON}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_three_equal_evaluations_take_no_longer_than_one_after_the_other(seed: int, share: float) -> None:
    """Under the limit each waits at most for those before it: none holds its places with weights that are not used."""
    assert finish(Limited(seed, 3, share), 2000) <= 3 * finish(Limited(seed, 1, share), 2000)


# --- nodes that are given back -------------------------------------------------------------------------------------------

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
    at = {node: [u for u in uses if u.node == node] for node in {u.node for u in uses}}
    hold = {node: sum(u.gpus for u in there) for node, there in at.items()}
    loss = {
        node: (max(LOSS[u.status] for u in there), sum(u.trials for u in there)) for node, there in at.items()
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


class Staging:
    """An evaluation that has begun to stage on the only node, n1, at a time that the test sets."""

    def __init__(self, work: Path, patch: pytest.MonkeyPatch) -> None:
        self.work, self.now = work, 1000.0
        patch.setattr(clock, "now", lambda: self.now)
        self.cluster = FakeCluster(fleet=[fake_node("n1", gpus=2, memory_mb=64_000)])
        self.start()

    def start(self) -> None:
        self.coordinator: Coordinator = coordinator_on(self.work, self.cluster)
        self.running: Running = self.coordinator.accept(record())
        self.coordinator.tick()

    def cordon(self, seconds: float) -> None:
        self.coordinator.cordon(("n1",), self.now + seconds)
        self.coordinator.tick()

    def later(self, seconds: float) -> str:
        """What the node is in after these seconds."""
        self.now += seconds
        self.coordinator.tick()
        return self.running.state.nodes.by_name["n1"].status

    def jobs(self) -> list[str]:
        return [
            j.name
            for j in self.cluster.jobs()
            if j.phase != "ended" and (j.node == "n1" or "-stage-" in j.name)
        ]


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Staging:
    return Staging(tmp_path, monkeypatch)


def test_a_node_that_is_given_back_is_left_alone_until_its_time(staging: Staging) -> None:
    """Its jobs are cancelled and it is offered to no evaluation, by the next coordinator neither; after its time, or where that is
    taken back, it is used again."""
    assert staging.jobs()
    staging.cordon(60)
    assert (staging.later(0), staging.jobs()) == ("withdrawn", [])
    staging.start()
    assert staging.later(59) == "withdrawn"
    assert staging.later(2) == "staging"
    staging.cordon(60)
    staging.cordon(0)
    assert staging.later(0) == "staging"


def test_a_resting_or_retried_node_is_given_back_too(staging: Staging) -> None:
    """A node that rests gives its memory back and does not return by itself; a retry takes no node that is out of use."""
    node = staging.running.state.nodes.by_name["n1"]
    node.status, node.back_off_until = "back-off", staging.now + 5
    staging.cordon(600)
    assert (staging.later(10), staging.jobs()) == ("withdrawn", [])
    staging.coordinator.cancel(record().evaluation_id, "asked")
    for job in staging.cluster.jobs():
        staging.cluster.end(job.job_id)
    staging.later(0)
    assert staging.running.state.ended_at is not None
    staging.coordinator.retry(record().evaluation_id)
    assert staging.later(0) == "withdrawn"
    assert staging.later(600) == "staging"
