"""Laws of the tokens in a report."""

from __future__ import annotations

from support.simulated.parts import ended

from coordinator.report.tokens import token_use
from evaljobs.contract.specs import BatchIndex


def index(asked: tuple[int, ...]) -> BatchIndex:
    return BatchIndex(
        task="t",
        key="k",
        batch_size=2,
        offsets=(0, 1, 2, 3),
        requests=(2, 2, 2),
        prefill_tokens=(60, 50, 40),
        generated_tokens=(0, 0, 0),
        documents=((0,), (1,), (2,)),
        asked_tokens=asked,
    )


def test_the_tokens_of_the_shards_that_count_are_summed_by_their_own_cut() -> None:
    """Each cut has its own batches; a shard that does not count adds nothing."""
    trial = ended("n1", "trial.0", "drained").model_copy(update={"generated_tokens": 7})
    indexes = {("t", ""): index((100, 90, 80)), ("t", "fast-64-2"): index((1, 1, 1))}
    use = token_use(["t|0|2"], indexes, [trial, ended("n1", "trial.1", "drained")])
    assert use is not None
    assert (use.asked, use.computed, use.generated) == (190, 110, 7)
    assert use.shared == 1 - 110 / 190
    assert use.per_second == (110 + 7) / use.infer_seconds


def test_no_tokens_are_told_where_a_batch_file_does_not_say_them() -> None:
    """An index is missing, or of a version without asked tokens."""
    assert token_use(["t|0|2"], {}, []) is None
    assert token_use(["t|0|2"], {("t", ""): index(())}, []) is None
