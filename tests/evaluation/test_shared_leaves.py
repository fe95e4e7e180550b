"""Entries that have a leaf task in common: equal requests are asked once, other ones apart, and every entry is scored."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation import shards
from coordinator.evaluation import step as machine
from evaljobs.contract.specs import RequestSetManifest, ScoreSpec, TaskEntry

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

    def __init__(self, seed: int, faults: Faults, **settings: Any) -> None:
        dice = random.Random(seed)
        groups = [f"g{i}" for i in range(4)]
        self.groups = {name: dice.sample(LEAVES, dice.randint(1, len(LEAVES))) for name in groups}
        names = dice.sample([*LEAVES, *groups], dice.randint(2, 6))
        tasks = tuple(TaskEntry(name=name, num_fewshot=dice.choice([None, None, 5])) for name in names)
        super().__init__(
            seed, faults, record(suite={"tasks": tasks, **settings}, early_trials=dice.random() < 0.3)
        )

    def leaf_tasks(self, entry: str) -> Iterable[str]:
        return self.groups.get(entry, [entry])

    def key(self, entry: int, task: str) -> str:
        return f"{task} with {self.record.suite.tasks[entry].num_fewshot} examples"

    def effect(self, action: do.Action) -> list[ev.AnyEvent]:
        if isinstance(action, do.FindResponses):
            found = (
                shards.equal_leaf(self.state, entry, self.manifest(entry, folder), folder, action.cuts[entry])
                for entry, named in action.sets.items()
                for folder in named.values()
            )
            return [ev.ResponsesFound(at=self.now, leaves=tuple(leaf for leaf in found if leaf is not None))]
        events = super().effect(action)
        return [self.keyed(event) if isinstance(event, ev.Planned) else event for event in events]

    def keyed(self, planned: ev.Planned) -> ev.Planned:
        leaves = [leaf.model_copy(update={"key": self.key(leaf.entry, leaf.task)}) for leaf in planned.leaves]
        return planned.model_copy(update={"leaves": tuple(leaves)})

    def manifest(self, entry: int, folder: str) -> RequestSetManifest:
        task = folder.rpartition("/")[2]
        key = self.key(entry, task)
        known = (leaf.planned for leaf in self.state.shards.leaves.values())
        return RequestSetManifest(
            task=task,
            key=key,
            output_type="multiple_choice",
            executes=any(leaf.executes for leaf in known if leaf.key == key),
            documents=1,
            requests=1,
            prompt_tokens=1,
            generation_cap_tokens=0,
        )

    def check_score(self, spec: ScoreSpec) -> None:
        super().check_score(spec)
        assert spec.frames.keys() == set(self.leaf_tasks(self.record.suite.tasks[spec.entry].name))
        for task, frames in spec.frames.items():
            answered = {name for name, shard in self.state.shards.by_name.items() if shard.frame in frames}
            leaf = shards.leaf_of(self.state, next(iter(answered)))
            assert answered == set(leaf.planned.shards)
            assert leaf.planned.key == self.key(spec.entry, task), "answers to other requests"

    def asked(self) -> list[str]:
        """The requests of each planned leaf task."""
        return [leaf.planned.key for leaf in self.state.shards.leaves.values()]


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), fails=st.booleans())
def test_every_entry_is_scored_by_its_own_requests_and_none_is_asked_twice(seed: int, fails: bool) -> None:
    """Whatever the entries have in common, also where jobs die, the coordinator restarts, builds fail and are retried."""
    world = Overlapping(seed, Faults(**vars(FAULTS) | {"build_fails": 0.4 if fails else 0.0}))
    world.run()
    while world.state.failed_entries():
        world.faults = Faults()
        world.take([ev.RetryAsked(at=world.now)])
        world.run()
    world.assert_scored()
    world.assert_nothing_left()
    wanted = {world.key(e.index, task) for e in world.state.entries for task in world.leaf_tasks(e.name)}
    assert sorted(world.asked()) == sorted(wanted)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_a_unit_that_does_not_fit_cuts_the_requests_of_all_their_entries_anew(seed: int) -> None:
    """In fast mode: each entry is scored by answers in its own cut."""
    world = Overlapping(seed, Faults(too_large=0.3, restart=0.03), mode="fast", token_budget=4096)
    world.fits = 600
    world.run_to_scores()
    for entry in world.state.entries:
        for name in entry.leaves.values():
            leaf = world.state.shards.leaves[name].planned
            assert leaf.executes or leaf.cut == world.state.cut_of(entry)


def test_answers_stay_wanted_until_the_last_entry_that_has_them_fails() -> None:
    """One of two entries fails: their shards run on. Both fail, and a retry runs what is left of them once."""
    tasks = (TaskEntry(name="l0"), TaskEntry(name="g0"))
    world = Overlapping(3, Faults(), tasks=tasks)
    world.groups = {"g0": ["l0", "l1"]}
    while not world.state.shards.leaves:
        world.tick()
    first, group = world.state.entries
    own = world.state.shards.leaves["l0"].planned.shards
    machine.apply(world.state, ev.EntryFailed(at=world.now, entry=first.index, error="a person's word"))
    assert world.state.shards.todo == len(world.state.shards.by_name)
    told = ev.EntryFailed(at=world.now, entry=group.index, error="a person's word")
    (withdrawn,) = machine.apply(world.state, told)
    assert isinstance(withdrawn, do.WithdrawShards)
    assert set(withdrawn.shards) == set(world.state.shards.by_name)
    assert not world.state.shards.todo
    shards.reopen_entry(world.state, first)
    assert world.state.shards.todo == len(own)
    assert list(shards.shards_of(world.state, first.leaves.values())) == list(own)
