"""Answers of shards: counted once, run again where a record is damaged, never mixed with those of other requests or cuts."""

import copy
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.simulated.parts import SITE, Faults, record, too_large
from support.simulated.world import World
from support.written import framed, head_of

from coordinator.base.clock import Throttle
from coordinator.base.listing import Listing
from coordinator.decide.evaluation import actions as do
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import job_specs, shards
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.records import cut_of
from coordinator.runtime.runner import Running
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.outcomes import Failed, Probed, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import BuildSpec, FrameRef, RequestSetManifest, SuiteSpec, TaskEntry
from evaljobs.contract.storage import MAGIC, FrameWriter

FAST = {"mode": "fast", "token_budget": 8192}
AGAIN = FrameRef(file="again.frames", offset=0, length=1)


class Scoring(World):
    """A world in which an entry's score job is on its way, and the part of the loop that looks at its files."""

    def __init__(self, seed, folder=Path("/nowhere")):
        super().__init__(seed)
        self.until(lambda w: [e for e in w.state.entries if e.status == "scoring"])
        self.entry = next(e for e in self.state.entries if e.status == "scoring")
        self.leaf = self.state.shards.leaves[next(iter(self.entry.sets))]
        self.shard = self.leaf.planned.shards[0]
        outstanding = (self.state.scoring.metrics[name] for name in self.state.scoring.outstanding)
        self.metric = next(m for m in outstanding if m.entry == self.entry.index)
        self.failed = Failed(
            name=self.metric.name, job="score", blame="bug", error="?", entry=self.entry.index
        )
        self.files = EvaluationPaths(folder)
        running = Running.__new__(Running)
        running.state, running.paths, running.snapshot = self.state, self.files, None
        running._consumed, running._paces, running._outcomes_read, running._failed = {}, {}, set(), {}
        running._throttle, running._outcomes = Throttle(), Listing(self.files.outcomes)
        self.running = running

    def dump(self, trial, shard):
        known = {"task": self.leaf.planned.task, "key": self.leaf.planned.key, "started_at": 0, "seconds": 1}
        with FrameWriter(self.files.response_file(trial)) as file:
            return file.append(
                ShardResponses(shard=shard, trial=trial, responses=((0, [-1.5, True]),), **known)
            )

    def corrupted(self, name=""):
        """What the loop finds unreadable after the score has failed."""
        failed = self.failed.model_copy(update={"name": name or self.failed.name})
        found = self.running._corrupted([ev.OutcomeSeen(at=5.0, outcome=failed)], 5.0)
        return {e.shard: e for e in found if isinstance(e, ev.ShardCorrupted)}


# --- damaged records ---------------------------------------------------------------------------------------------------


@some(8)
@given(st.integers(0, 10_000))
def test_a_shard_told_corrupted_runs_again_and_its_entry_is_scored_whole(seed):
    """Told before the failed score: the entry is open again, its shard queued once; then everything is scored. The score
    then stands: it was made of whole records."""
    world = Scoring(seed)
    world.queue.pop(world.shard, None)
    world.tell(ev.ShardCorrupted, shard=world.shard, error="checksum")
    assert world.entry.status == "built"
    assert world.shard in world.queue
    world.rq.discard(world.metric.name)
    world.tell(ev.OutcomeSeen, outcome=world.failed)
    assert world.entry.status == "built", "not scored before the shard is there again"
    world.until(lambda w: w.entry.status == "scored")
    world.tell(ev.ShardCorrupted, shard=world.shard, error="late")
    assert (world.entry.status, world.leaf.todo) == ("scored", 0)
    world.run_to_scores()


def test_a_metric_job_that_is_queued_again_reads_the_records_that_stand_now():
    """Not those that were found corrupt since it was queued first. Of equal answers that come twice the first stay."""
    world = World(1, Faults(metric_slow=1.0))
    metrics = world.state.scoring.metrics
    world.until(lambda _: any(m.kind == "execute" for m in metrics.values()))
    metric = next(m for m in metrics.values() if m.kind == "execute")
    leaf = world.state.shards.leaves[metric.task]
    shard = leaf.planned.shards[leaf.places[metric.documents[0]][0]]
    corrupt, before = world.state.shards.by_name[shard].frame, copy.deepcopy(world.state.shards)
    world.tell(ev.ShardsDumped, shards=((shard, AGAIN),))
    assert world.state.shards == before
    world.tell(ev.ShardCorrupted, shard=shard, error="its checksum is wrong")
    world.tell(ev.ShardsDumped, shards=((shard, AGAIN),))
    frames = job_specs.metric_spec(world.state, SITE, metric).frames
    assert AGAIN in frames
    assert corrupt not in frames


