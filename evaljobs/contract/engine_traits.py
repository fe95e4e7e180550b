"""What the coordinator must know of an engine to plan its trials and to ask for their jobs, and of a model's rope.

Rule: an engine that has no row has the values of lm-eval's `hf`. The figures are defaults, measured or
rounded up; settings come before them. Called from the coordinator and the trials' engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

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


# Rotary embeddings whose scale follows a batch's longest row, as a model's config.json names them.
DYNAMIC: Final = "dynamic"  # transformers keeps its scale from batch to batch until a short one comes
GROWING: Final = (DYNAMIC, "longrope", "su")  # "su": longrope in the first configs of Phi-3
_TABLES = ("rope_parameters", "rope_scaling")


def growing_rope(config: Mapping[str, Any]) -> str:
    """The kind of `GROWING` that a model's config, or a part of it, names; "" for none."""
    return next((kind for kind in _kinds(config, within=False) if kind in GROWING), "")


def _kinds(config: Mapping[str, Any], *, within: bool) -> Iterator[object]:
    """`within`: is it (a layer type's part of) a table of rotary embeddings?"""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _kinds(value, within=within or key in _TABLES)
        elif within and key in ("rope_type", "type"):
            yield value
