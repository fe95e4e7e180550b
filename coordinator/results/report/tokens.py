"""Tokens of an evaluation: asked, computed and generated, and the seconds of tokenising. Pure.

Rule: only shards with a valid record are counted; a token of a shard that ran twice counts once. Called by `finalize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import TrialEnded
from evaljobs.contract.specs import BatchIndex, Record

Indexes = Mapping[tuple[str, str], BatchIndex]  # (leaf task, cut) -> its batches


class TokenUse(Record):
    """`asked`: input tokens if each request were computed alone. `computed`: those of the forward passes.

    `computed` includes the padding of batches, and counts a context that several requests share once. It exceeds `asked` if
    padding outweighs sharing.
    """

    asked: int
    computed: int
    generated: int | None  # including padding behind shorter answers; None: no trial reported it
    infer_seconds: float  # of the trials, including tokenising
    tokenise_seconds: float

    @property
    def shared(self) -> float:
        """The fraction of `asked` that was not computed; negative if padding outweighs sharing."""
        return 1 - self.computed / self.asked if self.asked else 0.0

    @property
    def per_second(self) -> float | None:
        """Tokens computed and generated per second of inference on one lane."""
        return (self.computed + (self.generated or 0)) / self.infer_seconds if self.infer_seconds else None


def token_use(shards: Iterable[str], indexes: Indexes, trials: Iterable[TrialEnded]) -> TokenUse | None:
    """Return the tokens of these shards; None if an index is missing or of a version without asked tokens."""
    asked = computed = 0
    for shard in map(ShardId.parse, shards):
        index = indexes.get((shard.task, shard.cut))
        if index is None or len(index.asked_tokens) < shard.end_batch:
            return None
        asked += sum(index.asked_tokens[shard.first_batch : shard.end_batch])
        computed += sum(index.prefill_tokens[shard.first_batch : shard.end_batch])
    ended = list(trials)
    generated = [trial.generated_tokens for trial in ended if trial.generated_tokens is not None]
    return TokenUse(
        asked=asked,
        computed=computed,
        generated=sum(generated) if generated else None,
        infer_seconds=sum(trial.infer_seconds for trial in ended),
        tokenise_seconds=sum(trial.tokenise_seconds for trial in ended),
    )