def test_the_loop_finds_the_unreadable_record_of_a_failed_score(tmp_path):
    """One byte flipped, another file gone: both shards are named, and none of those that can be read."""
    world = Scoring(3, tmp_path)
    names = [s for t in world.entry.sets for s in world.state.shards.leaves[t].planned.shards]
    for number, shard in enumerate(names):
        world.state.shards.by_name[shard].frame = world.dump(f"trial-{number}", shard)
    assert not world.corrupted()
    first = world.files.response_file("trial-0")
    data = bytearray(first.read_bytes())
    data[-1] ^= 0xFF
    first.write_bytes(data)
    world.files.response_file(f"trial-{len(names) - 1}").unlink()
    assert world.corrupted().keys() == {names[0], names[-1]}
    assert not world.corrupted("?")


def test_two_copies_of_a_shard_in_one_look_are_one_piece_of_news(tmp_path):
    """Both trials dumped it before anybody looked: the journal tells of the shard once."""
    world = Scoring(3, tmp_path)
    world.state.shards.by_name[world.shard].frame = None
    for trial in ("a", "b"):
        world.dump(trial, world.shard)
    (told,) = world.running._new_shards(5.0, thorough=True)
    assert isinstance(told, ev.ShardsDumped)
    assert [name for name, _ in told.shards] == [world.shard]
    assert world.running._new_shards(6.0, thorough=True) == []


def test_a_shard_whose_records_are_never_answers_fails_its_task_with_the_reason(tmp_path):
    """Well-framed and no answers, each time it runs: three runs, then its entry fails and says why; others go on."""
    world = Scoring(3, tmp_path)
    shard = world.state.shards.by_name[world.shard]
    whole, path = shard.frame, world.files.response_file("x")
    path.parent.mkdir(parents=True)
    for run, body in enumerate([b"no zlib", zlib.compress(b'[[0,"\xff"]]'), zlib.compress(b"[" * 50_000)]):
        path.write_bytes(framed(head_of(shard=world.shard), body))
        shard.frame = FrameRef(file=path.name, offset=0, length=path.stat().st_size)
        world.state.scoring.metrics["gone"] = world.metric
        world.state.scoring.outstanding.add("gone")
        event = world.corrupted("gone")[world.shard]
        world.state.scoring.outstanding.discard("gone")
        del world.state.scoring.metrics["gone"]
        machine.step(world.state, SITE, [event])
        assert (world.entry.status == "failed") is (run == 2)
        if run < 2:
            assert shard.frame is None
            shards.shards_dumped(world.state, ev.ShardsDumped(at=world.now, shards=((world.shard, whole),)))
    assert "was run 3 times and left no record that can be read; the last: x.frames" in world.entry.error


def test_a_shard_that_leaves_no_record_however_often_it_runs_fails_its_task():
    """Stray, queued, run and stray again three times: what it left was no record of it. Stray alone counts nothing."""
    world = Scoring(5)
    world.tell(ev.ShardCorrupted, shard=world.shard, error="checksum")
    for _ in range(8):
        world.tell(ev.ShardsStray, shards=(world.shard,))
    assert world.entry.status == "built"
    world.tell(ev.ShardsStray, shards=(world.shard,), again=(world.shard,))
    world.queue = {}
    world.tell(ev.ShardsStray, shards=(world.shard,), again=(world.shard,))
    assert "response files hold no record of it" in world.entry.error
    assert not world.queue


def test_what_is_no_response_file_is_passed_over_by_the_loop(tmp_path):
    """A pipe, a link, a folder, a name that no trial has, bytes without end that only begin like records."""
    world = Scoring(3, tmp_path)
    for folder, ending in ((world.files.responses, "frames"), (world.files.outcomes, "json")):
        folder.mkdir()
        os.mkfifo(folder / f"pipe.{ending}")
        (folder / f"link.{ending}").symlink_to("/etc/hostname")
        (folder / f"nowhere.{ending}").symlink_to(tmp_path / "nowhere")
        (folder / f"folder.{ending}").mkdir()
        (folder / os.fsdecode(b"\xff\xfe." + ending.encode())).write_bytes(b"x")
        (folder / f"bytes.{ending}").write_bytes(MAGIC * 2_000)
        (folder / f"deep.{ending}").write_bytes(b"[" * 100_000)
    of_no_entry = world.failed.model_copy(update={"entry": 99})
    (world.files.outcomes / "x.failed.json").write_text(of_no_entry.model_dump_json())
    assert [world.running._new_shards(at, thorough=True) for at in (5.0, 6.0)] == [[], []]
    assert world.running._new_outcomes(5.0) == []


