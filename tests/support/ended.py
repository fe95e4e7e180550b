"""An evaluation that has ended, with the files that its jobs leave: as large as is asked for, and no job is run."""

import json
from contextlib import ExitStack
from pathlib import Path

from coordinator.decide.evaluation import events as ev
from coordinator.runtime.journal import Journal
from coordinator.runtime.make_summary import summary_now
from coordinator.runtime.summary import write_summary
from coordinator.site.cluster.sbatch_text import log_file
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Scored, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import FrameWriter, write_atomic
from support.simulated.large import Large

LOG = "loading the weights\n" * 40


class _OnDisk(Large):
    """A large evaluation whose trials write their responses, and whose scores are files."""

    def __init__(self, work, *args, answer, **shape):
        super().__init__(*args, **shape)
        self.paths = EvaluationPaths(work / self.state.evaluation_id)
        self.answer = answer
        for folder in self.paths.folders():
            folder.mkdir(parents=True)

    def outcome(self, outcome):
        if isinstance(outcome, Scored):
            file = self.paths.scores / f"{outcome.entry:03d}-t{outcome.entry}.json"
            file.write_text(json.dumps({"results": {f"t{outcome.entry}": {"acc,none": 0.5}}}, indent=1))
            outcome = outcome.model_copy(update={"result_file": str(file)})
        write_outcome_quickly(self.paths, outcome)
        super().outcome(outcome)

    def _dump(self):
        trials = sorted(self.state.trials.live)
        with ExitStack() as opened:
            writers = {t: opened.enter_context(FrameWriter(self.paths.response_file(t))) for t in trials}
            for number, name in enumerate(list(self.state.shards.by_name)):
                trial = trials[number % len(trials)]
                shard = ShardResponses(
                    task=ShardId.parse(name).task,
                    key="k",
                    shard=name,
                    trial=trial,
                    started_at=1.0,
                    seconds=2.0,
                    responses=tuple((i, f"{self.answer} {number} {i}") for i in range(8)),
                )
                self.take(ev.ShardsDumped(at=self.now, shards=((name, writers[trial].append(shard)),)))


def write_outcome_quickly(paths, outcome):
    """As `write_outcome`, without a sync a file."""
    paths.outcome(outcome.kind, outcome.name).write_bytes(outcome.model_dump_json(indent=1).encode())


def leave_ended(work, nodes, gpus=8, tasks=60, *, shards=1, answer="an answer"):
    """Write an evaluation that has ended on so many nodes, and give its state. `shards`: of each GPU; `answer`: how each
    response begins.
    """
    made = _OnDisk(work, nodes, gpus, tasks=tasks, shards=shards, answer=answer)
    state, paths = made.run(), made.paths
    journal = Journal(paths.journal)
    journal.append(made.journal)
    journal.close()
    write_atomic(paths.evaluation, state.record.model_dump_json(indent=1).encode())
    spec = state.record.model_dump_json(indent=1)
    for name, info in state.jobs.by_name.items():
        paths.spec(name).write_text(spec)
        for member in info.members:
            place = paths.logs / Path(log_file(info.job, member)).name
            place.write_text(f"{name} {member}\n{LOG}")
        if info.job.purpose == "stage":
            paths.release_file(name).write_bytes(b"")
    for name, metric in state.scoring.metrics.items():
        paths.spec(name).write_text(spec)
        if metric.kind == "execute":
            (paths.verdicts / f"{metric.task}@{name}.jsonl").write_text('{"id": "p", "passed": true}\n' * 20)
    for entry in state.entries:
        lines = (json.dumps({"doc_id": i, "resps": [[f"{answer} {i}"]]}) + "\n" for i in range(200))
        (paths.samples / f"samples_{entry.name}_{entry.index:03d}.jsonl").write_text("".join(lines))
    paths.results.write_text(json.dumps({"results": {e.name: {"acc,none": 0.5} for e in state.entries}}))
    paths.report.write_text("{}")
    paths.request_sets.write_text(json.dumps({"batch_size": 8, "request_sets": {}}))
    write_summary(paths, summary_now(state, paths, state.ended_at or 0.0))
    return state, paths
