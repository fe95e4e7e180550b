"""What an event costs in a large evaluation, counted in operations of the interpreter."""

import sys
from collections import defaultdict

from support.simulated.large import Large, plain_step

TOLD = ("job-submitted", "job-started", "job-ended", "staged", "shards-dumped", "trial-ended", "executed", "scored")  # fmt: skip


def operations(nodes, generations):
    """Bytecode operations of a step by kind of event: the mean over an evaluation of `nodes` nodes."""
    count = 0
    spent = defaultdict(list)

    def trace(frame, event, _arg):
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def step(state, event):
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
    for kind in TOLD:
        assert many[kind] < 1.25 * few[kind], f"{kind}: {few[kind]:.0f} operations, then {many[kind]:.0f}"
