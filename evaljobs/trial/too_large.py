"""Finds how much of a batch fits a GPU's memory, after the batch did not.

Rule: the size is found by halves on that very batch, through the engine's own `answers`. Only torch's
out-of-memory error counts: it leaves the engine usable. Called from `shard_runner`.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Hashable
from typing import Any, Literal

from evaljobs.lmeval.batches import Batch, Piece, Unit
from evaljobs.trial.engines.protocol import Engine

What = Literal["likelihoods", "unit", "generation"]


class TooLargeError(Exception):
    """A batch does not fit: `fits` of its `of` parts do, as in `outcomes.TooLarge`."""

    def __init__(self, said: str, *, what: What, fits: int, of: int) -> None:
        super().__init__(said)
        self.what, self.fits, self.of = what, fits, of


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate memory on the GPU."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def free_memory() -> None:
    """Return the GPU memory that torch keeps for later allocations."""
    gc.collect()  # an exception's frames held tensors in cycles
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(
    engine: Engine, batch: Batch, seed: int, said: str, *, fast: bool, tick: Callable[[], None]
) -> TooLargeError:
    """The error to raise for a batch that did not fit. `fast`: it was cut by a token budget.

    Calls `tick` before each try; what `tick` raises ends the search.
    """
    free_memory()
    of = _parts(batch)
    size = of // 2
    while size and not _fits(engine, longest(batch, size), seed, tick):
        size //= 2
    what: What = "unit" if fast else "likelihoods"
    return TooLargeError(
        said, what="generation" if batch.kind == "generate_until" else what, fits=size, of=of
    )


def _fits(engine: Engine, batch: Batch, seed: int, tick: Callable[[], None]) -> bool:
    try:
        engine.answers([batch], [seed], lambda _done: tick())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    free_memory()
    return False


def _parts(batch: Batch) -> int:
    return len(set(map(_row, batch.pieces))) if batch.unit is None else len(batch.unit.rows)


def _row(piece: Piece) -> Hashable:
    """The row of the forward pass that answers a request: lm-eval asks for likelihoods after equal tokens once."""
    if piece.kind == "generate_until" or isinstance(piece.context, str):
        return piece.index
    return (*piece.context, *piece.continuation[:-1])


def longest(batch: Batch, parts: int) -> Batch:
    """The batch's longest parts. A batch of that size has its longest requests, so this is how large it gets."""
    if batch.unit is None:
        ordered = sorted(batch.pieces, key=lambda piece: -piece.length)
        chosen = set(list(dict.fromkeys(map(_row, ordered)))[:parts])
        return dataclasses.replace(batch, pieces=[p for p in batch.pieces if _row(p) in chosen])
    rows = batch.unit.rows[:parts]
    return dataclasses.replace(batch, pieces=batch.pieces[: sum(rows)], unit=Unit(batch.unit.prefix, rows))