# --- cuts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (
            {"what": "unit", "fits": 0},
            "with token budget 8192 does not fit the GPU memory of n0 (A100): OOM; give trials more",
        ),
        ({"what": "generation", "fits": 0}, "a batch of 8 prompts (batch_size = 8) does not fit"),
        ({"what": "generation", "fits": 4}, "4 fit: set batch_size = 4 in [[task]] t0 of suite suite"),
    ],
)
def test_what_no_smaller_budget_mends_fails_the_task_in_words(told, says):
    """A single row that does not fit, and generation, which the budget does not cut."""
    world = World(1, rec=record(1, suite=FAST)).until(lambda w: w.claims)
    shard, trial = next(iter(world.claims.items()))
    world.tell(ev.OutcomeSeen, outcome=too_large(shard, trial, "n0", of=8, error="OOM", **told))
    assert world.state.entries[0].status == "failed"
    assert says in world.state.entries[0].error


@pytest.mark.parametrize(("fits", "budget"), [(1, 2048), (3, 4096)])
def test_of_several_trials_that_say_it_the_first_counts(fits, budget):
    """The budget is reduced to the part that fits, and at least by half. Answers and outcomes in a cut that is retired change
    nothing, nor does a name that is no shard's."""
    world = World(1, rec=record(1, suite=FAST), fits=budget).until(lambda w: w.claims)
    assert not any(shards.is_retired(world.state, name) for name in ("", "x", "t0|a|b", "t0|1"))
    shard, trial = next(iter(world.claims.items()))
    for name in ("x", "y"):
        world.tell(ev.OutcomeSeen, outcome=too_large(shard, trial, "n", name=name, fits=fits, of=4))
    assert [e.token_budget for e in world.journal if isinstance(e, ev.TokenBudgetReduced)] == [budget]
    world.run_to_scores()
    assert {ShardId.parse(s).cut for s in world.state.shards.by_name} == {f"fast-{budget}-8"}


@given(
    mode=st.sampled_from([None, "fast"]),
    own=st.one_of(st.none(), st.integers(1, 64)),
    size=st.one_of(st.just("auto"), st.integers(1, 64)),
    budget=st.one_of(st.just("auto"), st.integers(1, 10**6)),
)
def test_a_cut_says_what_decides_the_batches(mode, own, size, budget):
    """Exact: "" for the evaluation's batch size, else the task's own. Fast: budget and batch size, once both are settled."""
    tasks = (TaskEntry(name="t0", batch_size=own),)
    suite = SuiteSpec(
        name="s", mode=mode, batch_size=size, token_budget=budget if mode else None, tasks=tasks
    )
    cut = cut_of(suite, 0, size, suite.token_budget)
    if mode is None:
        assert cut == ("" if own is None else str(own))
    elif "auto" in (own or size, budget):
        assert cut == ""
    else:
        assert Cut.parse(cut) == Cut(own or size, budget)


def test_auto_settles_the_token_budget_with_the_batch_size():
    """Requests are built first; the probe's outcome says both, and the batches of that cut are built then."""
    suite = {"mode": "fast", "token_budget": "auto", "batch_size": "auto"}
    state, _ = machine.start_evaluation(ev.Accepted(at=0.0, record=record(1, suite=suite)))
    found = ev.RequestSetsFound(at=1.0, sets={0: {"t0": "/s/t0"}}, folders={0: "/s"}, batch_size="auto")
    machine.step(state, SITE, [found])
    assert (state.entries[0].status, state.cut_of(state.entries[0])) == ("built", "")
    probed = Probed(name="x", batch_size=16, token_budget=4096)
    made = machine.step(state, SITE, [ev.OutcomeSeen(at=2.0, outcome=probed)])
    (job,) = (e for e in made.events if isinstance(e, ev.JobIntended))
    (spec,) = job_specs.specs_of(state, SITE, state.jobs.by_name[job.job.name]).values()
    assert isinstance(spec, BuildSpec)
    assert (spec.batch_size, spec.cut) == (16, "fast-4096-16")


