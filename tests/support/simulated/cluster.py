"""The cluster's side of the seeded world: members of jobs that run, end and die, by the dice and by what is odd there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.cluster import Job, JobState
from coordinator.evaluation.jobs import PREEMPTED
from coordinator.evaluation.memory import OUT_OF_MEMORY
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import State
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import Built, Cleared, Converted, Executed, Failed, Scored, Staged
from evaljobs.contract.specs import FrameRef, HostSpec, ScoreSpec, TrialSpec
from support.simulated.parts import FakeJob, FakeMember, Faults, ended, too_large


@dataclass
class Odd:
    """What is odd about a cluster, its nodes or the shards; a new one is an ordinary cluster's."""

    # submissions and starts
    unfit: frozenset[str] = frozenset()  # nodes whose jobs are refused
    refused: frozenset[str] = frozenset()  # purposes that are refused there; empty: all
    banned: str = ""  # purpose of jobs that are refused everywhere
    array: int = 1 << 20  # most members of a job array
    submitted: int = 1 << 20  # members that this user may have
    running: int = 1 << 20  # members that run at a time
    host_gpus: int = 1 << 20  # of the largest host that starts
    full: tuple[str, int] = ("", 0)  # purpose whose members do not start, from this one on
    reason: str = ""  # the cluster's word for pending jobs, but for jobs of other purposes than `full`
    unlaunchable: frozenset[str] = frozenset()  # CPU nodes that end a build at once
    # nodes
    bad: dict[str, str] = field(default_factory=dict)  # node -> error of its trials
    blind: bool = False  # those see no GPU
    unready: frozenset[str] = frozenset()  # nodes whose trials die while they load
    private: bool = False  # trials beside a precursor see nothing of its memory
    power_cut: bool = False  # ... the first ones on each node
    preempts: bool = False  # takes each trial's place before it has done anything
    life: float = 0.0  # seconds that the cluster gives a precursor; 0: no limit
    closed: frozenset[str] = frozenset()  # nodes that start no second precursor beside the first
    pace: float = 1.0  # probability that a trial gets something done in a tick
    copied: bool = False  # earlier answers are of a checkpoint with equal samples and other content
    hashes: bool = False  # ... and precursors say the content
    # shards, builds
    poison: dict[str, str] = field(default_factory=dict)  # shard -> error of the trial that holds it
    silent: bool = False  # ... which is a word of the cluster's
    in_order: bool = False  # trials claim as in the real queue: the head of their lane, else of the longest
    builds_from: float = 0.0  # before that time no build ends
    deadly: int = -1  # the build of this entry ends its job; -2: each does
    # memory
    takes_mb: dict[str, int] = field(
        default_factory=dict
    )  # purpose -> MiB; jobs that ask for less are killed
    metric_mb: int = 0  # MiB; workers that have less say of each metric job that it needs more


