"""Suites whose groups, tags and tasks overlap, 200 of them: each entry has the scores of its own lm_eval command.

Request sets, plans, answers and scores are real; the cluster, the queue and time are the simulated world's. An answer or a
score that is a function of what was computed before is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.exactness.pipeline import COMPARED, TASKS, Case, Outcome
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.planning.make_plan import make_plan
from coordinator.intake import request_sets
from coordinator.intake.source_keys import Present
from coordinator.runtime import reuse
from coordinator.runtime.finalize import keys_of, merged_results, scores_in
from coordinator.runtime.journal import line_of
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import BuildSpec, ModelOptions, TaskEntry
from evaljobs.contract.storage import FrameWriter, read_frame
from evaljobs.requests import build
from evaljobs.scoring import score as metric
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.protocol import Engine
from evaljobs.trial.shard_runner import RequestSet, run_shard
from priors.estimate import PriorHistory

SUITES = 200
FAULTS = Faults(kill=0.01, restart=0.02, listing=0.1)
OPTIONS = ModelOptions(device="cpu", threads=1)
GROUP = "group: {name}\ntask: [{tasks}]\naggregate_metric_list:\n  - {{metric: acc, aggregation: mean}}\n"
GROUPS = {  # of groups and tags, too
    "both": ["toy_part_a", "toy_part_b"],
    "mixed": ["toy_part_b", "toy_choice", "own_one"],
    "nested": ["both", "own_two"],
}
TAGGED = {"own_one": 31, "own_two": 32}  # task -> seed of its documents; both have the tag `own`
NAMES = ["toy_part_a", "toy_part_b", "toy_choice", "own_one", "own", "toy_sums", *GROUPS]
SETTINGS = [{"limit": 3}, {"limit": 3}, {"limit": 2}, {"limit": 3, "num_fewshot": 1}]


@dataclass
class Lab:
    """What all suites share: the model, tasks, and all that was computed so far, by what it is a function of."""

    model: Path
    folder: Path
    lm_eval: Callable[[Case, int], Outcome]
    engine: Engine = field(init=False)
    sets: dict[str, dict[str, str]] = field(default_factory=dict)
    answers: dict[tuple[str, int, int], ShardResponses] = field(default_factory=dict)
    scores: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self):
        self.engine = loading.load_engine(str(self.model), OPTIONS, 1)
        self.tasks = self.folder / "tasks"
        self.tasks.mkdir()
        for name in ("choice.yaml", "group_a.yaml", "group_b.yaml", "sums.yaml", "rows.py"):
            (self.tasks / name).write_bytes((TASKS / name).read_bytes())
        for name, tasks in GROUPS.items():
            (self.tasks / f"{name}.yaml").write_text(GROUP.format(name=name, tasks=", ".join(tasks)))
        for name, seed in TAGGED.items():
            own = f"include: choice.yaml\ntask: {name}\ntag: own\ndataset_kwargs: {{rows: 9, seed: {seed}}}\n"
            (self.tasks / f"{name}.yaml").write_text(own)

    def theirs(self, entry):
        settings = entry.model_dump(include={"limit", "num_fewshot"}, exclude_none=True)
        return self.lm_eval(Case(task=entry.name, entry=settings, include_path=str(self.tasks)), 1)


class Suite(World):
    """One random suite, run to its end."""

    def __init__(self, lab, number):
        self.lab = lab
        dice = random.Random(number)
        names = dice.sample(NAMES, dice.randint(2, 5))
        tasks = tuple(TaskEntry(name=name, **dice.choice(SETTINGS)) for name in names)
        suite = {"batch_size": 1, "tasks": tasks, "include_path": (str(lab.tasks),)}
        asked = record(suite=suite, metric={"bootstrap_iters": 100})
        checkpoint = asked.checkpoint.model_copy(update={"source": str(lab.model)})
        # every second one finds what the ones before it asked
        name = f"{lab.model.name if number % 2 else 'apart'}-suite-{number:08d}"
        self.site = Site(work_dir=str(lab.folder), trial_command=("python",), worker_command=("python",))
        self.paths = EvaluationPaths(lab.folder / name)
        for folder in self.paths.folders():
            folder.mkdir(parents=True, exist_ok=True)
        made = {"evaluation_id": name, "checkpoint": checkpoint, "model": OPTIONS}
        super().__init__(number, FAULTS, asked.model_copy(update=made))

    def effect(self, action):
        match action:
            case do.FindRequestSets():
                sets = {index: self.built(index) for index in range(len(self.record.suite.tasks))}
                folders = dict.fromkeys(sets, str(self.lab.folder))
                return [ev.RequestSetsFound(at=self.now, sets=sets, folders=folders, batch_size=1)]
            case do.FindResponses():
                return [
                    reuse.find_responses(self.state, action, self.site.paths, Present(self.site), self.now)
                ]
            case do.MakePlan():
                read = request_sets.read_wanted(action)
                return [make_plan(self.record, action, read, PriorHistory([]), hardware="cpu", now=self.now)]
            case _:
                return super().effect(action)

    def built(self, index):
        suite = self.record.suite
        key = suite.tasks[index].model_dump_json()
        if key not in self.lab.sets:
            out = self.lab.folder / "request_sets" / hashlib.sha256(key.encode()).hexdigest()[:16]
            spec = {"evaluation_dir": None, "suite": suite, "entry": index, "batch_size": 1, "model": OPTIONS}
            made = BuildSpec(name="build", model_dir=str(self.lab.model), out_dir=str(out), **spec)
            self.lab.sets[key] = build.build_request_sets(made).sets
        return self.lab.sets[key]

    def answer(self, shard, trial):
        name = ShardId.parse(shard)
        leaf = self.state.shards.leaves[self.state.shards.by_name[shard].leaf].planned
        what = (leaf.key, name.first_batch, name.end_batch)
        if what not in self.lab.answers:
            requests = RequestSet(leaf.folder, name.cut or 1)
            self.lab.answers[what] = run_shard(self.lab.engine, requests, shard, trial=trial, seed=1234)
        own = self.lab.answers[what].model_copy(update={"shard": shard, "trial": trial})
        with FrameWriter(self.paths.response_file(trial)) as writer:
            return writer.append(own)

    def score_file(self, spec):
        said = [self.record.suite.tasks[spec.entry].model_dump_json()]
        for task, frames in sorted(spec.frames.items()):
            records = [read_frame(self.paths.responses, frame) for frame in frames]
            said += [
                task,
                *sorted({r.key for r in records}),
                repr(sorted(a for r in records for a in r.responses)),
            ]
        what = hashlib.sha256(repr(said).encode()).hexdigest()
        if what not in self.lab.scores:
            self.lab.scores[what] = Path(metric.score_entry(spec).result_file)
        return str(self.lab.scores[what])

    def leave_results(self):
        """What a later evaluation reads of this one."""
        self.paths.evaluation.write_text(self.record.model_dump_json())
        self.paths.journal.write_bytes(b"".join(map(line_of, self.journal)))
        scores, unread = scores_in(self.state)
        merged, keys = merged_results(self.state, scores, unread), keys_of(self.state, scores)
        said = {**merged, "evalspan": {"batch_size": 1, "keys": keys}}
        self.paths.results.write_text(json.dumps(said))


@pytest.mark.model
def test_each_entry_of_200_overlapping_suites_scores_as_its_own_lm_eval_command(
    model_dir, tmp_path, lm_eval_outcome
):
    """Also with jobs that die, coordinators that restart, and answers of earlier suites that are used again; equal requests
    are asked once, and results name all.
    """
    lab = Lab(model_dir, tmp_path, lm_eval_outcome)
    shared = apart = reused = 0
    for number in range(SUITES):
        suite = Suite(lab, number)
        suite.run_to_scores()
        state = suite.state
        leaves = [leaf.planned for leaf in state.shards.leaves.values()]
        assert len({leaf.key for leaf in leaves}) == len(leaves), "equal requests were asked twice"
        scores, unread = scores_in(state)
        merged, keys = merged_results(state, scores, unread), keys_of(state, scores)
        for entry, wanted in zip(state.entries, state.record.suite.tasks, strict=True):
            theirs = lab.theirs(wanted)
            ours = json.loads(Path(entry.result_file).read_text())
            assert {part: ours[part] for part in COMPARED if part in ours} == theirs.results
            values = [{k: v for k, v in row.items() if k != "alias"} for row in merged["results"].values()]
            for name, row in theirs.results["results"].items():
                assert {k: v for k, v in row.items() if k != "alias"} in values, name
        assert keys.keys() == merged["configs"].keys()
        assert {own["requests"] for own in keys.values()} == {leaf.key for leaf in leaves}
        shared += any(len(leaf.entries) > 1 for leaf in state.shards.leaves.values())
        apart += any(leaf.name != leaf.task for leaf in leaves)
        reused += any(name != state.shards.leaves[name].planned.task for name in state.plan.reused)
        suite.leave_results()
    assert min(shared, apart, reused) > SUITES // 5
