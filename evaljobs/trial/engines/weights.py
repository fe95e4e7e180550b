"""Checks that a model matches its checkpoint: what loading reports, and finite weights, logits and likelihoods.

Rule: a checkpoint with broken weights gets no score. Anything that transformers or peft initialises at random, skips, or
cannot place is an error here; ties and names that they ignore themselves are not. Does not import torch by itself. Called
from `loading`, `vllm` and `harness`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from evaljobs.errors import OperatorError
from evaljobs.lmeval.batches import Batch

if TYPE_CHECKING:
    from torch import Tensor

MOST_NAMES = 3  # tensors named in a message
SHARED = ("vblora_vector_bank", "prompt_encoder")  # peft's names of tensors that adapters share
OVERFLOW = (
    "so the weights are wrong, or too large for the dtype: save the checkpoint again, or set another dtype"
)


class BrokenWeightsError(OperatorError):
    """Broken weights: no task of this checkpoint may have a score."""


@contextlib.contextmanager
def loaded_whole(model_class: Any) -> Iterator[None]:
    """Raise BrokenWeightsError if loading within the context leaves a tensor of a model or an adapter uninitialised.

    `model_class`: lm-eval's; classes other than its hf classes load by themselves.
    """
    if not hasattr(model_class, "AUTO_MODEL_CLASS"):
        yield
        return
    from transformers import PreTrainedModel  # noqa: PLC0415

    load_model = PreTrainedModel.__dict__["from_pretrained"].__func__

    def model_checked(cls: Any, /, *arguments: Any, output_loading_info: bool = False, **more: Any) -> Any:
        more["ignore_mismatched_sizes"] = True  # otherwise transformers raises before it says which
        model, info = load_model(cls, *arguments, output_loading_info=True, **more)
        shapes = [f"{name} as {list(there)}, not {list(own)}" for name, there, own in info["mismatched_keys"]]
        _refuse("checkpoint", info["missing_keys"], info["unexpected_keys"], shapes)
        return (model, info) if output_loading_info else model

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(PreTrainedModel, "from_pretrained", classmethod(model_checked)))
        with contextlib.suppress(ImportError):
            from peft import PeftModel  # noqa: PLC0415

            load_adapter = PeftModel.load_adapter

            def adapter_checked(self: Any, /, *arguments: Any, **more: Any) -> Any:
                found = load_adapter(self, *arguments, **more)
                # vectors that adapters share are in another file
                own = [k for k in found.missing_keys if not any(shared in k for shared in SHARED)]
                _refuse("adapter", own, found.unexpected_keys, [])
                return found

            stack.enter_context(_replaced(PeftModel, "load_adapter", adapter_checked))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, made: object) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, made)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _refuse(what: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Sequence[str]) -> None:
    """Raise BrokenWeightsError if one of the three is not empty."""
    found = (
        (sorted(missing), "lacks {}, which would be random"),
        (sorted(unexpected), "contains {}, which its model does not have"),
        (sorted(mismatched), "holds {}"),
    )
    if parts := [text.format(_first(names)) for names, text in found if names]:
        raise BrokenWeightsError(
            f"wrong weights: the {what} {'; it '.join(parts)}; save it again, from the unwrapped model"
        )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more tensors" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def check_module(model: Any) -> None:
    """Raise BrokenWeightsError if a parameter of a torch module is NaN or infinite. Buffers may be masks of -inf."""
    if hasattr(model, "named_parameters"):
        check_finite(getattr(model, "_orig_mod", model).named_parameters())


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise BrokenWeightsError if a value is NaN or infinite. Integers and offloaded tensors are skipped."""
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        values = tensor.detach().reshape(-1)
        if values.element_size() < 2:
            values = values.bfloat16()  # torch cannot compare 8-bit types
        if not all(math.isfinite(end.item()) for end in values.aminmax()):
            count = sum(int((~part.isfinite()).sum()) for part in values.split(1 << 24))
            raise BrokenWeightsError(
                f"wrong weights: {count} of {len(values)} values of {name} are NaN or infinite; save the checkpoint again"
            )


@contextlib.contextmanager
def next_logits(model: Any) -> Iterator[Callable[[], bool]]:
    """Watch the next-token logits in each pass of a model; the callable returns whether all were finite.

    No pass waits for a device. A model may mask single tokens by -inf. `model`: None watches nothing.
    """
    finite: list[Tensor] = []

    def look(_module: Any, _arguments: Any, output: Any) -> None:
        if (logits := getattr(output, "logits", None)) is not None:
            now = logits[:, -1].amax(dim=-1).isfinite().all()
            finite[:] = [finite[0] & now] if finite else [now]

    inner = getattr(model, "_orig_mod", model)  # torch.compile's
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # peft's
    with contextlib.ExitStack() as stack:
        if hasattr(inner, "register_forward_hook"):
            stack.callback(inner.register_forward_hook(look).remove)
        yield lambda: not finite or bool(finite[0])


def check_answers(batch: Batch, answers: Sequence[Any], logits_were_finite: Callable[[], bool]) -> None:
    """Raise BrokenWeightsError, naming the document, if a likelihood or the logits of a generated text are NaN or infinite.

    `answers`: in the order of the batch's pieces, as in `ShardResponses.responses`.
    """
    if batch.kind == "generate_until":
        if not logits_were_finite():
            first, *others = dict.fromkeys(str(piece.document) for piece in batch.pieces)
            or_others = f" or another of {len(others)} beside it" if others else ""
            raise BrokenWeightsError(f"document {first}{or_others}: a logit is NaN or infinite, {OVERFLOW}")
        return
    place = 1 if batch.kind == "loglikelihood_rolling" else 0
    for piece, answer in zip(batch.pieces, answers, strict=True):
        if not math.isfinite(answer[place]):
            raise BrokenWeightsError(
                f"document {piece.document}: its log-likelihood is {answer[place]}, {OVERFLOW}"
            )
