"""What an event costs in a large evaluation, counted in operations of the interpreter."""

import sys
from collections import defaultdict

from support.simulated.large import Large, plain_step

from coordinator.decide.evaluation import step as machine

TOLD = ("job-submitted", "job-started", "job-ended", "staged", "shards-dumped", "trial-ended", "executed", "scored")  # fmt: skip


class Counted:
    """Bytecode operations of a function of (state, event), by kind of event."""

    def __init__(self, function):
        self.function, self.count, self.spent = function, 0, defaultdict(list)

    def trace(self, frame, event, _arg):
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self.trace

    def __call__(self, state, event):
        self.count, before = 0, sys.gettrace()
        sys.settrace(self.trace)
        try:
            return self.function(state, event)
        finally:
            sys.settrace(before)
            kind = event.outcome.kind if event.kind == "outcome-seen" else event.kind
            self.spent[kind].append(self.count)

    def means(self):
        return {kind: sum(each) / len(each) for kind, each in self.spent.items() if len(each) >= 2}


def applied(nodes):
    """Mean operations of taking in an event of each kind, of an evaluation of `nodes` nodes."""
    run = Large(nodes, 2, tasks=4, generations=3)
    run.run()
    state, counted = machine.start_evaluation(run.journal[0])[0], Counted(machine.apply_event)
    for event in run.journal[1:]:
        counted(state, event)
    return counted.means()


def looked(generations):
    """Mean operations of a look, by its event, of an evaluation with so many trials a lane."""
    counted = Counted(plain_step)
    Large(8, 2, tasks=4, generations=generations, step=counted).run()
    return counted.means()


def test_an_event_is_taken_in_at_the_same_cost_however_many_nodes_and_trials_there_were():
    """Four times the nodes, trials and shards: as many operations an event, of each kind."""
    few, many = applied(8), applied(32)
    for kind in TOLD:
        assert many[kind] < 1.25 * few[kind], f"{kind}: {few[kind]:.0f} operations, then {many[kind]:.0f}"


def test_a_look_costs_the_same_however_many_jobs_and_trials_have_ended():
    few, many = looked(8), looked(24)
    for kind in TOLD:
        assert many[kind] < 1.25 * few[kind], f"{kind}: {few[kind]:.0f} operations, then {many[kind]:.0f}"
