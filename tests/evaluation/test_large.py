"""What an event costs in a large evaluation, counted in operations of the interpreter."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest
from support.simulated.invariants import recounted
from support.simulated.large import Large, plain_step
from support.simulated.parts import Faults, record
from support.simulated.world import World, replay

from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation.state import State


def operations(nodes: int, generations: int) -> dict[str, float]:
    """Bytecode operations of a step by kind of event: the mean over an evaluation of `nodes` nodes."""
    count = 0
    spent: dict[str, list[int]] = defaultdict(list)

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def step(state: State, event: ev.AnyEvent) -> list[do.Action]:
        nonlocal count
        count, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            return plain_step(state, event)
        finally:
            sys.settrace(before)
            spent[event.outcome.kind if event.kind == "outcome-seen" else event.kind].append(count)

    Large(nodes, 2, tasks=4, generations=generations, step=step).run()
    return {kind: sum(each) / len(each) for kind, each in spent.items() if len(each) >= 2}


def test_an_event_costs_the_same_however_many_nodes_and_trials_there_were():
    """Four times the nodes, trials and shards: as many operations an event, of each kind."""
    few, many = operations(8, 3), operations(32, 3)
    told = {
        "job-submitted",
        "job-started",
        "job-ended",
        "staged",
        "shards-dumped",
        "trial-ended",
        "executed",
        "scored",
    }
    assert told <= many.keys()
    for kind in told:
        assert many[kind] < 1.25 * few[kind], f"{kind}: {few[kind]:.0f} operations, then {many[kind]:.0f}"


def test_the_index_is_a_function_of_the_state_to_the_last():
    """After every event of an evaluation it equals what is counted anew."""

    def step(state: State, event: ev.AnyEvent) -> list[do.Action]:
        actions = plain_step(state, event)
        assert state.index == recounted(state)
        return actions

    state = Large(3, 2, tasks=4, generations=2, step=step).run()
    assert all(e.status == "scored" for e in state.entries)


def test_a_replay_without_stealing_costs_no_look_at_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lanes_to_do` looks at each shard: a replay, which starts no trial, never calls it for one."""
    world = World(1, Faults(), record(steal=False), nodes=3)
    world.run_to_scores()
    calls = 0
    real = State.lanes_to_do

    def counted(state: State) -> set[str]:
        nonlocal calls
        calls += 1
        return real(state)

    monkeypatch.setattr(State, "lanes_to_do", counted)
    replay(world.journal)
    assert calls <= len(world.state.nodes.by_name)
