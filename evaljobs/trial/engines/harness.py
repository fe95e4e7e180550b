"""Runs batches through a model of lm-eval's own class, one batch at a time.

Rule: the class is lm-eval's own, made with the arguments of lm-eval's command. A batch goes through
its methods, so lm-eval's code groups, pads and decodes it. Importing this module imports no torch.
Called from `loading`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from evaljobs.contract.engine_traits import DYNAMIC, growing_rope
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval.batches import Batch
from evaljobs.lmeval.conversations import answer_conversations
from evaljobs.trial.engines.protocol import Loaded, Usage
from evaljobs.trial.engines.weights import check_answers, next_logits

if TYPE_CHECKING:  # it imports torch
    from evaljobs.trial.engines.hf_fast import FastLikelihoods

log = logging.getLogger(__name__)

# An engine that batches by itself gets as many requests at once as it accepts.
SELF_BATCHING_SIZE = 256
TOKENISERS = ("tok_encode", "tok_batch_encode", "tok_decode")  # methods of lm-eval's classes


class HarnessEngine:
    """`lm`: the model; see `protocol.Engine`."""

    def __init__(self, lm: Any, options: ModelOptions, loaded: Loaded) -> None:
        self.lm = lm
        self.loaded = loaded
        self.usage = Usage()
        self.tokenizer: object = getattr(lm, "tokenizer", None)
        self._options = options
        for name in TOKENISERS:
            if hasattr(lm, name):
                setattr(lm, name, self._timed(getattr(lm, name)))
        if hasattr(lm, "tok_decode"):
            self.usage.generated_tokens = 0
            lm.tok_decode = self._counted(lm.tok_decode)
        self._fast: FastLikelihoods | None = None
        config: Any = getattr(getattr(lm, "model", None), "config", None)
        self._keeps_scale = hasattr(config, "to_dict") and growing_rope(config.to_dict()) == DYNAMIC

    @property
    def model(self) -> object:
        """As in lm-eval's class."""
        return getattr(self.lm, "model", None)

    def warm_up(self) -> float:
        """Run a first forward pass of one token and return its seconds, so that lazy loading does not count as inference.

        Draws no random number and keeps nothing. Returns 0.0 without a pass for compiled models, which specialise on the
        first shape, and for classes other than lm-eval's causal `hf`. If it fails, the first batch reports the error.
        """
        call, kind = getattr(self.lm, "_model_call", None), getattr(self.lm, "AUTO_MODEL_CLASS", None)
        if (
            call is None
            or getattr(kind, "__name__", "") != "AutoModelForCausalLM"
            or self._options.model_args.get("compile")
        ):
            return 0.0
        import torch  # noqa: PLC0415

        started = time.monotonic()
        try:
            token = torch.zeros((1, 1), dtype=torch.long, device=self.lm.device)
            call(token)[0, -1, 0].item()  # `item` waits for the GPU
        except Exception:
            log.warning("the warm-up forward failed", exc_info=True)
            return 0.0
        return time.monotonic() - started

    def probe_batch_size(self) -> int:
        """Return the batch size that lm-eval's own detection finds for inputs of the model's full length."""
        detect = getattr(self.lm, "_detect_batch_size", None)
        if detect is None:
            return SELF_BATCHING_SIZE
        return max(1, int(detect()))

    def probe_token_budget(self, batch_size: int) -> int:
        """Return the tokens of the largest pass of lm-eval's detection, which keeps the logits of all of them."""
        return batch_size * int(self.lm.max_length)

    def fix_batch_size(self, batch_size: int) -> None:
        """Set the evaluation's batch size on a model loaded with "auto".

        lm-eval's hf classes keep it in `batch_size_per_gpu` (there `batch_size` is read-only), classes
        of engines that batch by themselves in `batch_size`.
        """
        name = "batch_size_per_gpu" if hasattr(self.lm, "batch_size_per_gpu") else "batch_size"
        setattr(self.lm, name, batch_size)

    def answers(
        self, batches: Sequence[Batch], seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        """Answer one batch after the other, each with its seed. Raise BrokenWeightsError if an answer is not finite."""
        pairs: list[tuple[int, Any]] = []
        for done, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
            tick(done)
            if self._keeps_scale:
                self.warm_up()  # a short row resets the scale left by the previous batch
            seed_generators(seed)
            with next_logits(self.model if batch.kind == "generate_until" else None) as were_finite:
                found = run_batch(self.lm, batch) if batch.unit is None else self._unit_answers(batch)
            check_answers(batch, [answer for _, answer in found], were_finite)
            pairs += found
        return pairs

    def _unit_answers(self, batch: Batch) -> list[tuple[int, Any]]:
        """Answer a unit of fast mode, from its trees or otherwise in lm-eval's way. The first unit probes the model."""
        from evaljobs.trial.engines.hf_fast import FastLikelihoods  # noqa: PLC0415

        if self._fast is None:
            self._fast = FastLikelihoods(self.lm)
        answers = self._fast.answers(batch)
        self.loaded = replace(self.loaded, fast=self._fast.reason)
        return run_batch(self.lm, batch) if answers is None else answers

    def close(self) -> None:
        """Do nothing: the class starts no process."""

    def _timed(self, tokeniser: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            started = time.monotonic()
            try:
                return tokeniser(*arguments, **more)
            finally:
                self.usage.tokenise_seconds += time.monotonic() - started

        return timed

    def _counted(self, decode: Callable[..., str]) -> Callable[..., str]:
        """Wrap decoding to count tokens: lm-eval decodes each answer's tokens as a list, and single tokens as numbers."""

        def counted(tokens: Any, **more: Any) -> str:
            if isinstance(tokens, list):
                self.usage.generated_tokens = (self.usage.generated_tokens or 0) + len(tokens)
            return decode(tokens, **more)

        return counted


def seed_generators(value: int) -> None:
    """Seed every generator that sampling may draw from. `value`: below 2**32."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 (the generator that others' code draws from)
    torch.manual_seed(value)  # every CUDA device too


def _request(*arguments: Any) -> SimpleNamespace:
    """The part of lm-eval's Instance that its model classes use."""
    return SimpleNamespace(args=arguments, task_name=None, doc_id=None, request_type="", doc={})


def run_batch(lm: Any, batch: Batch) -> list[tuple[int, Any]]:
    """Return (request index, answer) for every piece of a batch, as in `ShardResponses.responses`."""
    with at_once(lm, batch):
        answers = _ask(lm, batch)
    pairs: list[tuple[int, Any]] = []
    for piece, answer in zip(batch.pieces, answers, strict=True):
        if batch.kind == "loglikelihood":
            pairs.append((piece.index, [float(answer[0]), bool(answer[1])]))
        elif batch.kind == "loglikelihood_rolling" and not batch.text:
            pairs.append((piece.index, [piece.window, float(answer[0])]))
        elif batch.kind == "loglikelihood_rolling":
            # a single term: the engine cut the text into its own windows and summed them
            pairs.append((piece.index, [0, float(answer)]))
        else:
            pairs.append((piece.index, answer))
    return pairs


@contextmanager
def at_once(lm: Any, batch: Batch) -> Iterator[None]:
    """Make lm-eval's hf class run a whole batch at once, although its batch size is the evaluation's.

    A task's own batch size and rolling windows by token budget may be larger. A unit that goes lm-eval's way is cut by the
    evaluation's size, since its complete requests may not fit at once.
    """
    own = getattr(lm, "batch_size_per_gpu", None)
    if not isinstance(own, int) or batch.unit is not None or len(batch.pieces) <= own:
        yield
        return
    lm.batch_size_per_gpu = len(batch.pieces)
    try:
        yield
    finally:
        lm.batch_size_per_gpu = own


def _ask(lm: Any, batch: Batch) -> list[Any]:
    if batch.kind == "generate_until":
        return list(
            answer_conversations(lm, batch.pieces, lambda prompts, _pieces: _generated(lm, batch, prompts))
        )
    if batch.text:
        if batch.kind == "loglikelihood":
            pairs = [_request(p.context, p.continuation) for p in batch.pieces]
            return list(lm.loglikelihood(pairs, disable_tqdm=True))
        whole = [_request(p.context) for p in batch.pieces]
        return list(lm.loglikelihood_rolling(whole, disable_tqdm=True))
    if batch.kind == "loglikelihood":
        requests = [(("", ""), p.context, p.continuation) for p in batch.pieces]
        return list(lm._loglikelihood_tokens(requests, disable_tqdm=True))  # noqa: SLF001
    windows = [(None, p.context, p.continuation) for p in batch.pieces]
    return list(lm._loglikelihood_tokens(windows, disable_tqdm=True, override_bs=len(windows)))  # noqa: SLF001


def _generated(lm: Any, batch: Batch, prompts: list[str]) -> list[str]:
    asked = [_request(prompt, dict(batch.settings or {})) for prompt in prompts]
    return [str(answer) for answer in lm.generate_until(asked, disable_tqdm=True)]
