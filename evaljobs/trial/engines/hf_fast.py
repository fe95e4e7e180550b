"""Fast likelihoods of lm-eval's hf class: one forward pass per unit, in which no token is computed twice.

Rule: an answer is a pure function of the checkpoint and its unit. A probe compares the logits of a small unit with those of
plain forward passes; a model that fails it is run in lm-eval's way. Imports torch, so `harness` imports this for the first
unit.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from evaljobs.contract.engine_traits import growing_rope
from evaljobs.errors import one_line
from evaljobs.lmeval import prefix_tries
from evaljobs.lmeval.batches import Batch, Piece, Unit
from evaljobs.lmeval.prefix_tries import input_of, tokens_of

log = logging.getLogger(__name__)

# tokens, also for the rows below: enough to reveal wrong attention, few enough for any model
PROBE_PREFIX = 24
PROBE_COMMON = 20
PROBE_SCORED = 9  # tokens of a branch whose logits are compared, at most
PROBE_SEED = 20
SLIDING = "sliding_attention"
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size")
# Largest distance of a unit's log-probabilities from plain forward passes, relative to that with causal attention over whole
# rows. Rounding alone reaches 0.04 in bfloat16, 4e-6 in float32; attention that ignores the mask or the positions exceeds
# 0.3.
TOLERANCE = 0.1
TOLERANCE_32_BIT = 0.001


# --- tensors of a unit ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodRequest:
    """One likelihood: its input without the task prefix, and the tokens scored after its end."""

    tokens: list[int]
    continuation: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTensors:
    """`rows` x `width` tokens, padded on the right. Places count through all rows.

    `positions`: depth in the tree, the task prefix included. `visible`: [rows, 1, width, prefix + width],
    what each token attends to. `scored`: places after which a token is predicted, each once.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    scored: torch.Tensor
    # of each scored token of each request, one request after the other
    predicted_from: torch.Tensor  # index into `scored`
    predicted: torch.Tensor  # token ids
    lengths: list[int]  # scored tokens of each request


def unit_tensors(rows: Sequence[Sequence[LikelihoodRequest]], prefix: int) -> UnitTensors:
    """Build the tensors of a unit on the CPU. `prefix`: tokens of the task prefix. Requests in order of rows."""
    laid = [prefix_tries.lay_out_trie([ask.tokens for ask in row]) for row in rows]
    width = max(row[-1].end for row in laid)
    tokens: NDArray[np.int64] = np.zeros((len(rows), width), dtype=np.int64)
    positions: NDArray[np.int64] = np.zeros((len(rows), width), dtype=np.int64)
    visible: NDArray[np.bool_] = np.zeros((len(rows), 1, width, prefix + width), dtype=bool)
    numbers: dict[int, int] = {}  # position -> index into `scored`
    predicted_from: list[int] = []
    for number, (row, branches) in enumerate(zip(rows, laid, strict=True)):
        seen = visible[number, 0]
        for ask, (common, start, path) in zip(row, branches, strict=True):
            end = start + len(path) - common
            tokens[number, start:end] = ask.tokens[common:]
            positions[number, start:end] = np.arange(prefix + common, prefix + len(path))
            seen[start:end, :prefix] = True
            seen[start:end, prefix + np.array(path[:common], dtype=np.int64)] = True
            seen[start:end, prefix + start : prefix + end] = np.tri(end - start, dtype=bool)
            predicted_from += [
                numbers.setdefault(number * width + place, len(numbers))
                for place in path[-len(ask.continuation) :]
            ]
        padding = np.arange(branches[-1].end, width)
        seen[padding, prefix + padding] = True  # a token that attends to nothing would give NaN
    return UnitTensors(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        visible=torch.from_numpy(visible),
        scored=torch.tensor(list(numbers)),
        predicted_from=torch.tensor(predicted_from),
        predicted=torch.tensor([token for row in rows for ask in row for token in ask.continuation]),
        lengths=[len(ask.continuation) for row in rows for ask in row],
    )


