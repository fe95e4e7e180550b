"""A large evaluation without faults, event by event: as many nodes, trials and shards as are asked for."""

from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import step as machine
from evaljobs.contract.names import LaneId
from evaljobs.contract.outcomes import Built, Executed, Scored, Staged
from evaljobs.contract.specs import FrameRef
from support.simulated.parts import SITE, ended, planned, record


def plain_step(state, event):
    return machine.step(state, SITE, [event])


class Large:
    """Runs one evaluation to its end through `step`; every second task executes programs.

    `generations`: how many trials each lane has, one after the other. `shards`: of each lane.
    """

    def __init__(self, nodes, gpus=8, *, tasks=60, generations=1, shards=4, step=plain_step):
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.gpus, self.tasks, self.generations, self.shards = gpus, tasks, generations, shards
        self.step = step
        self.now = 0.0
        self.journal = [ev.Accepted(at=0.0, record=record(tasks, build_jobs=4))]
        self.state, self.actions = machine.start_evaluation(self.journal[0])
        self.ids = 0

    def take(self, event):
        step = self.step(self.state, event)
        self.journal += step.events
        self.actions += step.actions

    def taken(self, kind):
        """The actions of this kind so far; they are done with then."""
        found = [a for a in self.actions if isinstance(a, kind)]
        self.actions = [a for a in self.actions if not isinstance(a, kind)]
        return found

    def outcome(self, outcome):
        self.take(ev.OutcomeSeen(at=self.now, outcome=outcome))

    def run(self):
        folders = {i: f"/sets/{i}" for i in range(self.tasks)}
        self.take(ev.RequestSetsFound(at=0.0, sets={}, folders=folders, batch_size=8))
        self._build()
        offers = tuple(ev.Offer(node=n, gpus=self.gpus) for n in self.nodes)
        self.take(ev.NodesOffered(at=0.0, offers=offers))
        assert self.taken(do.FindResponses)
        self.take(ev.ResponsesFound(at=0.0))
        self.take(self._planned(*self.taken(do.MakePlan)))
        self._start_jobs("stage")
        for name in [n for n in self.state.jobs.live if self.state.jobs.by_name[n].job.purpose == "stage"]:
            node = self.state.jobs.by_name[name].job.node
            where = {"node": node, "path": "/s", "rung": "shm"}
            self.outcome(Staged(name=name, bytes=1, storage_bytes=1, seconds=1, **where))
        for generation in range(self.generations):
            self._start_jobs("trial")
            self._start_jobs("metric")
            if generation < self.generations - 1:
                self._end_trials("terminated")
        self._dump()
        self._end_trials("drained")
        self._score()
        self.take(ev.ResultsWritten(at=self.now))
        for name in sorted(self.state.jobs.live):
            for member in self.state.jobs.by_name[name].members:
                self.take(ev.JobEnded(at=self.now, job=name, index=member, state="COMPLETED"))
        assert self.state.ended_at is not None
        return self.state

    def _start_jobs(self, purpose):
        jobs = [a.job for a in self.taken(do.SubmitJob)]
        self.actions += [do.SubmitJob(job=j) for j in jobs if j.purpose != purpose]
        for job in (j for j in jobs if j.purpose == purpose):
            self.ids += 1
            self.take(ev.JobSubmitted(at=self.now, job=job.name, job_id=str(self.ids)))
            for member in range(job.count):
                started = {"node": job.node or "", "started_at": self.now, "submitted_at": self.now}
                self.take(ev.JobStarted(at=self.now, job=job.name, index=member, **started))

    def _build(self):
        self._start_jobs("build")
        for name in sorted(self.state.jobs.live):
            for index in self.state.jobs.by_name[name].entries:
                sets = {f"t{index}": f"/sets/{index}/t{index}"}
                told = {"entry": index, "batch_size": 8, "sets": sets, "seconds": 1}
                self.outcome(Built(name=f"{name}.{index}", **told))
            self.take(ev.JobEnded(at=self.now, job=name, index=0, state="COMPLETED"))

    def _planned(self, action):
        each = max(1, self.shards * len(action.lanes) // self.tasks)
        alone = tuple((i,) for i in range(each))
        made = planned(action, lambda: each, self.now, work_seconds_95=1000.0, load_seconds_95=0.0)
        leaves = [
            leaf.model_copy(
                update={
                    "documents": each,
                    "executes_at_once": 0,
                    "shard_documents": alone if leaf.executes else (),
                }
            )
            for leaf in made.leaves
        ]
        return made.model_copy(update={"leaves": tuple(leaves)})

    def _dump(self):
        trials = sorted(self.state.trials.live)
        for number, shard in enumerate(list(self.state.shards.by_name)):
            file = f"{trials[number % len(trials)]}.frames"
            frame = FrameRef(file=file, offset=number, length=1)
            self.take(ev.ShardsDumped(at=self.now, shards=((shard, frame),)))

    def _end_trials(self, reason):
        for name, trial in sorted(self.state.trials.live.items()):
            self.outcome(ended(LaneId.parse(trial.lane).node, name, reason))
            self.take(ev.JobEnded(at=self.now, job=trial.job, index=trial.member, state="COMPLETED"))

    def _score(self):
        while metrics := self.taken(do.EnqueueMetric):
            for metric in (self.state.scoring.metrics[m.name] for m in metrics):
                told = {"name": metric.name, "seconds": 1}
                if metric.kind == "execute":
                    self.outcome(Executed(task=metric.task, documents=1, programs=1, **told))
                else:
                    self.outcome(Scored(entry=metric.entry, result_file="/r", **told))
