"""What attention a model has: the form of a unit's mask for it, its window, and whether its logits are right.

Rule: a mask's form follows from the model's configuration; whether it is heeded is measured, not
read. Imports torch. Called from `hf_fast`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from evaljobs.contract.engine_traits import growing_rope
from evaljobs.trial.engines.tree import UnitTensors

SLIDING = "sliding_attention"
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size")
# Largest distance of a unit's log-probabilities from those of plain forward passes, over the distance
# where each token attends to all before it. Rounding alone reaches 0.04 in bfloat16, 4e-6 in float32;
# attention that heeds no mask, or positions of its own, is above 0.3.
TOLERANCE = 0.1
TOLERANCE_32_BIT = 0.001


class UnfitModelError(Exception):
    """This model's likelihoods cannot be computed in trees; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`additive`: the mask's dtype where the attention adds it to scores; None: it is boolean.

    `window`: tokens of a row from which on attention may depend on more than the tree. `kinds`: the
    kinds of attention layers, where there are several; `slides`: whether the only kind slides.
    """

    additive: torch.dtype | None
    window: int | None
    kinds: tuple[str, ...] = ()
    slides: bool = False

    def mask(self, unit: UnitTensors, device: torch.device) -> Any:
        """The argument `attention_mask`: a tensor, or one of each kind of layer."""
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


def shape_of(lm: Any) -> Shape:
    """Read from the configuration of lm-eval's model. UnfitModelError where no mask can be given."""
    if getattr(lm.AUTO_MODEL_CLASS, "__name__", "") != "AutoModelForCausalLM" or lm.backend != "causal":
        raise UnfitModelError("it is no causal language model of lm-eval's hf class")
    if hasattr(lm.model, "_orig_mod"):
        raise UnfitModelError("torch.compile specialises on shapes, and each unit has its own")
    config = lm.model.config
    form = config._attn_implementation  # noqa: SLF001
    if form not in {"sdpa", "eager"}:
        raise UnfitModelError(f"its attention {form!r} takes no mask of a tree")
    if rope := growing_rope(config.to_dict()):
        raise UnfitModelError(f"its {rope} rope scales a row by the longest row beside it")
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in WINDOWS]
    kinds = tuple(sorted(set(getattr(text, "layer_types", None) or ())))
    slides = kinds == (SLIDING,) or (not kinds and getattr(text, "sliding_window", None) is not None)
    return Shape(
        additive=lm.model.dtype if form == "eager" else None,
        window=min((w for w in windows if isinstance(w, int) and w > 0), default=None),
        kinds=kinds if len(kinds) > 1 else (),
        slides=slides,
    )


def flattened(unit: UnitTensors) -> UnitTensors:
    """The unit with wrong attention: each token attends to all before it, as if a row were one text."""
    rows, _, width, keys = unit.visible.shape
    causal = torch.ones(width, keys, dtype=torch.bool).tril(keys - width)
    places = torch.arange(keys - width, keys).expand(rows, -1)
    return replace(unit, visible=causal.expand(rows, 1, -1, -1), positions=places)


def distance(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Root mean square over the vocabulary of differing log-probabilities, at the worst place."""
    one, other = (functional.log_softmax(x.float(), dim=-1) for x in (ours, plain))
    return float((one - other).square().mean(dim=-1).sqrt().max())


def compare(ours: torch.Tensor, flat: torch.Tensor, plain: torch.Tensor) -> None:
    """UnfitModelError where a unit's logits are not those of plain forward passes, up to rounding."""
    if not plain.isfinite().all():
        raise UnfitModelError("its logits of random tokens are NaN or infinite")
    error, wrong = distance(ours, plain), distance(flat, plain)
    tolerance = TOLERANCE_32_BIT if plain.dtype == torch.float32 else TOLERANCE
    if not error <= tolerance * wrong:  # a NaN is larger than all
        raise UnfitModelError(
            f"its logits in a tree differ from plain ones by {error:.2g}, where wrong attention makes {wrong:.2g}"
        )
