"""Runs a shard: reads its batches, has the engine answer them, builds the record; or measures how much of a batch fits.

Rule: sampling is seeded per batch from (seed, request set, batch number), so it does not depend on where or in which order
batches run. A size is found by bisecting the very batch that did not fit, through the engine's own `answers`; only torch's
out-of-memory error counts, which leaves the engine usable. Called from `trial`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Literal

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import batch_file, batch_index_file
from evaljobs.contract.specs import BatchIndex
from evaljobs.contract.storage import read_record
from evaljobs.errors import one_line
from evaljobs.lmeval.batches import Batch, Piece, Unit, decode_batch
from evaljobs.trial.engines.protocol import Engine
from evaljobs.trial.engines.weights import BrokenWeightsError

WorkKind = Literal["likelihoods", "unit", "generation"]


class TooLargeError(Exception):
    """A batch that does not fit: `fits` of its `of` parts do, as in `outcomes.TooLarge`."""

    def __init__(self, said: str, *, what: WorkKind, fits: int, of: int) -> None:
        super().__init__(said)
        self.what, self.fits, self.of = what, fits, of


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch could not allocate memory on the GPU."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def free_memory() -> None:
    """Release the GPU memory that torch caches."""
    gc.collect()  # an exception's frames held tensors in cycles
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def too_large_error(
    engine: Engine, batch: Batch, seed: int, said: str, *, fast: bool, tick: Callable[[], None]
) -> TooLargeError:
    """Return the error to raise for a batch that did not fit. `fast`: it was cut by a token budget.

    Calls `tick` before each attempt; an exception from `tick` ends the search.
    """
    free_memory()
    of = _parts(batch)
    size = of // 2
    while size and not _fits(engine, longest_parts(batch, size), seed, tick):
        size //= 2
    what: WorkKind = "unit" if fast else "likelihoods"
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
    """Return the row of the forward pass that answers a request: lm-eval runs likelihoods with equal tokens once."""
    if piece.kind == "generate_until" or isinstance(piece.context, str):
        return piece.index
    return (*piece.context, *piece.continuation[:-1])


def longest_parts(batch: Batch, parts: int) -> Batch:
    """Return the batch's longest parts, the largest that a batch of that size can get."""
    if batch.unit is None:
        ordered = sorted(batch.pieces, key=lambda piece: -piece.length)
        chosen = set(list(dict.fromkeys(map(_row, ordered)))[:parts])
        return dataclasses.replace(batch, pieces=[p for p in batch.pieces if _row(p) in chosen])
    rows = batch.unit.rows[:parts]
    return dataclasses.replace(batch, pieces=batch.pieces[: sum(rows)], unit=Unit(batch.unit.prefix, rows))


class RequestSet:
    """The batches of one leaf task on disk, in one cut (`names.ShardId`)."""

    def __init__(self, folder: str | Path, cut: str | int) -> None:
        self._file = batch_file(folder, cut)
        self.index = read_record(batch_index_file(folder, cut), BatchIndex)

    def batches(self, first: int, end: int) -> list[Batch]:
        """Read batches first..end-1 at once, so that storage does not delay inference."""
        start, stop = self.index.offsets[first], self.index.offsets[end]
        with self._file.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        return [decode_batch(line) for line in data.splitlines()]


def batch_seed(seed: int, key: str, number: int) -> int:
    """Return the seed of a batch, below 2**32. `key`: of its request set; `number`: its index there."""
    digest = hashlib.sha256(f"{seed}|{key}|{number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def run_shard(
    engine: Engine,
    requests: RequestSet,
    shard: str,
    *,
    trial: str,
    seed: int,
    tick: Callable[[int, int], None] = lambda _done, _of: None,
) -> ShardResponses:
    """Return all answers of a shard. The engine calls `tick(batches done, total batches)` meanwhile.

    TooLargeError: a batch does not fit the GPU's memory, and the engine has released what it used. BrokenWeightsError: an
    answer is not finite.
    """
    name = ShardId.parse(shard)
    numbers = range(name.first_batch, name.end_batch)
    started_at, started = time.time(), time.monotonic()
    batches = requests.batches(numbers.start, numbers.stop)
    seeds = [batch_seed(seed, requests.index.key, number) for number in numbers]
    at = 0

    def done(count: int) -> None:
        nonlocal at
        at = count
        tick(count, len(numbers))

    answers: Sequence[tuple[int, Any]] = ()
    too_large = ""
    try:
        answers = engine.answers(batches, seeds, done)
    except BrokenWeightsError as error:
        raise BrokenWeightsError(f"wrong weights: task {requests.index.task}, {error}") from error
    except Exception as error:
        # a model class that batches texts by itself does not run this batch
        if batches[at].text or not is_out_of_memory(error):
            raise
        too_large = one_line(error)
    if too_large:  # outside of `except`: the error's frames hold tensors
        fast = name.cut.startswith("fast")
        raise too_large_error(
            engine, batches[at], seeds[at], too_large, fast=fast, tick=lambda: tick(at, len(numbers))
        )
    return ShardResponses(
        task=requests.index.task,
        key=requests.index.key,
        shard=shard,
        trial=trial,
        started_at=started_at,
        seconds=time.monotonic() - started,
        responses=tuple(answers),
    )
