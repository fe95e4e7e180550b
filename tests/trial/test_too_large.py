"""Laws of the search for the size that fits: by halves, on the longest rows, and nothing else is caught."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaljobs.lmeval.batches import Batch, Piece, Unit
from evaljobs.trial.shard_runner import longest_parts, too_large_error


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """As in a trial: what was imported is not looked at each time that memory is freed."""
    gc.freeze()
    yield
    gc.unfreeze()


TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=24)


def batch_of(contexts, unit=None):
    pieces = [
        Piece(
            kind="loglikelihood",
            index=n,
            document=n,
            context=context,
            continuation=[9],
            length=len(context) + 1,
        )
        for n, context in enumerate(contexts)
    ]
    return Batch(kind="loglikelihood", text=False, settings=None, pieces=pieces, unit=unit)


class Small:
    """An engine with memory for so many rows; requests after equal tokens share one."""

    def __init__(self, rows):
        self.rows = rows
        self.asked = []

    def answers(self, batches, seeds, tick):
        (batch,), (_,) = batches, seeds
        tick(0)
        rows = len({tuple(p.context) for p in batch.pieces}) if batch.unit is None else len(batch.unit.rows)
        self.asked.append(rows)
        if rows > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []


def found(engine, batch, tick=lambda: None):
    made = engine
    return too_large_error(made, batch, 0, "no room", fast=batch.unit is not None, tick=tick)


@given(contexts=TOKENS, rows=st.integers(0, 24))
def test_what_is_said_to_fit_fits_and_twice_as_much_does_not(contexts, rows):
    batch = batch_of(contexts)
    of = len({tuple(context) for context in contexts})
    error = found(Small(min(rows, of - 1)), batch)
    assert (error.of, error.what) == (of, "likelihoods")
    assert error.fits <= rows
    assert error.fits == 0 or 4 * error.fits + 3 >= min(rows, of - 1)


@given(contexts=TOKENS, parts=st.integers(1, 24))
def test_the_longest_rows_are_tried_with_all_their_requests(contexts, parts):
    """A batch of the size that is named begins with the longest requests."""
    batch = batch_of(contexts)
    tried = longest_parts(batch, parts)
    kept = {tuple(p.context) for p in tried.pieces}
    left = {tuple(p.context) for p in batch.pieces} - kept
    assert len(kept) == min(parts, len(kept | left))
    assert not left or min(map(len, kept)) >= max(map(len, left))
    assert [p.index for p in tried.pieces] == [p.index for p in batch.pieces if tuple(p.context) in kept]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(1, 12))
def test_a_unit_is_halved_by_rows(rows, fits):
    batch = batch_of([[1]] * sum(rows), Unit(3, rows))
    error = found(Small(min(fits, len(rows) - 1)), batch)
    assert (error.what, error.of) == ("unit", len(rows))
    part = longest_parts(batch, error.fits)
    assert part.unit == Unit(3, rows[: error.fits])
    assert len(part.pieces) == sum(rows[: error.fits])


def test_another_error_in_the_search_is_that_error():
    class Broken(Small):
        def answers(self, *_arguments):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        found(Broken(1), batch_of([[1], [2]]))


def test_the_search_ends_where_the_trial_is_to_end():
    """A trial that got SIGTERM does not try all sizes first."""

    def tick():
        raise KeyboardInterrupt

    engine = Small(0)
    with pytest.raises(KeyboardInterrupt):
        found(engine, batch_of([[n] for n in range(8)]), tick)
    assert not engine.asked
