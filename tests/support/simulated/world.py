"""A seeded world for the pure machine: a cluster, a queue, nodes and metrics that fail by the dice.

The machine under test is the real one, and so are `observe` and `allocation`; only the effects are simulated. Time is
a number. A seed replays exactly.
"""

from functools import partial

from coordinator.decide.allocation import job_limits
from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import scoring, shards
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.job_specs import metric_spec, specs_of
from coordinator.decide.evaluation.records import ScreenScore
from coordinator.decide.evaluation.state import Phase
from coordinator.runtime import detect
from coordinator.site.diagnosis.diagnose import diagnose_state
from evaljobs.contract.names import ShardId
from support.simulated.cluster import Cluster
from support.simulated.invariants import validate
from support.simulated.parts import SITE, FakeJob, FakeMember, Faults, Odd, planned, record

VAGUE = "RuntimeError: CUDA error: an illegal memory access was encountered"
UNFIT = "Requested node configuration is not available"
BANNED = "Invalid qos specification"
LIMIT = "QOSMaxSubmitJobPerUserLimit; Batch job submission failed: Job violates accounting/QOS policy"


class World(Cluster):
    """Runs one evaluation to its end under `faults` on a cluster with oddities (`odd`, `Odd`'s fields); every step is
    checked by `validate`.
    """

    site = SITE

    def __init__(self, seed, faults=None, rec=None, nodes=2, gpus=2, **odd):
        super().__init__(seed, faults or Faults(), rec or record(), Odd(**odd))
        self.gpus, self.next_id = gpus, 100
        self.settles = {}  # entry of a screen -> block from which on its question is answered
        self.node_names = [f"{self.odd.names}{i}" for i in range(nodes)]
        event = ev.Accepted(at=0.0, record=self.record)
        self.state, actions = machine.start_evaluation(event)
        self.journal.append(event)
        self.perform(actions)

    # --- the coordinator's side -------------------------------------------------------------------------------------

    def take(self, events):
        step = machine.step(self.state, self.site, events)
        assert not step.illegal, step.illegal
        going = step.events and self.state.ending.phase == Phase.RUNNING
        left = going and next(iter(machine.due_decisions(self.state, self.site, step.events[-1].at)), None)
        assert not left, f"{left} is due, and was not asked for after {step.events}"
        told = max((n for n, e in enumerate(step.events, 1) if any(e is one for one in events)), default=0)
        torn = told < len(step.events) and self.dice.random() < self.faults.torn
        written = step.events[: self.dice.randint(told, len(step.events) - 1) if torn else None]
        # the journal keeps what JSON keeps
        self.journal += [ev.EVENT.validate_json(ev.EVENT.dump_json(e)) for e in written]
        if torn:
            self.restart()
            return
        self.perform(step.actions)
        validate(self.state)

    def tell(self, kind, **fields):
        """An event of now."""
        self.take([kind(at=self.now, **fields)])

    def perform(self, actions):
        for action in actions:
            self.take(self.effect(action))

    def effect(self, action):
        match action:
            case do.FindRequestSets():
                folders = {i: f"/sets/{i}" for i in range(len(self.record.suite.tasks))}
                return [ev.RequestSetsFound(at=self.now, sets={}, folders=folders, batch_size=8)]
            case do.InspectConverted():
                there = action.path in self.converted
                found = self.record.checkpoint.model_copy(update={"converted_from": "/c"}) if there else None
                return [ev.CheckpointConverted(at=self.now, checkpoint=found, error="" if there else "gone")]
            case do.SubmitJob():
                self.called.append(action)
            case do.CancelJob():
                self.cancel(action)
            case do.FindResponses():
                alike = self.odd.copied and self.state.nodes.content is None
                return [ev.ResponsesFound(at=self.now, alike=alike)]
            case do.MakePlan():
                screens, count = self.record.screening is not None, lambda: self.dice.randint(1, 6)
                return [planned(action, count, self.now, workers=self.odd.workers, screens=screens)]
            case do.FillQueue():
                dealt = ((s, lane, rank) for lane, shards in action.lanes.items() for s, rank, _ in shards)
                self.queue = {s: (lane, rank) for s, lane, rank in dealt if s not in self.claims}
                if self.record.options.early_trials:
                    assert {ShardId.parse(s).task for s in self.queue} <= self.published
                self.epoch = self.state.queue_epoch
            case do.PublishSets():
                self.published = set(action.sets)
            case do.QueueShards() if self.queue is not None:
                for shard, rank, _ in action.shards:
                    if self.odd.in_order:
                        self.claims.pop(shard, None)
                    self.queue[shard] = (action.lane, rank)
            case do.WithdrawShards() if self.queue is not None:
                for shard in action.shards:
                    self.queue.pop(shard, None)
            case do.ReleaseClaims():
                for shard in self.held(action.trial):
                    del self.claims[shard]
                    if self.queue is not None:
                        known = self.state.shards.by_name.get(shard)  # none of a cut that is retired
                        self.queue[shard] = ("" if known is None else known.lane, 0.0)
            case do.EnqueueMetric():
                metric = self.state.scoring.metrics[action.name]
                self.specs[action.name] = metric_spec(self.state, self.site, metric)
                self.rq.add(action.name)
                self.given_up.pop(action.name, None)
                self.enqueued[action.name] += 1
            case do.ReleasePrecursor():
                if action.job in self.jobs:
                    self.jobs[action.job].released = True
            case do.StopWorkers():
                self.workers_stopped = True
            case do.JudgeScreen() | do.WriteResults():
                looked = isinstance(action, do.JudgeScreen)
                return [
                    self.judge(self.state.entries[action.entry]) if looked else ev.ResultsWritten(at=self.now)
                ]
            case _:
                pass
        return []

    def judge(self, entry):
        """What a look finds: its question is answered from the block of `settles` on, or by all documents."""
        leaves = [self.state.shards.leaves[name] for name in entry.leaves.values()]
        asked, whole = entry.look.blocks, max(len(leaf.planned.shards) for leaf in leaves)
        settled = asked >= min(whole, self.settles[entry.index])
        score = ScreenScore(
            task=entry.name, verdict="worse" if settled else "open", metric="acc,none", asked=asked, documents=whole,
            reference=0.5, estimate=0.4, low=0.3, high=0.5,
        )  # fmt: skip
        return ev.ScreenJudged(at=self.now, entry=entry.index, settled=settled, score=score)

    def submit_called(self):
        """As `Running.submit`: in the order of the calls, some in a later tick; none whose end was called for meanwhile."""
        while self.called and self.dice.random() >= self.faults.submit_waits:
            self.take(self.submit(self.called.pop(0)))

    def submit(self, action):
        name = action.job.name
        info = self.state.jobs.by_name[name]
        if info.phase != "intended":
            return []
        if info.released_at is not None:
            return [ev.JobNotSubmitted(at=self.now, job=name, error="nothing needs it any more")]
        assert action.job.node not in self.drained, f"{name} would wait for a drained node"
        if refused := self.refusal(action.job):
            return [refused]
        if action.job.purpose == "metric":
            self.workers_stopped = False  # as `Performer` does
        roll = self.dice.random()
        if roll < self.faults.submit_lost:
            return [ev.JobNotSubmitted(at=self.now, job=name, error="timed out", reason="in-doubt")]
        twins = [job for job in self.jobs.values() if job.job.name == name]
        running = [m for job in twins for m in job.members.values() if m.phase != "ended"]
        assert not running, f"{name} runs twice"
        self.next_id += 1
        members = {i: FakeMember(index=i) for i in range(action.job.count)}
        specs = specs_of(self.state, self.site, info)
        job = FakeJob(job=action.job, job_id=str(self.next_id), specs=specs, members=members)
        key = name if name not in self.jobs else f"{name}#{self.next_id}"
        self.jobs[key] = job
        if roll < self.faults.submit_lost + self.faults.submit_timeout:
            return [ev.JobNotSubmitted(at=self.now, job=name, error="timed out", reason="in-doubt")]
        return [ev.JobSubmitted(at=self.now, job=name, job_id=job.job_id)]

    def refusal(self, job):
        """What the cluster says to a job that it does not take."""
        odd = self.odd
        told = partial(ev.JobNotSubmitted, at=self.now, job=job.name)
        if job.node in odd.unfit and (not odd.refused or job.purpose in odd.refused):
            return told(error=UNFIT, reason="refused-on-node")
        if job.purpose == odd.banned:
            return told(error=BANNED, reason="refused")
        assert job.count <= odd.array, f"{job.name} is an array of {job.count}"
        if self.now < odd.opens or self.members("pending", "running") + job.count > odd.submitted:
            self.refusals.setdefault(job.name, []).append(self.now)
            return told(error=LIMIT, reason="limit")
        return None

    def cancel(self, action):
        for job in self.jobs.values():
            if job.job_id == action.job_id:
                for index, member in job.members.items():
                    if action.index in (None, index):
                        self.end_member(job, member)

    # --- one tick ------------------------------------------------------------------------------------------------------

    def tick(self):
        self.now += 5.0
        self.work()
        roll = self.dice.random
        if roll() < self.faults.wipe_queue:
            self.queue, self.epoch, self.claims = None, None, {}
            self.rq.clear()
            self.given_up.clear()
        if self.rq and roll() < self.faults.lose_metric:
            self.rq.pop()
        if roll() < self.faults.restart:
            self.restart()
        late = [o for o in self.outcomes if roll() < self.faults.slow_outcome]
        seen = [o for o in self.outcomes if o not in late]
        self.outcomes = late
        if not (self.faults.mute and roll() < self.faults.mute):
            self.take(detect.started_trials(self.state, self.beating(), self.seen, self.now))
        dumped, self.dumped = self.dumped, []
        if dumped:
            self.tell(ev.ShardsDumped, shards=tuple(dumped))
        self.take([ev.OutcomeSeen(at=self.now, outcome=o) for o in seen])
        if roll() >= self.faults.listing:
            events, twins = detect.job_events(self.state, self.listing(), self.seen, detect.Grace(), self.now)
            for twin in twins:
                self.cancel(do.CancelJob(job_id=twin))
            self.take(
                detect.with_causes(
                    self.state,
                    events,
                    self.listing(),
                    self.claims,
                    began=self.began,
                    cause=lambda _job, _index, word: diagnose_state(word),
                )
            )
            grace = detect.Grace()
            self.take(self.limit_events(grace))
        for job_id in detect.overdue_jobs(self.state, self.seen, detect.Grace(), self.now):
            self.cancel(do.CancelJob(job_id=job_id))
        self.take(detect.waits_over(self.state, self.now))
        assert not detect.waits_over(self.state, self.now), "told twice"
        if self.state.shards.leaves and not self.state.winding_down and self.epoch != self.state.queue_epoch:
            self.perform(shards.refill_queue(self.state))
        live = sorted(self.state.trials.live) if self.faults.straggle else []
        if slow := [trial for trial in live if roll() < self.faults.straggle]:
            self.tell(ev.StragglersFound, trials=dict.fromkeys(slow, 3.0))
        if self.queue is not None and self.state.shards.todo:
            for shard in detect.dumped_shards(self.state, list(self.queue)):
                del self.queue[shard]
            if stray := detect.stray_shards(self.state, self.queue, self.claims):
                self.tell(ev.ShardsStray, shards=stray)
        gone = {n: self.given_up.get(n, "") for n in self.state.scoring.outstanding if n not in self.rq}
        died, again = detect.metric_events(self.state, gone, self.seen, self.now)
        self.take(died)
        self.perform(scoring.enqueue_metric(self.state, metric) for metric in again)
        self.nodes()
        self.submit_called()

    def beating(self):
        """Trials that send heartbeats."""
        running = [(job, m) for job in self.of("trial") for m in job.members.values() if m.phase == "running"]
        return [job.spec.lanes[member.index].trial for job, member in running]

    def limit_events(self, grace):
        limited = job_limits.kept_out(self.listing())
        return detect.limit_events(self.state, limited, self.seen, grace, self.now)

    def nodes(self):
        use = self.state.nodes.by_name
        used = {n.name for n in use.values() if n.lanes and n.status != "withdrawn"}
        for name in self.node_names:
            down = name in used and self.dice.random() < self.faults.node_down
            if down and use[name].status != "back-off":
                for job in self.jobs.values():
                    for member in job.members.values() if job.job.node == name else ():
                        self.end_member(job, member)
                self.tell(ev.NodeWithdrawn, node=name, reason="down")
        for name in sorted(used - self.drained):
            others = len(self.node_names) - len(self.drained)
            if others > 1 and self.faults.drain and self.dice.random() < self.faults.drain:
                self.drained.add(name)
                self.tell(ev.NodeWithdrawn, node=name, reason="drained")
        free = [n for n in self.node_names if n not in used | self.drained]
        if self.odd.ahead and not use:
            if self.state.builds.looked_up:
                self.tell(ev.MemoryOffered, nodes=tuple(free))
        elif free and not self.state.winding_down and not (self.odd.ahead and self.dice.random() >= 0.3):
            known = {"gpus": self.gpus, "largest_mb": self.odd.node_mb}
            self.tell(ev.NodesOffered, offers=tuple(ev.Offer(node=n, **known) for n in free))

    def restart(self):
        """SIGKILL: what is not journalled is gone, and every outcome file is found again."""
        self.outcomes = list(self.left)
        self.called = []
        self.state = replay(self.journal)
        self.seen = detect.Sightings()
        if self.state.ended_at is None:
            self.tell(ev.Restarted)

    def until(self, done, most=3000):
        """Tick until it is so, or the evaluation has ended."""
        for _ in range(most):
            if done(self) or self.state.ended_at is not None:
                return self
            self.tick()
        raise AssertionError(f"not so after {most} ticks: {self.summary()}")

    def run(self, most=3000):
        self.until(lambda _: False, most)

    def run_to_scores(self):
        """Run to the end: every entry is scored and nothing is left."""
        self.run()
        self.assert_scored()
        self.assert_nothing_left()

    def assert_scored(self):
        assert all(e.status == "scored" for e in self.state.entries), self.summary()

    def assert_nothing_left(self):
        assert not self.memory, "weights left in node memory"
        assert all(m.phase == "ended" for j in self.jobs.values() for m in j.members.values()), "jobs left"

    def summary(self):
        return (
            f"entries {[(e.status, e.error) for e in self.state.entries]}, todo {self.state.shards.todo}, "
            f"live {sorted(self.state.jobs.live)}, trials {sorted(self.state.trials.live)}, "
            f"nodes {[(n.name, n.status, n.why) for n in self.state.nodes.by_name.values()]}, queue {self.queue}, "
            f"claims {self.claims}, outstanding {self.state.scoring.outstanding}, fatal {self.state.ending.reason!r}"
        )


def replay(journal):
    """The state that a journal rebuilds."""
    first = journal[0]
    assert isinstance(first, ev.Accepted)
    state, _ = machine.start_evaluation(first)
    for event in journal[1:]:
        machine.apply_event(state, event)
    return state
