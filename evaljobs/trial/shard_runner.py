"""Runs a shard: reads its batches, has the engine answer them, makes the record.

Rule: sampling is seeded per batch from (seed, request set, batch number), so draws do not depend on
where or in which order batches run. Called from `trial`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import batch_file, batch_index_file
from evaljobs.contract.specs import BatchIndex
from evaljobs.contract.storage import read_record
from evaljobs.errors import one_line
from evaljobs.lmeval.batches import Batch, decode_batch
from evaljobs.trial.engines.protocol import Engine
from evaljobs.trial.engines.weights import BrokenWeightsError
from evaljobs.trial.too_large import is_out_of_memory, measured


class RequestSet:
    """The batches of one leaf task on disk, in one cut (`names.ShardId`)."""

    def __init__(self, folder: str | Path, cut: str | int) -> None:
        self._file = batch_file(folder, cut)
        self.index = read_record(batch_index_file(folder, cut), BatchIndex)

    def batches(self, first: int, end: int) -> list[Batch]:
        """Batches first..end-1, all read at once: storage does not delay inference."""
        start, stop = self.index.offsets[first], self.index.offsets[end]
        with self._file.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        return [decode_batch(line) for line in data.splitlines()]


def batch_seed(seed: int, key: str, number: int) -> int:
    """The seed of a batch, below 2**32. `key`: of its request set; `number`: its place there."""
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
    """All answers of a shard. The engine calls `tick(batches done, batches in all)` meanwhile.

    TooLargeError: a batch does not fit the GPU's memory; the engine has freed what it took. BrokenWeightsError: an answer is
    not finite.
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
        raise measured(
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
