"""One shard through a loaded model: read its batches, run them in order, return its record.

Rule: a shard's record depends on the request set, the batch numbers and the model alone.
It does not know: who claimed the shard, or where its record goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import batch_file, batch_index_file, parse_shard
from evaljobs.contract.specs import BatchIndex
from evaljobs.contract.storage import read_record
from evaljobs.lmeval.batches import Batch, decode_batch
from evaljobs.trial import engine


class RequestSet:
    """The batches of one leaf task on disk, at one batch size."""

    def __init__(self, folder: str | Path, batch_size: int) -> None:
        self._file = batch_file(folder, batch_size)
        self.index = read_record(batch_index_file(folder, batch_size), BatchIndex)

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        """Batches first..end-1, read at once: a trial reads shared storage before it infers, not in between."""
        start, stop = self.index.offsets[first], self.index.offsets[end]
        for line in _bytes(self._file, start, stop).splitlines():
            yield decode_batch(line)


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise OSError(f"{path} ends before byte {stop}: build its request set again")
    return data


def run_shard(
    lm: Any,
    requests: RequestSet,
    shard: str,
    *,
    trial: str,
    seed: int,
    tick: Callable[[int, int], None] = lambda _done, _of: None,
) -> ShardResponses:
    """All answers of a shard. `tick(batches done, of how many)` is called before each batch."""
    task, first, end = parse_shard(shard)
    started_at, started = time.time(), time.monotonic()
    answers: list[tuple[int, Any]] = []
    for offset, batch in enumerate(requests.batches(first, end)):
        tick(offset, end - first)
        engine.seed_batch(seed, requests.index.key, first + offset)
        answers += engine.run_batch(lm, batch)
    return ShardResponses(
        task=task,
        key=requests.index.key,
        shard=shard,
        trial=trial,
        started_at=started_at,
        seconds=time.monotonic() - started,
        responses=tuple(answers),
    )
