"""What a trial asks of an engine.

Rule: answers are a pure function of the checkpoint, its options, the batch and its seed. They do
not depend on other batches, their order, or the lane. Called from `trial` and `shard_runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evaljobs.lmeval.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Where a model was loaded, and the seconds to import its libraries and to read its weights.

    `fast`: why units of fast mode go lm-eval's way; "" where they do not, or none has come.
    """

    devices: str
    gpus: int
    import_seconds: float
    load_seconds: float
    fast: str = ""


@dataclass(slots=True)
class Usage:
    """What answering took so far. `tokenise_seconds`: for text to tokens and back, a part of its seconds.

    `generated_tokens`: with the padding behind shorter answers; None where the engine does not say.
    """

    tokenise_seconds: float = 0.0
    generated_tokens: int | None = None


class Engine(Protocol):
    """A loaded checkpoint. `loading.load` makes it; one thread uses it."""

    @property
    def loaded(self) -> Loaded:
        """What is known of the model so far."""
        ...

    @property
    def usage(self) -> Usage: ...

    @property
    def model(self) -> object:
        """A torch module with the weights, or something else where the engine keeps them to itself."""
        ...

    @property
    def tokenizer(self) -> object:
        """One of transformers, or of its interface; None where the engine has none."""
        ...

    def warm_up(self) -> float:
        """Seconds of a first forward pass that draws no random number; 0.0 where there was none."""
        ...

    def probe_batch_size(self) -> int:
        """The batch size that fits, of a model loaded with batch size "auto"."""
        ...

    def probe_token_budget(self, batch_size: int) -> int:
        """Padded tokens of a forward pass that fit, where `batch_size` was found to fit."""
        ...

    def fix_batch_size(self, batch_size: int) -> None:
        """Use this batch size from now on, on a model loaded with "auto"."""
        ...

    def answers(
        self, batches: Sequence[Batch], seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        """(request index, answer) of every piece, as in `ShardResponses.responses`.

        `seeds`: one of each batch. Calls `tick(batches done)` at least once before each batch. What
        `tick` raises ends the call, and the engine forgets the requests.
        """
        ...

    def close(self) -> None:
        """End what the engine has started: processes, shared memory."""
        ...
