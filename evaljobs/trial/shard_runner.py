"""Runs one shard through a loaded model: reads its batches, runs them in order, returns its record.

Rule: a shard's record depends on the request set, the batch numbers and the model alone. Used by
`trial`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import batch_file, batch_index_file
from evaljobs.contract.specs import BatchIndex
from evaljobs.contract.storage import read_record
from evaljobs.lmeval.batches import Batch, decode_batch
from evaljobs.trial import engine

T = TypeVar("T")


class RequestSet:
    """The batches of one leaf task on disk, at one batch size.

    `copy`: a nearer folder with the same files, checked by its writer; without it `folder` is read.
    """

    def __init__(self, folder: str | Path, batch_size: int, *, copy: Path | None = None) -> None:
        self._places = [Path(place) for place in (copy, folder) if place is not None]
        self._batch_size = batch_size
        self.index = self._nearest(lambda place: read_record(batch_index_file(place, batch_size), BatchIndex))

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        """Batches first..end-1, all read before the first is run: storage does not delay inference."""
        start, stop = self.index.offsets[first], self.index.offsets[end]
        data = self._nearest(lambda place: _bytes(batch_file(place, self._batch_size), start, stop))
        for line in data.splitlines():
            yield decode_batch(line)

    def _nearest(self, read: Callable[[Path], T]) -> T:
        """What `read` returns for the copy while it exists, then for the folder itself."""
        while len(self._places) > 1:
            try:
                return read(self._places[0])
            except OSError:
                del self._places[0]
        return read(self._places[0])


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
    """All answers of a shard. Calls `tick(batches done, batches in all)` before each batch."""
    name = ShardId.parse(shard)
    task, first, end = name.task, name.first_batch, name.end_batch
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
