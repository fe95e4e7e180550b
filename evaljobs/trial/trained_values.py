"""Comparison of a trial's weights with trained values, recorded by `notify(fingerprint=model)` from training's memory.

Rule: values are compared bit by bit after the roundings of saving and loading, token ids exactly, logits within a tolerance.
A tensor with another name, shape or kind of number is reported as not checkable. Differing weights are the checkpoint's
fault, or this node's if the files on storage are right. Called from `trial`, once the model is loaded.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evaljobs.contract.names import ADAPTERS
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import TrialSpec
from evaljobs.errors import OperatorError, RetryError, one_line

if TYPE_CHECKING:
    from torch import Tensor, dtype

FLOATS = ("float32", "bfloat16", "float16", "float64")
MOST_NAMES = 3  # tensors of one kind named in a message
# Root mean square difference of correct logits over their standard deviation, by the coarser numbers of both sides.
# SmolLM2-135M, from float32: other kernels 3e-6, float16 0.02, bfloat16 0.06; rope_theta x 0.1 0.4, rms_norm_eps 1e-6 1e-3
MOST_APART = {"float64": 2e-4, "float32": 2e-4, "float16": 0.05, "tf32": 0.05, "bfloat16": 0.25}
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
UNREADABLE_VALUES = "training's recorded values cannot be read"


class TensorPart(NamedTuple):
    """Values of one rank's part of a tensor. `positions`: in the whole tensor, flattened; `size`: elements of the part."""

    names: list[str]
    shape: tuple[int, ...]
    size: int
    positions: Tensor
    values: Tensor


def check_trained_values(
    paths: EvaluationPaths, spec: TrialSpec, model: object, tokenizer: Any = None
) -> str:
    """Return a description of what could not be compared; "" if everything was, or training recorded no values.

    `model`: a torch module, or another object of an engine, in which case the staged files are compared. `tokenizer`: as in
    lm-eval's class of the engine. Raise OperatorError if the checkpoint's weights, tokenizer or settings differ from
    training's, RetryError if only this node's weights do.
    """
    try:
        text = paths.trained_values.read_bytes()
    except FileNotFoundError:
        return ""
    import torch  # noqa: PLC0415

    try:
        parts = list(read_parts(text))
    except (*MALFORMED, RuntimeError) as error:
        return f"{UNREADABLE_VALUES}: {one_line(error)}"
    staged = stored_tensors(spec.model_path)
    served, names = staged, list(staged)
    module: Any = None
    if isinstance(model, torch.nn.Module) and not spec.adapters:
        module = getattr(model, "_orig_mod", model)  # torch.compile's
        served = dict(module.named_parameters(remove_duplicate=False))
        names = [name for name, _ in module.named_parameters()]
    mend = (
        "Save the checkpoint again; where a model of another step or another tokenizer was passed as fingerprint, "
        f"remove {paths.trained_values} and type `evalspan retry {spec.evaluation_id}`"
    )
    chosen = [key for key in spec.model.model_args if "token" in key or key in ADAPTERS]
    why = f" ({', '.join(chosen)} in model_args)" if chosen else ""
    try:
        wrong, checked = compare_parts(parts, served, staged)
        left: Any = next(filter(None, (json.loads(line).get("logits") for line in text.splitlines())), None)
        unseen = compare_ids(left, tokenizer, module, why) if left and not wrong else []
        unseen += compare_logits(left, module, staged) if left and not wrong else []
    except OperatorError as error:
        raise OperatorError(f"{error}. {mend}") from error
    except MALFORMED as error:  # a RuntimeError may come from the GPU
        return f"{UNREADABLE_VALUES}: {one_line(error)}"
    if wrong:
        (first, how), others = next(iter(wrong.items())), len(wrong) - 1
        said = f"{first} {how}" + (f", and {others} more tensors differ" if others else "")
        source = staged if spec.checkpoint is None else stored_tensors(spec.checkpoint.source)
        wrong_there, right_there = compare_parts(parts, source, source)
        if not wrong.keys() <= right_there - wrong_there.keys():
            raise OperatorError(f"wrong weights: {said}. {mend}")
        if all(sum(tensor is served[name] for tensor in served.values()) > 1 for name in wrong):
            raise OperatorError(
                f"wrong settings of the model: {said}, and so does the file: see tie_word_embeddings in config.json. {mend}"
            )
        raise RetryError(f"the weights on storage match training's, but those on this node do not: {said}")
    if missed := [name for name in names if name not in checked]:
        unseen.insert(
            0,
            f"{len(names) - len(missed)} of {len(names)} tensors of the checkpoint were compared with training's; not "
            f"checkable, since training recorded no values of this name, shape and kind: {', '.join(in_few_words(missed))}",
        )
    return "; ".join(unseen)


