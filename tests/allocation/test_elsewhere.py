"""Another user takes the GPUs that an evaluation was offered: it goes where others are free."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults
from support.simulated.shared import Shared


class Seized(Shared):
    """From some moment on a node's GPUs go to another user for good, as they become free; at first it is the only one."""

    def __init__(self, seed: int, after: float) -> None:
        super().__init__(seed, Faults())
        self.after, self.names = after, ["n0"]
        self.foreign = {"n0": 0, "n1": 0}
        self.contention = self.outages = 0.0

    def change(self) -> None:
        super().change()
        if self.now >= self.after:
            self.foreign["n0"] += max(0, self.gpus - self.used("n0")[0])
        if self.now >= self.after + 60.0 and "n1" not in self.names:
            self.names.append("n1")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), after=st.floats(0.0, 400.0))
def test_an_evaluation_whose_offered_gpus_are_taken_goes_where_there_is_room(seed: int, after: float) -> None:
    """Evaluations whose only node is taken before their trials start are scored on the next one that is free."""
    shared = Seized(seed, after)
    shared.run(1000)
    for tenant in shared.tenants:
        tenant.assert_scored()
        tenant.assert_nothing_left()
