"""Hosts in the simulated world: whatever dies, every entry is scored and nothing is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import FakeJob, FakeMember, Faults, record
from support.simulated.world import World, replay

from coordinator.cluster import JobState
from evaljobs.contract.outcomes import Cleared, Failed, Staged
from evaljobs.contract.specs import HostSpec


class HostWorld(World):
    """A site where every node is served by one job: it stages, runs its lanes, and ends when all have ended."""

    def __init__(self, seed: int, faults: Faults, nodes: int = 2, *, hosting: bool = True) -> None:
        self.lanes: dict[tuple[str, int], FakeMember] = {}
        super().__init__(seed, faults, record(host_trials=hosting), nodes)

    def run_stage(self, *_anything: object) -> None:
        raise AssertionError("a precursor on a site that has no use for it")

    def run_host(self, job: FakeJob, index: int, member: FakeMember) -> None:
        (spec,) = job.specs.values()
        assert isinstance(spec, HostSpec)
        name, node = job.job.name, spec.stage.node
        if (node, name) not in self.memory:
            if self.dice.random() < self.faults.stage_fails:
                self.leave(Failed(name=name, job="host", blame="retry", error="ENOSPC", node=node))
                self.end_member(job, index, member)
                return
            self.memory.add((node, name))
            self.leave(
                Staged(name=name, node=node, path="/s", rung="shm", bytes=1, storage_bytes=1, seconds=1)
            )
            return
        for lane in range(len(spec.trial.lanes)):
            self._run_lane(job, spec, lane)
        if all(self.lanes[job.job_id, i].phase == "ended" for i in range(len(spec.trial.lanes))):
            self.leave(Cleared(name=name, node=node, freed_bytes=1, reason="its trials ended"))
            self.end_member(job, index, member)

    def _run_lane(self, job: FakeJob, spec: HostSpec, lane: int) -> None:
        member = self.lanes.setdefault((job.job_id, lane), FakeMember(phase="running"))
        if member.phase == "ended":
            return
        trial = spec.trial.lanes[lane].trial
        if self.dice.random() < self.faults.kill:
            member.phase = "ended"
            self.leave(
                Failed(name=trial, job="trial", blame="retry", error="was killed", node=spec.stage.node)
            )
            return
        child = dataclasses.replace(
            job, job=dataclasses.replace(job.job, name=trial, purpose="host"), specs={trial: spec.trial}
        )
        self.run_trial(child, lane, member)


def trials_of(world: World) -> set[str]:
    return {n.split("-")[2] for n in (j.job.name for j in world.jobs.values())}


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3))
def test_undisturbed_hosts_score_everything_and_leave_nothing(seed: int, nodes: int) -> None:
    """Each entry is scored once, no precursor and no array of trials is submitted, no memory is held at the end."""
    world = HostWorld(seed, Faults(), nodes)
    world.run_to_scores()
    assert trials_of(world) == {"build", "host", "metric"}
    assert not world.memory
    assert all(n == 1 for n in world.frames.values())


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), kill=st.floats(0, 0.02), nodes=st.integers(1, 3))
def test_hosts_survive_what_dies_now_and_then(seed: int, kill: float, nodes: int) -> None:
    """Killed hosts, killed children, failed stagings, lost submissions, restarts: scored, or ended with a reason."""
    world: Any = HostWorld(
        seed,
        Faults(
            kill=kill,
            submit_lost=0.05,
            submit_timeout=0.05,
            vanish=0.2,
            listing=0.2,
            wipe_queue=0.03,
            restart=0.05,
            node_down=0.01,
            stage_fails=0.05,
            slow_outcome=0.3,
        ),
        nodes,
    )
    world.run()
    assert replay(world.journal) == world.state
    open_entries = [e for e in world.state.entries if e.status != "scored"]
    assert world.state.ending.reason or all("times" in e.error for e in open_entries), world.summary()
    world.assert_nothing_left()


class PrivateWorld(HostWorld):
    """/dev/shm is private, and no setting said so: trials beside a precursor see nothing of it."""

    def __init__(self, seed: int, faults: Faults, nodes: int = 2) -> None:
        super().__init__(seed, faults, nodes, hosting=False)

    def run_stage(self, job: FakeJob, index: int, member: FakeMember) -> None:
        World.run_stage(self, job, index, member)

    def run_trial(self, job: FakeJob, index: int, member: FakeMember) -> None:
        spec = next(iter(job.specs.values()))
        if job.job.purpose == "trial":
            trial = spec.lanes[index].trial
            self.leave(
                Failed(name=trial, job="trial", blame="retry", error="nothing", node=spec.node, unstaged=True)
            )
            self.end_member(job, index, member)
        else:
            super().run_trial(job, index, member)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3))
def test_a_node_whose_trials_see_nothing_turns_to_hosting(seed: int, nodes: int) -> None:
    """Two precursors in a row were not seen: hosted, there and elsewhere; everything is scored and nothing is left."""
    world = PrivateWorld(seed, Faults(slow_outcome=0.2, restart=0.05), nodes)
    world.run_to_scores()
    assert not world.memory
    used = [n for n in world.state.nodes.by_name.values() if n.rung]
    assert any(n.rung == "host" for n in used)
    assert any("private" in w for w in world.state.warnings)
    assert replay(world.journal) == world.state


class PowerCutWorld(World):
    """A node lost its memory between staging and the first trials, and the cluster has not noticed: once, on each node."""

    def run_trial(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if job.job.name.endswith("-a0"):
            (spec,) = job.specs.values()
            trial, node = spec.lanes[index].trial, spec.node
            self.leave(
                Failed(name=trial, job="trial", blame="retry", error="nothing", node=node, unstaged=True)
            )
            self.end_member(job, index, member)
        else:
            super().run_trial(job, index, member)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 3))
def test_a_node_that_lost_its_memory_is_staged_again(seed: int, nodes: int) -> None:
    """It is no site whose /dev/shm is private: no trial is hosted, everything is scored."""
    world = PowerCutWorld(seed, Faults(slow_outcome=0.2, restart=0.05, listing=0.2), nodes=nodes)
    world.run_to_scores()
    assert not world.memory
    assert not any(n.hosted for n in world.state.nodes.by_name.values())
    assert any(n.unseen for n in world.state.nodes.by_name.values())
    assert replay(world.journal) == world.state


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_hosts_that_never_stage_end_with_a_reason(seed: int) -> None:
    """Where no host can stage the evaluation fails in words; it never waits for a node that will not come."""
    world = HostWorld(seed, Faults(stage_fails=1.0))
    world.run()
    assert all(e.status == "failed" and e.error for e in world.state.entries), world.summary()


class OneJob(HostWorld):
    """A site that runs one job of this user at a time."""

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__(seed, faults, 1, hosting=False)

    def run_stage(self, *job: Any) -> None:
        World.run_stage(self, *job)

    def starts(self, job: FakeJob, member: FakeMember) -> bool:
        running = (m.phase == "running" for j in self.jobs.values() for m in j.members.values())
        return not any(running) and super().starts(job, member)

    def listing(self) -> list[JobState]:
        rows = super().listing()
        return [
            dataclasses.replace(r, reason="AssocMaxJobsLimit") if r.phase == "pending" else r for r in rows
        ]


@pytest.mark.parametrize("seed", range(8))
def test_where_one_job_may_run_at_a_time_it_hosts_the_trials(seed: int) -> None:
    """The precursor of the only node leaves no place for a build or a trial, and gives way."""
    world = OneJob(seed, Faults(restart=0.01))
    world.run_to_scores()
    (node,) = world.state.nodes.by_name.values()
    assert node.hosted
    assert any("AssocMaxJobsLimit" in warning for warning in world.state.warnings)


class FewCpus(HostWorld):
    """A site that hosts trials and whose limit holds the CPUs of a host with one lane."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Faults(restart=0.01), 2)

    def starts(self, job: FakeJob, member: FakeMember) -> bool:
        return (job.job.purpose != "host" or job.job.gpus == 1) and super().starts(job, member)

    def listing(self) -> list[JobState]:
        rows = super().listing()
        return [dataclasses.replace(r, reason="QOSGrpCpuLimit") if r.phase == "pending" else r for r in rows]


@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_is_larger_than_a_limit_gets_fewer_lanes(seed: int) -> None:
    """After ten minutes in which no job of the evaluation could run."""
    world = FewCpus(seed)
    world.run_to_scores()
    assert any(j.job.gpus == 2 for j in world.jobs.values())
    assert any(node.lanes == 1 for node in world.state.nodes.by_name.values())