def in_few_words(names: Sequence[str]) -> Iterator[str]:
    """Yield each tensor's name, or if more than MOST_NAMES layers have one, the kind and their number."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    for kind, alike in kinds.items():
        yield from alike if len(alike) <= MOST_NAMES else [f"{kind} ({len(alike)})"]


def compare_ids(left: Mapping[str, Any], tokenizer: Any, model: Any, chosen: str) -> list[str]:
    """Return what is not checkable. Raise OperatorError if the tokenizer's ids or the special ids differ from training's.

    `chosen`: model_args that choose the tokenizer, which explain other ids; or "". Another padding id changes no score.
    """
    if tokenizer is None:
        return ["training's token ids are not checkable with this engine"]
    pairs: list[tuple[str, Any, Any]] = []
    owners = {"tokenizer": tokenizer, "generation config": getattr(model, "generation_config", None)}
    for owner, ids in left["special_ids"].items():
        pairs += ((f"{key} of the {owner}", getattr(owners[owner], key, None), ids[key]) for key in ids)
    for row in left["rows"]:
        here = list(tokenizer(row["text"])["input_ids"])[: left["most_tokens"]]
        own = enumerate(zip_longest(here, row["ids"], fillvalue="missing"))
        pairs += ((f"token {at} of the text {row['text'][:40]!r}", *pair) for at, pair in own)
    differ = [
        f"{name} is {here}, where training had {there}"
        for name, here, there in pairs
        if None not in (here, there) and _ids(here).isdisjoint(_ids(there))
    ]
    wrong = [words for words in differ if not words.startswith("pad_token_id")]
    if not wrong or chosen:
        return [f"{words}{chosen}" for words in (*wrong[:1], *(w for w in differ if w not in wrong))]
    raise OperatorError(f"wrong tokenizer: {wrong[0]} (ids that differ: {len(wrong)})")


def _ids(value: Any) -> set[Any]:
    return set(value) if isinstance(value, list) else {value}


def compare_logits(left: Mapping[str, Any], model: Any, saved: Mapping[str, Tensor]) -> list[str]:
    """Return why logits are not checkable. Raise OperatorError if the model's differ from training's by more than rounding.

    `model`: a torch module, or None.
    """
    import torch  # noqa: PLC0415

    if model is None:
        return ["training's logits are not checkable with this engine or an adapter"]
    used = [tensor.dtype for tensor in (*model.parameters(), *saved.values())]
    kinds = {*left["dtypes"], *(str(dtype)[6:] for dtype in used)}
    if torch.get_float32_matmul_precision() != "highest":
        kinds.add("tf32")
    if not kinds <= MOST_APART.keys():
        return [f"training's logits are not checkable: the model has {', '.join(sorted(kinds))}"]
    device, coarsest = next(model.parameters()).device, max(kinds, key=MOST_APART.__getitem__)
    distance, spread = 0.0, 0.0
    for row in left["rows"]:
        with torch.no_grad():
            found = model(torch.tensor([row["ids"]], device=device))
        there = found.logits[0][row["positions"]][:, row["at"]].double().cpu()
        values = torch.tensor(row["values"], dtype=torch.float64)
        distance += float((there - values).square().sum())
        spread += float((values - values.mean(-1, keepdim=True)).square().sum())
    if not math.isfinite(spread) or not spread:
        return ["training's logits are not checkable: they are not finite, or all alike"]
    apart = math.sqrt(distance / spread)
    if apart <= MOST_APART[coarsest]:
        return []
    raise OperatorError(
        f"wrong weights or settings of the model: logits differ from training's by {apart:.2g} of their spread, while "
        f"rounding in {coarsest} causes less than {MOST_APART[coarsest]:g}"
    )


def stored_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Map the tensors of a folder's safetensors files, read on access."""
    from safetensors import safe_open  # noqa: PLC0415 (it imports torch)

    files: list[Any] = [safe_open(file, "pt") for file in sorted(Path(folder).glob("*.safetensors"))]
    return {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)


