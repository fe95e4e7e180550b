"""The cluster's side of the seeded world: members of jobs that run, end and die, by the dice and by what is odd there."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from coordinator.decide.evaluation.footprint import OUT_OF_MEMORY
from coordinator.decide.evaluation.jobs import PREEMPTED
from coordinator.decide.evaluation.state import State
from coordinator.runtime import detect
from coordinator.site.cluster import JobState
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import Built, Cleared, Converted, Executed, Failed, Scored, Staged
from evaljobs.contract.specs import FrameRef
from support.simulated.parts import FakeMember, ended, too_large


class Cluster:
    """Runs the members of jobs."""

    state: State

    def __init__(self, seed, faults, rec, odd):
        self.dice, self.faults, self.record, self.odd = random.Random(seed), faults, rec, odd
        self.now = 0.0
        # what both sides see: journal, queue, claims, metric jobs
        self.journal = []
        self.queue = None  # shard -> (lane, rank)
        self.epoch = None
        self.published = set()  # tasks whose request sets early trials find
        self.claims = {}
        self.rq = set()
        self.specs = {}  # of metric jobs, as they were queued
        self.given_up = {}  # metric jobs -> the queue's reason
        self.workers_stopped, self.drained = False, set[str]()
        self.seen = detect.Sightings()
        self.called = []  # submissions whose turn has not come
        self.jobs = {}
        self.outcomes = []
        self.left = []  # every outcome file ever written
        self.dumped = []
        self.converted = set()
        self.memory = set()  # (node, holder) that hold staged weights
        self.lanes = {}  # of hosts
        self.launched = {}  # builds that their nodes could not launch -> node
        # counts for tests
        self.frames = Counter[str]()  # answers of a shard
        self.scored_with = Counter[int]()  # scores of an entry
        self.enqueued = Counter[str]()  # a metric job
        self.deaths = Counter[str]()  # of trials, by shard
        self.died_at = Counter[str]()  # by node
        self.oversized, self.fits = 0, odd.fits  # batches that did not fit, and the size of those that do
        self.refusals = {}  # job -> times at which a limit kept it out
        self.asked_mb = []  # by jobs of `Odd.takes_mb`

    def of(self, purpose):
        """The jobs of one purpose that were ever submitted."""
        return [job for job in self.jobs.values() if job.job.purpose == purpose]

    def members(self, *phases):
        """Members of all jobs in these phases."""
        return sum(m.phase in phases for job in self.jobs.values() for m in job.members.values())

    def kill(self, purpose="", nodes=None):
        """End each running member of this purpose, on these nodes or anywhere, without a word; how many there were."""
        running = [
            (job, member)
            for job in (self.of(purpose) if purpose else self.jobs.values())
            for member in job.members.values()
            if member.phase == "running" and (nodes is None or job.job.node in nodes)
        ]
        for job, member in running:
            self.end_member(job, member)
        return len(running)

    def end_member(self, job, member, word=""):
        if member.phase == "ended":
            return
        member.phase, member.word = "ended", word or member.word
        self.memory.discard((job.job.node or "", job.job.name))
        if self.dice.random() < self.faults.vanish:
            job.listed = False

    def leave(self, outcome):
        if isinstance(outcome, Staged) and self.odd.hashes:
            outcome = outcome.model_copy(update={"content": "c"})
        self.outcomes.append(outcome)
        self.left.append(outcome)

    def fail(self, name, job, error, **more):
        self.leave(Failed(name=name, job=job, blame="retry", error=error, **more))

    def work(self):
        """Every running member does a little; some die."""
        for job in list(self.jobs.values()):
            for member in job.members.values():
                if member.phase == "pending":
                    member.phase = "running" if self.starts(job, member) else "pending"
                elif member.phase == "running" and not self.ends(job, member):
                    getattr(self, f"run_{job.job.purpose}")(job, member)

    def ends(self, job, member):
        """Does the cluster end this member before it gets anything done?"""
        trial, roll, takes = (
            job.job.purpose == "trial",
            self.dice.random,
            self.odd.takes_mb.get(job.job.purpose),
        )
        if takes is not None:
            self.asked_mb.append(job.job.memory_mb)
        word = ""
        if self.odd.life and self.now >= (self.ends_at(job, member) or self.now + 1):
            word = "COMPLETED"
        elif takes is not None and job.job.memory_mb < takes:
            word = OUT_OF_MEMORY
        elif self.faults.preempt and job.job.node and roll() < self.faults.preempt:
            word = PREEMPTED
            if trial and roll() < 0.7:
                self.hand_back(job, member)  # it had the time
        elif roll() >= self.faults.kill:
            if not trial or roll() >= self.faults.overrun:
                return False
            word = "TIMEOUT"
            self.hand_back(job, member)
        self.end_member(job, member, word)
        return True

    def starts(self, job, member):
        """Has the cluster room for this pending member now?"""
        purpose, first = self.odd.full
        if (job.job.purpose == purpose and member.index >= first) or self.members(
            "running"
        ) >= self.odd.running:
            return False
        if job.job.purpose == "host" and job.job.gpus > self.odd.host_gpus:
            return False
        return self.dice.random() < 0.6 and job.job.node not in self.drained

    def leaf_tasks(self, entry):
        """What lm-eval makes of an entry."""
        return (entry,)

    def run_build(self, job, member):
        if self.now < self.odd.builds_from:
            return
        if left := sorted(self.odd.unlaunchable - set(job.job.exclude)):
            self.launched[job.job.name] = left[0]
            self.end_member(job, member, "CANCELLED")
            return
        for spec in job.specs.values():
            if self.odd.deadly in (spec.entry, -2):
                break
            if self.dice.random() < self.faults.build_fails:
                self.fail(spec.name, "build", "no", entry=spec.entry)
            else:
                task = self.record.suite.tasks[spec.entry].name
                sets = {leaf: f"{spec.out_dir}/{leaf}" for leaf in self.leaf_tasks(task)}
                known = {"entry": spec.entry, "cut": spec.cut, "sets": sets}
                self.leave(Built(name=spec.name, batch_size=8, seconds=1, **known))
        self.end_member(job, member)

    def run_convert(self, job, member):
        if self.dice.random() < self.faults.convert_fails:
            self.fail(job.job.name, "convert", "no")
        else:
            self.converted.add(job.spec.out_dir)
            self.leave(Converted(name=job.job.name, path=job.spec.out_dir, seconds=1))
        self.end_member(job, member)

    def run_stage(self, job, member):
        name, node = job.job.name, job.job.node or ""
        if job.released:
            self.leave(Cleared(name=name, node=node, freed_bytes=1, reason="released"))
            self.end_member(job, member)
        elif (node, name) in self.memory:
            pass
        elif self.dice.random() < self.faults.stage_fails:
            self.fail(name, job.job.purpose, "ENOSPC", node=node)
            self.end_member(job, member)
        else:
            self.memory.add((node, name))
            where = {"node": node, "path": "/s", "rung": "shm"}
            self.leave(Staged(name=name, bytes=1, storage_bytes=1, seconds=1, **where))

    def run_host(self, job, member):
        """One job stages, runs its lanes, and ends when all have ended."""
        name, node, spec = job.job.name, job.spec.stage.node, job.spec.trial
        if (node, name) not in self.memory:
            self.run_stage(job, member)
            return
        there = [
            self.lanes.setdefault((job.job_id, lane), FakeMember(phase="running", index=lane))
            for lane in range(len(spec.lanes))
        ]
        for lane in there:
            trial = spec.lanes[lane.index].trial
            child = dataclasses.replace(
                job, job=dataclasses.replace(job.job, name=trial), specs={trial: spec}
            )
            if lane.phase == "ended":
                continue
            if self.dice.random() < self.faults.kill:
                lane.phase = "ended"
                self.fail(trial, "trial", "was killed", node=node)
            else:
                self.run_trial(child, lane)
        if all(lane.phase == "ended" for lane in there):
            self.leave(Cleared(name=name, node=node, freed_bytes=1, reason="its trials ended"))
            self.end_member(job, member)

    def hand_back(self, job, member):
        """The trial is told to end: what it holds is in the queue again."""
        lane = job.spec.lanes[member.index]
        for shard in self.held(lane.trial):
            del self.claims[shard]
            if self.queue is not None:
                self.queue[shard] = (lane.lane, 0.0)
        self.leave(ended(job.spec.node, lane.trial, "terminated"))

    def held(self, trial):
        return [shard for shard, holder in self.claims.items() if holder == trial]

    def ends_early(self, job, member, trial, node):
        """Does the trial end before it has held a shard?"""
        odd, word = self.odd, ""
        first = odd.power_cut and job.job.name.endswith("-a0")
        if odd.preempts:
            word = PREEMPTED
        elif job.job.purpose == "trial" and (odd.private or first):
            self.fail(trial, "trial", "nothing", node=node, unstaged=True)
        elif (odd.blind and node in odd.bad) or node in odd.unready:
            self.died_at[node] += 1
            self.fail(trial, "trial", "no model or GPU", node=node, unfit=odd.blind and node in odd.bad)
        else:
            return False
        self.end_member(job, member, word)
        return True

    def run_trial(self, job, member):
        if self.odd.pace < 1 and self.dice.random() >= self.odd.pace:
            return
        spec, odd = job.spec, self.odd
        trial, node, lane = spec.lanes[member.index].trial, spec.node, spec.lanes[member.index].lane
        if self.ends_early(job, member, trial, node):
            return
        for shard in self.held(trial):
            if self.oversize(node, trial, shard):
                del self.claims[shard]
                continue
            if error := odd.bad.get(node) or odd.poison.get(shard):
                self.die_with(trial, node, shard, error)
                self.end_member(job, member, error if odd.silent else "")
                return
            self.frames[shard] += 1
            self.dumped.append((shard, self.answer(shard, trial)))
            del self.claims[shard]
        if self.queue is None:
            return  # waits
        open_ = [s for s in sorted(self.queue) if self.record.options.plan.steals or self.queue[s][0] == lane]
        if not open_:
            self.leave(ended(node, trial, "drained"))
            self.end_member(job, member)
        elif odd.in_order:
            lanes = {}
            for shard, (where, rank) in self.queue.items():
                lanes.setdefault(where, []).append((rank, shard))
            self.claim(job, member, trial, min(lanes.get(lane) or max(lanes.values(), key=len))[1])
        else:
            self.claim(job, member, trial, self.dice.choice(open_))

    def die_with(self, trial, node, shard, error):
        """The trial fails while it holds the shard, which it gives back; a silent one says nothing, and gives nothing back."""
        known = self.state.shards.by_name[shard]
        self.deaths[shard] += known.frame is None and not known.quarantined
        self.died_at[node] += 1
        if self.odd.silent:
            return
        del self.claims[shard]
        if self.queue is not None and not known.quarantined:
            self.queue[shard] = (known.lane, known.rank)
        self.fail(trial, "trial", error, node=node, shard=shard)

    def answer(self, _shard, trial):
        """The place of its record."""
        return FrameRef(file=f"{trial}.frames", offset=self.frames.total(), length=1)

    def oversize(self, node, trial, shard):
        """Does a batch of the shard not fit? Then the trial leaves an outcome and drops the shard."""
        cut = Cut.parse(ShardId.parse(shard).cut or "8")
        leaf = self.state.shards.leaves.get(ShardId.parse(shard).task)
        if cut.token_budget and leaf is not None and leaf.planned.executes:
            return False  # it generates, which the budget does not cut
        fits = (cut.token_budget or cut.batch_size) <= self.fits
        if not self.faults.too_large or fits or self.dice.random() >= self.faults.too_large:
            return False
        self.oversized += 1
        self.leave(too_large(shard, trial, node, name=f"{trial}.{self.oversized}"))
        return True

    def claim(self, job, member, trial, shard):
        """Take it from the queue; a trial that was not told of its task leaves it there, and ends."""
        spec = job.spec
        later = self.published if spec.request_sets_file is not None else set()
        if ShardId.parse(shard).task not in spec.request_sets.keys() | later:
            self.leave(ended(spec.node, trial, "outdated"))
            self.end_member(job, member)
            return
        assert self.queue is not None
        del self.queue[shard]
        self.claims[shard] = trial

    def run_metric(self, job, member):
        if self.workers_stopped or self.odd.ends_workers:
            self.end_member(job, member)
            return
        roll, faults, has = self.dice.random, self.faults, job.job.memory_mb
        for name in sorted(self.rq):
            if faults.metric_slow and roll() < faults.metric_slow:
                continue
            self.rq.discard(name)
            metric = self.state.scoring.metrics[name]
            if has < self.odd.metric_mb:
                self.fail(name, metric.kind, "short", entry=metric.entry, memory_mb=has)
            elif faults.metric_dies and roll() < faults.metric_dies:
                self.given_up[name] = "abandoned"
            elif roll() < faults.metric_fails:
                self.fail(name, metric.kind, "boom", entry=metric.entry)
            elif metric.kind == "execute":
                self.leave(Executed(name=name, task=metric.task, documents=1, programs=1, seconds=1))
            else:
                spec = self.specs[name]
                self.check_score(spec)
                self.scored_with[metric.entry] += 1
                told = {
                    "entry": metric.entry,
                    "unscored": {"t 1": "hung"} if roll() < faults.item_fails else {},
                }
                self.leave(Scored(name=name, result_file=self.score_file(spec), seconds=1, **told))

    def check_score(self, spec):
        for task, frames in spec.frames.items():
            leaf = self.state.shards.leaves[self.state.entries[spec.entry].leaves[task]]
            assert spec.documents or len(frames) == len(leaf.planned.shards), "a partial score"

    def score_file(self, _spec):
        return "/r"

    def listing(self):
        """What vanishes is what has ended: a member that runs is shown."""
        return [
            JobState(
                job_id=job.job_id,
                name=job.job.name,
                index=index,
                phase=member.phase,
                state=member.word or member.phase.upper(),
                node=self.launched.get(job.job.name),
                reason=self.reason_of(job) if member.phase == "pending" else "",
            )
            for job in self.jobs.values()
            for index, member in job.members.items()
            if job.listed or member.phase != "ended"
        ]

    def reason_of(self, job):
        return self.odd.reason if self.odd.full[0] in ("", job.job.purpose) else ""

    def ends_at(self, job, member):
        """By its time limit; None: this cluster has none."""
        if not self.odd.life or job.job.purpose != "stage" or member.phase != "running":
            return None
        member.begun = self.now if member.begun is None else member.begun
        return member.begun + self.odd.life

    def began(self, job, _index):
        """Has this member a log?"""
        return job.name not in self.launched