class Cluster:
    """Runs the members of jobs. What it uses of the coordinator's side is `World`'s."""

    state: State
    record: EvaluationRecord
    dice: random.Random
    faults: Faults
    now: float
    queue: dict[str, tuple[str, float]] | None  # shard -> (lane, rank)
    published: set[str]  # tasks whose request sets early trials find
    claims: dict[str, str]
    rq: set[str]
    specs: dict[str, Any]  # of metric jobs, as they were queued
    given_up: dict[str, str]  # metric jobs -> the queue's reason
    workers_stopped: bool
    drained: set[str]

    def __init__(self) -> None:
        self.odd = Odd()
        self.jobs: dict[str, FakeJob] = {}
        self.outcomes: list[Any] = []
        self.left: list[Any] = []  # every outcome file ever written
        self.dumped: list[tuple[str, FrameRef]] = []
        self.frames: dict[str, int] = {}
        self.converted: set[str] = set()
        self.scored_with: dict[int, int] = {}
        self.fits = 0  # batch size or token budget that always fits
        self.oversized = 0  # batches that did not fit
        self.memory: set[tuple[str, str]] = set()  # (node, holder) that hold staged weights
        self.lanes: dict[tuple[str, int], FakeMember] = {}  # of hosts
        self.deaths: dict[str, int] = {}  # of trials, by shard
        self.died_at: dict[str, int] = {}  # by node
        self.launched: dict[str, str] = {}  # builds that their nodes could not launch -> node
        self.asked_mb: list[int] = []  # by jobs of `Odd.takes_mb`
        self.begun: dict[int, float] = {}  # of precursors with a limit
        self.had: set[str] = set()  # nodes that had weights
        self.gaps = 0  # ticks in which one of those had none, with shards to do

    def of(self, purpose: str) -> list[FakeJob]:
        """The jobs of one purpose that were ever submitted."""
        return [job for job in self.jobs.values() if job.job.purpose == purpose]

    def members(self, *phases: str) -> int:
        """Members of all jobs in these phases."""
        return sum(m.phase in phases for job in self.jobs.values() for m in job.members.values())

    def kill(self, purpose: str, nodes: Iterable[str] | None = None) -> int:
        """End each running member of this purpose, on these nodes or anywhere, without a word; how many there were."""
        killed = 0
        for job in self.of(purpose):
            for index, member in job.members.items():
                if member.phase == "running" and (nodes is None or job.job.node in nodes):
                    self.end_member(job, index, member)
                    killed += 1
        return killed

    def end_member(self, job: FakeJob, _index: int, member: FakeMember) -> None:
        if member.phase == "ended":
            return
        member.phase = "ended"
        self.memory.discard((job.job.node or "", job.job.name))
        if self.dice.random() < self.faults.vanish:
            job.listed = False

    def leave(self, outcome: Any) -> None:
        if isinstance(outcome, Staged) and self.odd.hashes:
            outcome = outcome.model_copy(update={"content": "c"})
        self.outcomes.append(outcome)
        self.left.append(outcome)

    def work(self) -> None:
        """Every running member does a little; some die."""
        for job in list(self.jobs.values()):
            for index, member in job.members.items():
                if member.phase == "pending":
                    member.phase = "running" if self.starts(job, member) else "pending"
                elif member.phase == "running":
                    if self.odd.life and self.now >= (self.ends_at(job, member) or self.now + 1):
                        member.word = "COMPLETED"
                        self.end_member(job, index, member)
                    elif self.lacks_memory(job):
                        member.word = OUT_OF_MEMORY
                        self.end_member(job, index, member)
                    elif self.faults.preempt and job.job.node and self.dice.random() < self.faults.preempt:
                        if job.job.purpose == "trial" and self.dice.random() < 0.7:
                            self.overrun(job, index, member)  # it had the time to hand its shard back
                        else:
                            self.end_member(job, index, member)
                        member.word = PREEMPTED
                    elif self.dice.random() < self.faults.kill:
                        self.end_member(job, index, member)
                    elif job.job.purpose == "trial" and self.dice.random() < self.faults.overrun:
                        self.overrun(job, index, member)
                    else:
                        getattr(self, f"run_{job.job.purpose}")(job, index, member)

    def lacks_memory(self, job: FakeJob) -> bool:
        takes = self.odd.takes_mb.get(job.job.purpose)
        if takes is None:
            return False
        self.asked_mb.append(job.job.memory_mb)
        return job.job.memory_mb < takes

    def starts(self, job: FakeJob, member: FakeMember) -> bool:
        """Has the cluster room for this pending member now?"""
        purpose, first = self.odd.full
        if job.job.purpose == purpose and next(i for i, m in job.members.items() if m is member) >= first:
            return False
        if self.members("running") >= self.odd.running:
            return False
        if job.job.node in self.odd.closed and job.job.node in {node for node, _ in self.memory}:
            return job.job.purpose != "stage" and self.dice.random() < 0.6
        if job.job.purpose == "host" and job.job.gpus > self.odd.host_gpus:
            return False
        return self.dice.random() < 0.6 and job.job.node not in self.drained

    def leaf_tasks(self, entry: str) -> Iterable[str]:
        """What lm-eval makes of an entry."""
        return (entry,)

    def run_build(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.now < self.odd.builds_from:
            return
        if left := sorted(self.odd.unlaunchable - set(job.job.exclude)):
            self.launched[job.job.name] = left[0]
            member.word = "CANCELLED"
            self.end_member(job, index, member)
            return
        for spec in job.specs.values():
            if self.odd.deadly in (spec.entry, -2):
                break
            if self.dice.random() < self.faults.build_fails:
                self.leave(Failed(name=spec.name, job="build", blame="retry", error="no", entry=spec.entry))
            else:
                task = self.record.suite.tasks[spec.entry].name
                sets = {leaf: f"{spec.out_dir}/{leaf}" for leaf in self.leaf_tasks(task)}
                self.leave(
                    Built(name=spec.name, entry=spec.entry, batch_size=8, cut=spec.cut, sets=sets, seconds=1)
                )
        self.end_member(job, index, member)

    def run_convert(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.dice.random() < self.faults.convert_fails:
            self.leave(Failed(name=job.job.name, job="convert", blame="retry", error="no"))
        else:
            (spec,) = job.specs.values()
            self.converted.add(spec.out_dir)
            self.leave(Converted(name=job.job.name, path=spec.out_dir, seconds=1))
        self.end_member(job, index, member)

    def run_stage(self, job: FakeJob, index: int, member: FakeMember) -> None:
        node, what = job.job.node or "", job.job.purpose
        if job.released:
            self.leave(Cleared(name=job.job.name, node=node, freed_bytes=1, reason="released"))
            self.end_member(job, index, member)
        elif (node, job.job.name) not in self.memory:
            if self.dice.random() < self.faults.stage_fails:
                self.leave(Failed(name=job.job.name, job=what, blame="retry", error="ENOSPC", node=node))
                self.end_member(job, index, member)
                return
            self.memory.add((node, job.job.name))
            self.leave(
                Staged(
                    name=job.job.name, node=node, path="/s", rung="shm", bytes=1, storage_bytes=1, seconds=1
                )
            )

    def run_host(self, job: FakeJob, index: int, member: FakeMember) -> None:
        """One job stages, runs its lanes, and ends when all have ended."""
        (spec,) = job.specs.values()
        assert isinstance(spec, HostSpec)
        name, node = job.job.name, spec.stage.node
        if (node, name) not in self.memory:
            self.run_stage(job, index, member)
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
        name = spec.trial.lanes[lane].trial
        if self.dice.random() < self.faults.kill:
            member.phase = "ended"
            self.fail_trial(name, spec.stage.node, "was killed")
            return
        child = dataclasses.replace(job.job, name=name, purpose="host")
        self.run_trial(dataclasses.replace(job, job=child, specs={name: spec.trial}), lane, member)

    def fail_trial(self, trial: str, node: str, error: str, **more: Any) -> None:
        self.leave(Failed(name=trial, job="trial", blame="retry", error=error, node=node, **more))

    def overrun(self, job: FakeJob, index: int, member: FakeMember) -> None:
        spec: TrialSpec = next(iter(job.specs.values()))
        lane = spec.lanes[index]
        for shard in [s for s, t in self.claims.items() if t == lane.trial]:
            del self.claims[shard]
            if self.queue is not None:
                self.queue[shard] = (lane.lane, 0.0)
        self.leave(ended(spec.node, lane.trial, "terminated"))
        member.word = "TIMEOUT"
        self.end_member(job, index, member)

    def ends_early(self, job: FakeJob, index: int, member: FakeMember, trial: str, node: str) -> bool:
        """Does the trial end before it has held a shard?"""
        odd = self.odd
        first = odd.power_cut and job.job.name.endswith("-a0")
        if odd.preempts:
            member.word = PREEMPTED
        elif job.job.purpose == "trial" and (odd.private or first):
            self.fail_trial(trial, node, "nothing", unstaged=True)
        elif odd.blind and node in odd.bad:
            self.died_at[node] = self.died_at.get(node, 0) + 1
            self.fail_trial(trial, node, "sees none", unfit=True)
        elif node in odd.unready:
            self.died_at[node] = self.died_at.get(node, 0) + 1
            self.fail_trial(trial, node, "no model")
        else:
            return False
        self.end_member(job, index, member)
        return True

    def run_trial(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.odd.pace < 1 and self.dice.random() >= self.odd.pace:
            return
        spec: TrialSpec = next(iter(job.specs.values()))
        trial, node, odd = spec.lanes[index].trial, spec.node, self.odd
        if self.ends_early(job, index, member, trial, node):
            return
        held = [s for s, t in self.claims.items() if t == trial]
        for shard in held:
            if self.oversize(node, trial, shard):
                del self.claims[shard]
                continue
            if error := odd.bad.get(node) or odd.poison.get(shard):
                self.die_with(trial, node, shard, error)
                self.end_member(job, index, member)
                return
            self.frames[shard] = self.frames.get(shard, 0) + 1
            self.dumped.append((shard, self.answer(shard, trial)))
            del self.claims[shard]
        if self.queue is None:
            return  # waits
        lane = spec.lanes[index].lane
        open_ = [s for s in sorted(self.queue) if self.record.options.steal or self.queue[s][0] == lane]
        if not open_:
            self.leave(ended(spec.node, trial, "drained"))
            self.end_member(job, index, member)
            return
        if odd.in_order:
            lanes: dict[str, list[tuple[float, str]]] = {}
            for shard, (where, rank) in self.queue.items():
                lanes.setdefault(where, []).append((rank, shard))
            self.claim(job, index, member, min(lanes.get(lane) or max(lanes.values(), key=len))[1])
            return
        self.claim(job, index, member, self.dice.choice(open_))

    def die_with(self, trial: str, node: str, shard: str, error: str) -> None:
        """The trial fails while it holds the shard, which it gives back; a silent one says nothing, and gives nothing back."""
        known = self.state.shards.by_name[shard]
        if known.frame is None and not known.quarantined:
            self.deaths[shard] = self.deaths.get(shard, 0) + 1
        self.died_at[node] = self.died_at.get(node, 0) + 1
        if self.odd.silent:
            for job in self.jobs.values():
                for index, member in job.members.items():
                    if trial in f"{job.job.name}.{index}":
                        member.word = error
            return
        del self.claims[shard]
        if self.queue is not None and not known.quarantined:
            self.queue[shard] = (known.lane, known.rank)
        self.fail_trial(trial, node, error, shard=shard)

    def answer(self, _shard: str, trial: str) -> FrameRef:
        """The place of its record."""
        return FrameRef(file=f"{trial}.frames", offset=sum(self.frames.values()), length=1)

    def oversize(self, node: str, trial: str, shard: str) -> bool:
        """Does a batch of the shard not fit? Then the trial leaves an outcome and drops the shard."""
        cut = Cut.parse(ShardId.parse(shard).cut or "8")
        size = cut.token_budget or cut.batch_size
        leaf = self.state.shards.leaves.get(ShardId.parse(shard).task)
        if cut.token_budget and leaf is not None and leaf.planned.executes:
            return False  # it generates, which the budget does not cut
        if not self.faults.too_large or size <= self.fits or self.dice.random() >= self.faults.too_large:
            return False
        self.oversized += 1
        self.leave(too_large(shard, trial, node, self.oversized))
        return True

    def claim(self, job: FakeJob, index: int, member: FakeMember, shard: str) -> None:
        """Take it from the queue; a trial that was not told of its task leaves it there, and ends."""
        spec: TrialSpec = next(iter(job.specs.values()))
        trial = spec.lanes[index].trial
        later = self.published if spec.request_sets_file is not None else set()
        if ShardId.parse(shard).task not in spec.request_sets.keys() | later:
            self.leave(ended(spec.node, trial, "outdated"))
            self.end_member(job, index, member)
            return
        assert self.queue is not None
        del self.queue[shard]
        self.claims[shard] = trial

    def run_metric(self, job: FakeJob, index: int, member: FakeMember) -> None:
        if self.workers_stopped:
            self.end_member(job, index, member)
            return
        short = job.job.memory_mb < self.odd.metric_mb
        for name in sorted(self.rq):
            if self.faults.metric_slow and self.dice.random() < self.faults.metric_slow:
                continue
            self.rq.discard(name)
            metric = self.state.scoring.metrics[name]
            if short:
                told: Any = {"entry": metric.entry, "memory_mb": job.job.memory_mb}
                self.leave(Failed(name=name, job=metric.kind, blame="retry", error="short", **told))
            elif self.faults.metric_dies and self.dice.random() < self.faults.metric_dies:
                self.given_up[name] = "abandoned"
            elif self.dice.random() < self.faults.metric_fails:
                self.leave(
                    Failed(name=name, job=metric.kind, blame="retry", error="boom", entry=metric.entry)
                )
            elif metric.kind == "execute":
                self.leave(Executed(name=name, task=metric.task, documents=1, programs=1, seconds=1))
            else:
                spec: Any = self.specs[name]
                self.check_score(spec)
                self.scored_with[metric.entry] = self.scored_with.get(metric.entry, 0) + 1
                unscored = {"t 1": "hung"} if self.dice.random() < self.faults.item_fails else {}
                file = self.score_file(spec)
                self.leave(
                    Scored(name=name, entry=metric.entry, result_file=file, seconds=1, unscored=unscored)
                )

    def check_score(self, spec: ScoreSpec) -> None:
        for task, frames in spec.frames.items():
            leaf = self.state.shards.leaves[self.state.entries[spec.entry].leaves[task]]
            assert len(frames) == len(leaf.planned.shards), "a partial score"

    def score_file(self, _spec: ScoreSpec) -> str:
        return "/r"

    def listing(self) -> list[JobState]:
        rows = []
        for job in self.jobs.values():
            for index, member in job.members.items():
                if not job.listed and member.phase == "ended":
                    continue  # what vanishes is what has ended: a member that runs is shown
                rows.append(
                    JobState(
                        job_id=job.job_id,
                        name=job.job.name,
                        index=index,
                        phase=member.phase,  # type: ignore[arg-type]
                        state=member.word or member.phase.upper(),
                        ends_at=self.ends_at(job, member),
                        node=self.launched.get(job.job.name),
                        reason=self.reason_of(job) if member.phase == "pending" else "",
                    )
                )
        return rows

    def reason_of(self, job: FakeJob) -> str:
        return self.odd.reason if self.odd.full[0] in ("", job.job.purpose) else ""

    def ends_at(self, job: FakeJob, member: FakeMember) -> float | None:
        """By its time limit; None: this cluster has none."""
        if not self.odd.life or job.job.purpose != "stage" or member.phase != "running":
            return None
        return self.begun.setdefault(id(member), self.now) + self.odd.life

    def began(self, job: Job, _index: int) -> bool:
        """Has this member a log?"""
        return job.name not in self.launched