def read_parts(text: bytes) -> Iterator[TensorPart]:
    """Yield the parts recorded by the ranks, one per line. Raise ValueError and others if they are malformed."""
    import torch  # noqa: PLC0415

    for line in text.splitlines():
        for group in json.loads(line)["groups"]:
            kind = getattr(torch, FLOATS[FLOATS.index(group["dtype"])])
            values = torch.frombuffer(bytearray(base64.b64decode(group["values"])), dtype=kind)
            own = values.split([int(row["number"]) for row in group["rows"]])
            for row, there in zip(group["rows"], own, strict=True):
                place = row["first"] + row["stride"] * torch.arange(len(there))
                whole = place
                if row["offset"]:
                    whole, indexes = torch.zeros_like(place), torch.unravel_index(place, tuple(row["part"]))
                    for index, first, size in zip(indexes, row["offset"], row["shape"], strict=True):
                        whole = whole * size + index + first
                if len(there) and not 0 <= int(whole.min()) <= int(whole.max()) < math.prod(row["shape"]):
                    raise ValueError(f"positions outside of {row['names']}")
                yield TensorPart(row["names"], tuple(row["shape"]), math.prod(row["part"]), whole, there)


def compare_parts(
    parts: Sequence[TensorPart], served: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> tuple[dict[str, str], set[str]]:
    """Return tensors that are wrong, with the difference; and those with the parts of all ranks compared.

    `saved`: the tensors in the files, whose dtypes count.
    """
    import torch  # noqa: PLC0415

    wrong: dict[str, str] = {}
    covered: Counter[str] = Counter()
    for part, name in ((each, name) for each in parts for name in each.names if name in served):
        tensor, file = served[name], saved.get(name)
        if tuple(tensor.shape) != part.shape or tensor.is_meta:
            continue
        there = tensor.detach().reshape(-1)[part.positions.to(tensor.device)].cpu()
        right = equal_values(part.values, there, None if file is None else file.dtype)
        if right is None:
            continue
        covered[name] += part.size
        if not right.all() and name not in wrong:
            at = int((~right).nonzero()[0])
            index = [int(i) for i in torch.unravel_index(part.positions[at], part.shape)]
            wrong[name] = f"has {there[at]:g} at {index}, where training had {part.values[at]:g}"
    return wrong, {name for name, size in covered.items() if size >= served[name].numel()}


def equal_values(values: Tensor, there: Tensor, saved: dtype | None) -> Tensor | None:
    """Return which values match the served ones; None if the roundings between them are unknown.

    `saved`: the dtype in the file; None: any. Training may save masters that its own values are rounded from.
    """
    import torch  # noqa: PLC0415

    floats = [getattr(torch, name) for name in FLOATS]
    own, end = values.dtype, there.dtype
    crossed = saved is not None and saved.itemsize > own.itemsize >= end.itemsize and own != end
    if end not in floats or saved not in (None, *floats) or crossed:
        return None
    ways = floats if saved is None else [saved]
    rounded = [(values.to(way).to(end), there) for way in ways]
    if end.itemsize > own.itemsize:
        rounded.append((there.to(own), values))
    return torch.stack([(a == b) | (a.isnan() & b.isnan()) for a, b in rounded]).any(0)
