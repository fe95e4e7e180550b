"""The interface between a trial and its engine.

Rule: answers are a pure function of the checkpoint, its options, the batch and its seed. They do not depend on other batches,
their order, or the lane. Called from `trial` and `shard_runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evaljobs.lmeval.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Where a model was loaded, and the seconds to import its libraries and to read its weights.

    `fast`: why units of fast mode go lm-eval's way; "" if they do not, or none has been seen.
    """

    devices: str
    gpus: int
    import_seconds: float
    load_seconds: float
    fast: str = ""


@dataclass(slots=True)
class Usage:
    """Accumulated cost of answers. `tokenise_seconds`: conversion between text and tokens, part of its seconds.

    `generated_tokens`: including the padding behind shorter answers; None if the engine does not report it.
    """

    tokenise_seconds: float = 0.0
    generated_tokens: int | None = None


class Engine(Protocol):
    """A loaded checkpoint, created by `loading.load_engine` and used by one thread."""

    @property
    def loaded(self) -> Loaded:
        """The facts about the model so far."""
        ...

    @property
    def usage(self) -> Usage: ...

    @property
    def model(self) -> object:
        """A torch module with the weights, or another object if the engine does not expose them."""
        ...

    @property
    def tokenizer(self) -> object:
        """A tokenizer with transformers' interface; None if the engine has none."""
        ...

    def warm_up(self) -> float:
        """Run a first forward pass that draws no random number, and return its seconds; 0.0 without one."""
        ...

    def probe_batch_size(self) -> int:
        """Return the batch size that fits a model loaded with batch size "auto"."""
        ...

    def probe_token_budget(self, batch_size: int) -> int:
        """Return the padded tokens per forward pass that fit, given that `batch_size` fits."""
        ...

    def fix_batch_size(self, batch_size: int) -> None:
        """Use this batch size from now on, on a model loaded with "auto"."""
        ...

    def answers(
        self, batches: Sequence[Batch], seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        """Return (request index, answer) of every piece, as in `ShardResponses.responses`.

        `seeds`: one per batch. Calls `tick(batches done)` at least once before each batch. An exception from `tick` ends the
        call, and the engine forgets the requests.
        """
        ...

    def close(self) -> None:
        """Release everything the engine has started: processes, shared memory."""
        ...
