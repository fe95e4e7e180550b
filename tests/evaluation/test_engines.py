"""What an evaluation's engine changes: whether a trial probes for a batch size, and the memory that trials ask for."""

from __future__ import annotations

from typing import Literal

import pytest
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.evaluation import events as ev
from coordinator.evaluation import step
from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.engine_traits import PLANNED_BATCH
from evaljobs.contract.specs import ModelOptions


def of(engine: str, batch_size: int | Literal["auto"], **options: int) -> EvaluationRecord:
    made = record(entries=2, **options)
    suite = made.suite.model_copy(update={"batch_size": batch_size})
    return made.model_copy(update={"suite": suite, "model": ModelOptions(engine=engine)})


@pytest.mark.parametrize(
    ("engine", "given", "begins_with"),
    [("hf", "auto", "auto"), ("vllm", "auto", PLANNED_BATCH), ("vllm", 4, 4), ("hf", 4, 4)],
)
def test_auto_starts_no_trial_to_probe_an_engine_that_chooses_its_batches(
    engine: str, given: int | Literal["auto"], begins_with: int | Literal["auto"]
) -> None:
    """Its requests are planned in batches of a fixed size, from the start on."""
    state, _ = step.start(ev.Accepted(at=0.0, record=of(engine, given)))
    assert state.batch_size == begins_with


def test_trials_ask_for_their_engines_memory_and_other_jobs_do_not() -> None:
    def asked(**options: int) -> dict[str, int]:
        world = World(5, Faults(), of("vllm", 8, **options), nodes=1)
        world.run_to_scores()
        return {info.job.purpose: info.job.memory_mb for info in world.state.jobs.by_name.values()}

    plain, more = asked(), asked(engine_memory_mb=1000)
    assert {
        purpose: more[purpose] - plain[purpose] for purpose in plain if more[purpose] != plain[purpose]
    } == {"trial": 1000}