# --- attention: the mask's form follows from the configuration; a probe shows whether it is respected --------------


class UnfitModelError(Exception):
    """The reason why this model's likelihoods cannot be computed in trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Form of the mask. `additive`: its dtype if the attention adds it to scores; None: it is boolean.

    `window`: tokens of a row beyond which attention may depend on more than the tree. `kinds`: the kinds of attention layers,
    if several; `slides`: whether the only kind slides.
    """

    additive: torch.dtype | None
    window: int | None
    kinds: tuple[str, ...] = ()
    slides: bool = False

    def mask(self, unit: UnitTensors, device: torch.device) -> Any:
        """Return the argument `attention_mask`: a tensor, or one for each kind of layer."""
        visible = unit.visible.to(device)
        if self.window is None or visible.shape[-1] <= self.window:
            return self._formed(visible)
        near = visible & self._near(unit).to(device)
        if self.kinds:
            return {kind: self._formed(near if kind == SLIDING else visible) for kind in self.kinds}
        return self._formed(near if self.slides else visible)

    def _near(self, unit: UnitTensors) -> torch.Tensor:
        rows, _, width, keys = unit.visible.shape
        prefix = torch.arange(keys - width).expand(rows, -1)
        key_positions = torch.cat([prefix, unit.positions], dim=1)
        assert self.window is not None
        return (unit.positions[:, :, None] - key_positions[:, None, :] < self.window).unsqueeze(1)

    def _formed(self, visible: torch.Tensor) -> torch.Tensor:
        if self.additive is None:
            return visible
        hidden = torch.finfo(self.additive).min
        return torch.zeros_like(visible, dtype=self.additive).masked_fill(~visible, hidden)


def shape_of(lm: Any) -> AttentionShape:
    """Read the mask's form from the configuration of lm-eval's model. Raise UnfitModelError if no mask can be passed."""
    if getattr(lm.AUTO_MODEL_CLASS, "__name__", "") != "AutoModelForCausalLM" or lm.backend != "causal":
        raise UnfitModelError("it is not a causal language model of lm-eval's hf class")
    if hasattr(lm.model, "_orig_mod"):
        raise UnfitModelError("torch.compile specialises on shapes, and each unit has its own")
    config = lm.model.config
    form = config._attn_implementation  # noqa: SLF001
    if form not in {"sdpa", "eager"}:
        raise UnfitModelError(f"its attention {form!r} does not accept a tree mask")
    if rope := growing_rope(config.to_dict()):
        raise UnfitModelError(f"its {rope} rope scales a row by the longest row beside it")
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in WINDOWS]
    kinds = tuple(sorted(set(getattr(text, "layer_types", None) or ())))
    slides = kinds == (SLIDING,) or (not kinds and getattr(text, "sliding_window", None) is not None)
    return AttentionShape(
        additive=lm.model.dtype if form == "eager" else None,
        window=min((w for w in windows if isinstance(w, int) and w > 0), default=None),
        kinds=kinds if len(kinds) > 1 else (),
        slides=slides,
    )


def flatten_attention(unit: UnitTensors) -> UnitTensors:
    """Return the unit with wrong attention: each token attends to all before it, as if a row were one text."""
    rows, _, width, keys = unit.visible.shape
    causal = torch.ones(width, keys, dtype=torch.bool).tril(keys - width)
    places = torch.arange(keys - width, keys).expand(rows, -1)
    return replace(unit, visible=causal.expand(rows, 1, -1, -1), positions=places)


