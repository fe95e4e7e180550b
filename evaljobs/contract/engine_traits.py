"""Facts about an engine for planning its trials and requesting their jobs, and about a model's rope.

Rule: engines without a row have the values of lm-eval's `hf`. The figures are defaults, measured or rounded up; settings take
precedence. Called from the coordinator and the trials' engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

PLANNED_BATCH = 32
"""Requests of a batch if an engine chooses its batches: a shard is whole batches, submitted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Traits of an engine. `batches_itself`: it ignores the batch size, so "auto" needs no probe."""

    batches_itself: bool = False
    memory_mb: int = 0  # MiB of main memory of each GPU's process, on top of a trial's own
    hung_seconds: float = 900.0  # a trial without progress for this long is ended; loading has no progress


ENDPOINT: Final = "local-completions"
"""lm-eval's name of a server that is asked: a trial loads no weights and needs no GPU."""

ENGINES: Final = {
    ENDPOINT: EngineTraits(batches_itself=True, hung_seconds=1800.0),
    # One process takes 2.9 GiB of main memory for a model of 0.5 GB on a CPU. Compiling and capturing
    # CUDA graphs come on top of reading the weights.
    "vllm": EngineTraits(batches_itself=True, memory_mb=4096, hung_seconds=1800.0),
}


def engine_traits(engine: str) -> EngineTraits:
    """Return the traits of lm-eval's model class of this name."""
    return ENGINES.get(engine, EngineTraits())


# Rotary embeddings whose scale follows a batch's longest row, as a model's config.json names them.
DYNAMIC: Final = "dynamic"  # transformers keeps its scale from batch to batch until a short one comes
GROWING: Final = (DYNAMIC, "longrope", "su")  # "su": longrope in the first configs of Phi-3
_TABLES = ("rope_parameters", "rope_scaling")


def growing_rope(config: Mapping[str, Any]) -> str:
    """Return the kind of `GROWING` that a model's config, or a part of it, names; "" for none."""
    return next((kind for kind in _kinds(config, within=False) if kind in GROWING), "")


def _kinds(config: Mapping[str, Any], *, within: bool) -> Iterator[object]:
    """Yield rope kinds. `within`: this is (a layer type's part of) a table of rotary embeddings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _kinds(value, within=within or key in _TABLES)
        elif within and key in ("rope_type", "type"):
            yield value
