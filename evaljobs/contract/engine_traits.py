"""What the coordinator must know of an engine to plan its trials and to ask for their jobs.

Rule: an engine that has no row has the values of lm-eval's `hf`. The figures are defaults, measured or
rounded up; settings come before them. Called from the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PLANNED_BATCH = 32
"""Requests of a batch where an engine chooses its batches: a shard is whole batches, and is submitted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """`batches_itself`: a batch size is of no use to it, so "auto" needs no probe."""

    batches_itself: bool = False
    memory_mb: int = 0  # MiB of main memory of each GPU's process, beside a trial's own
    hung_seconds: float = 900.0  # a trial without progress for so long is ended; loading has no progress


ENGINES: Final = {
    # One process takes 2.9 GiB of main memory for a model of 0.5 GB on a CPU. Compiling and capturing
    # CUDA graphs come on top of reading the weights.
    "vllm": EngineTraits(batches_itself=True, memory_mb=4096, hung_seconds=1800.0),
}


def engine_traits(engine: str) -> EngineTraits:
    """The traits of lm-eval's model class of this name."""
    return ENGINES.get(engine, EngineTraits())