def logprob_distance(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the root mean square difference of log-probabilities over the vocabulary, at the worst position."""
    one, other = (functional.log_softmax(x.float(), dim=-1) for x in (ours, plain))
    return float((one - other).square().mean(dim=-1).sqrt().max())


def check_logits(ours: torch.Tensor, flat: torch.Tensor, plain: torch.Tensor) -> None:
    """Raise UnfitModelError if a unit's logits differ from those of plain forward passes by more than rounding."""
    if not plain.isfinite().all():
        raise UnfitModelError("its logits of random tokens are NaN or infinite")
    error, wrong = logprob_distance(ours, plain), logprob_distance(flat, plain)
    tolerance = TOLERANCE_32_BIT if plain.dtype == torch.float32 else TOLERANCE
    if not error <= tolerance * wrong:  # a NaN is larger than everything
        raise UnfitModelError(
            f"its logits in a tree differ from plain ones by {error:.2g}, where wrong attention makes {wrong:.2g}"
        )


# --- forward passes ---------------------------------------------------------------------------------------------


class PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers' types are not seen
    """Keys and values of the task prefix in one layer. A forward pass reads them and adds nothing."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = key_states.shape[0]
        assert self.keys is not None
        assert self.values is not None
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


class FastLikelihoods:
    """Fast likelihoods of `lm`, lm-eval's HFLM with its weights. `reason`: why some units go lm-eval's way, or ""."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._prefix: tuple[list[int], DynamicCache] | None = None
        self._past_window: str | None = None  # why rows past the window are wrong; None: not probed
        self._unfit = self.reason = self._probed(PROBE_COMMON)

    def answers(self, batch: Batch) -> list[tuple[int, Any]] | None:
        """Return (request index, [log-likelihood, whether greedy]) of every piece of a unit.

        None if the unit has to go lm-eval's way, which depends only on the model and the unit.
        """
        if self._unfit or batch.unit is None:
            return None
        unit, prefix = self._unit(batch.pieces, batch.unit)
        if not self._right_at(unit.visible.shape[-1]):
            return None
        with torch.no_grad():
            logits = self._logits(unit, self._cache_of(prefix))
            scores = functional.log_softmax(logits, dim=-1, dtype=self._lm.softmax_dtype)
            places, wanted = unit.predicted_from.to(scores.device), unit.predicted.to(scores.device)
            terms = scores[places, wanted].cpu()
            greedy = (scores.argmax(dim=-1)[places] == wanted).cpu()
        return [
            (piece.index, [float(own.sum()), bool(same.all())])
            for piece, own, same in zip(
                batch.pieces, terms.split(unit.lengths), greedy.split(unit.lengths), strict=True
            )
        ]

    def _unit(self, pieces: Sequence[Piece], unit: Unit) -> tuple[UnitTensors, list[int]]:
        """Return a unit's tensors, and its task prefix."""
        inputs = [input_of(piece, self._lm.max_length) for piece in pieces]
        asks = iter(
            LikelihoodRequest(tokens=tokens[unit.prefix :], continuation=tokens_of(piece.continuation))
            for tokens, piece in zip(inputs, pieces, strict=True)
        )
        rows = [[next(asks) for _ in range(count)] for count in unit.rows]
        return unit_tensors(rows, unit.prefix), inputs[0][: unit.prefix]

    # --- forward passes ------------------------------------------------------------------------------------------

    def _cache_of(self, prefix: list[int]) -> DynamicCache | None:
        """Return keys and values of a task prefix, computed separately; the last prefix's are cached."""
        if not prefix:
            return None
        if self._prefix is None or self._prefix[0] != prefix:
            cache = DynamicCache()
            tokens = torch.tensor([prefix], device=self._lm.device)
            with self._head_at(torch.tensor([len(prefix) - 1])):
                self._forward(input_ids=tokens, past_key_values=cache, use_cache=True)
            cache.layers = [PrefixLayer(layer.keys, layer.values) for layer in cache.layers]
            self._prefix = (prefix, cache)
        return self._prefix[1]

    def _logits(self, unit: UnitTensors, cache: DynamicCache | None) -> torch.Tensor:
        """Return [scored positions, vocabulary] in the model's dtype."""
        device = self._lm.device
        with self._head_at(unit.scored):
            logits = self._forward(
                input_ids=unit.tokens.to(device),
                position_ids=unit.positions.to(device),
                attention_mask=self._shape.mask(unit, device),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        if logits.shape[:-1] != (1, len(unit.scored)):
            raise UnfitModelError(f"its logits have the shape {tuple(logits.shape)}")
        return logits[0]

    def _forward(self, **inputs: Any) -> torch.Tensor:
        """Run a forward pass like HFLM._model_call (lm_eval/models/huggingface.py, 0.4.13)."""
        precision = self._lm.mixed_precision_dtype
        with (
            torch.no_grad(),
            torch.autocast(device_type=self._lm.device.type, dtype=precision, enabled=precision is not None),
        ):
            logits: torch.Tensor = self._lm.model(**inputs).logits
        return logits

    @contextmanager
    def _head_at(self, places: torch.Tensor) -> Iterator[None]:
        """Restrict the model's last layer to logits at these positions, counted through all rows."""
        head = self._lm.model.get_output_embeddings()
        if head is None:
            raise UnfitModelError("it has no output embeddings")

        def choose(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden = inputs[0]
            return (hidden.flatten(0, 1)[places.to(hidden.device)].unsqueeze(0), *inputs[1:])

        hook = head.register_forward_pre_hook(choose)
        try:
            yield
        finally:
            hook.remove()

    # --- the probe -----------------------------------------------------------------------------------------------

    def _right_at(self, length: int) -> bool:
        """Return whether rows of this length, including the prefix, are right; beyond the window a probe decides."""
        window = self._shape.window
        if window is None or length <= window:
            return True
        if self._past_window is None:
            self._past_window = self._probed(window + 8)
            if self._past_window:
                self.reason = f"rows of more than {window} tokens: {self._past_window}"
        return not self._past_window

    def _probed(self, common: int) -> str:
        """Return why a unit whose branches share `common` tokens is wrong; "" if it is right."""
        try:
            self._shape = shape_of(self._lm)
            self._check(common)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever the model's own code raises is the reason)
            log.warning("likelihoods of fast mode go lm-eval's way: %s", one_line(error))
            return one_line(error)
        return ""

    def _check(self, common: int) -> None:
        """Compare a small unit with plain forward passes. Raise UnfitModelError if they differ."""
        prefix, rows = probe_rows(common, self._lm.model.get_input_embeddings().num_embeddings)
        unit = unit_tensors(rows, len(prefix))
        with torch.no_grad():
            cache = self._cache_of(prefix)
            ours = self._logits(unit, cache)
            flat = self._logits(flatten_attention(unit), cache)
            plain = []
            for ask in (ask for row in rows for ask in row):
                whole = torch.tensor([[*prefix, *ask.tokens]], device=self._lm.device)
                plain.append(self._lm._model_call(whole)[0, -len(ask.continuation) :])  # noqa: SLF001
        check_logits(ours[unit.predicted_from], flat[unit.predicted_from], torch.cat(plain))


def probe_rows(common: int, vocabulary: int) -> tuple[list[int], list[list[LikelihoodRequest]]]:
    """Return a task prefix, a row of branches that share `common` tokens, and a row with a long branch before another.

    The last branch is `common` positions behind its shared tokens: beyond a window, attention by position misses all of them,
    and the error exceeds bfloat16's rounding.
    """
    draw = random.Random(PROBE_SEED)

    def some(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    def row(shared: int, ends: Sequence[int]) -> list[LikelihoodRequest]:
        start = some(shared)
        return [
            LikelihoodRequest(tokens=start + some(end), continuation=some(min(end, PROBE_SCORED)))
            for end in ends
        ]

    return some(PROBE_PREFIX), [row(common, (6, 9, 3)), row(PROBE_COMMON // 2, (common, 4))]