# --- entries that have leaf tasks in common: equal requests are asked once, other ones apart ---------------------------

LEAVES = ("l0", "l1", "l2", "l3")
FAULTS = Faults(
    kill=0.01,
    submit_waits=0.2,
    submit_timeout=0.05,
    listing=0.2,
    restart=0.03,
    slow_outcome=0.3,
    wipe_queue=0.01,
)


class Overlapping(World):
    """A suite whose entries are leaf tasks and groups of them; its requests follow from leaf task and settings."""

    def __init__(self, seed, faults, fits=0, **settings):
        dice = random.Random(seed)
        groups = [f"g{i}" for i in range(4)]
        self.groups = {name: dice.sample(LEAVES, dice.randint(1, len(LEAVES))) for name in groups}
        names = dice.sample([*LEAVES, *groups], dice.randint(2, 6))
        tasks = tuple(TaskEntry(name=name, num_fewshot=dice.choice([None, None, 5])) for name in names)
        made = record(suite={"tasks": tasks, **settings}, early_trials=dice.random() < 0.3)
        super().__init__(seed, faults, made, fits=fits)

    def leaf_tasks(self, entry):
        return self.groups.get(entry, [entry])

    def key(self, entry, task):
        return f"{task} with {self.record.suite.tasks[entry].num_fewshot} examples"

    def effect(self, action):
        if isinstance(action, do.FindResponses):
            found = (
                shards.equal_leaf(self.state, entry, self.manifest(entry, folder), folder, action.cuts[entry])
                for entry, named in action.sets.items()
                for folder in named.values()
            )
            return [ev.ResponsesFound(at=self.now, leaves=tuple(leaf for leaf in found if leaf is not None))]
        events = super().effect(action)
        return [self.keyed(event) if isinstance(event, ev.Planned) else event for event in events]

    def keyed(self, planned):
        leaves = [leaf.model_copy(update={"key": self.key(leaf.entry, leaf.task)}) for leaf in planned.leaves]
        return planned.model_copy(update={"leaves": tuple(leaves)})

    def manifest(self, entry, folder):
        task = folder.rpartition("/")[2]
        key = self.key(entry, task)
        known = (leaf.planned for leaf in self.state.shards.leaves.values())
        counts = {"documents": 1, "requests": 1, "prompt_tokens": 1}
        executes = any(leaf.executes for leaf in known if leaf.key == key)
        return RequestSetManifest(task=task, key=key, executes=executes, **counts)

    def check_score(self, spec):
        super().check_score(spec)
        assert spec.frames.keys() == set(self.leaf_tasks(self.record.suite.tasks[spec.entry].name))
        for task, frames in spec.frames.items():
            answered = {name for name, shard in self.state.shards.by_name.items() if shard.frame in frames}
            leaf = shards.leaf_of(self.state, next(iter(answered)))
            assert answered == set(leaf.planned.shards)
            assert leaf.planned.key == self.key(spec.entry, task), "answers to other requests"


@some(67)
@given(seed=st.integers(0, 2**32), fails=st.booleans())
def test_every_entry_is_scored_by_its_own_requests_and_none_is_asked_twice(seed, *, fails):
    """Whatever the entries have in common, also where jobs die, the coordinator restarts, builds fail and are retried."""
    world = Overlapping(seed, Faults(**vars(FAULTS) | {"build_fails": 0.4 if fails else 0.0}))
    world.run()
    while world.state.failed_entries():
        world.faults = Faults()
        world.tell(ev.RetryAsked)
        world.run()
    world.run_to_scores()
    wanted = {world.key(e.index, task) for e in world.state.entries for task in world.leaf_tasks(e.name)}
    assert sorted(leaf.planned.key for leaf in world.state.shards.leaves.values()) == sorted(wanted)


@some(33)
@given(seed=st.integers(0, 2**32))
def test_a_unit_that_does_not_fit_cuts_the_requests_of_all_their_entries_anew(seed):
    """In fast mode: each entry is scored by answers in its own cut."""
    world = Overlapping(seed, Faults(too_large=0.3, restart=0.03), 600, mode="fast", token_budget=4096)
    world.run_to_scores()
    for entry in world.state.entries:
        for name in entry.leaves.values():
            leaf = world.state.shards.leaves[name].planned
            assert leaf.executes or leaf.cut == world.state.cut_of(entry)
