"""Trained values, which training took from its own memory by `notify(fingerprint=model)`, against the weights of a trial.

Rule: values are compared bit for bit after the roundings of saving and loading, logits within a tolerance. A tensor of another name, shape or kind of
number is not checkable, and is said. Weights that differ are the checkpoint's fault, or this node's where the files on
storage are right. Called from `trial`, once the model is loaded.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import TrialSpec
from evaljobs.errors import OperatorError, RetryError, one_line

if TYPE_CHECKING:
    from torch import Tensor, dtype

FLOATS = ("float32", "bfloat16", "float16", "float64")
MOST_NAMES = 3  # tensors named in a message
# Root mean square of the differences of right logits over their standard deviation, by the coarsest dtype: SmolLM2-135M's in
# bfloat16 are 0.06 from float32, in float16 (as in TF32) 0.006; with noise of 0.03 in its weights 0.3
MOST_APART = {"float64": 0.05, "float32": 0.05, "float16": 0.05, "bfloat16": 0.25}
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
UNREAD = "what training left of its weights cannot be read"


class Part(NamedTuple):
    """Values of one rank's part of a tensor. `positions`: in the whole tensor, flattened; `size`: elements of the part."""

    names: list[str]
    shape: tuple[int, ...]
    size: int
    positions: Tensor
    values: Tensor


def check(paths: EvaluationPaths, spec: TrialSpec, model: object) -> str:
    """What could not be compared, in words; "" where all was, or training left no values.

    `model`: a torch module, or what else an engine has: then the staged files are compared. OperatorError where the
    checkpoint's weights are not training's, RetryError where only this node's are not.
    """
    import torch  # noqa: PLC0415

    try:
        text = paths.trained_values.read_bytes()
        parts = list(read(text))
    except FileNotFoundError:
        return ""
    except (*MALFORMED, RuntimeError) as error:
        return f"{UNREAD}: {one_line(error)}"
    staged = stored(spec.model_path)
    served, names = staged, list(staged)
    module: Any = None
    if isinstance(model, torch.nn.Module) and not spec.adapters:
        module = getattr(model, "_orig_mod", model)  # torch.compile's
        served = dict(module.named_parameters(remove_duplicate=False))
        names = [name for name, _ in module.named_parameters()]
    try:
        wrong, checked = compare(parts, served, staged)
        apart, unseen = ("", "") if wrong else compare_logits(text, module, staged)
    except MALFORMED as error:  # a RuntimeError may be the GPU's
        return f"{UNREAD}: {one_line(error)}"
    mend = (
        f"Save the checkpoint again; where a model of another step was passed as fingerprint, "
        f"remove {paths.trained_values} and type `evalspan retry {spec.evaluation_id}`"
    )
    if apart:
        raise OperatorError(f"wrong weights or settings of the model: {apart}. {mend}")
    if wrong:
        (first, how), others = next(iter(wrong.items())), len(wrong) - 1
        said = f"{first} {how}" + (f", and {others} more tensors differ" if others else "")
        source = staged if spec.checkpoint is None else stored(spec.checkpoint.source)
        wrong_there, right_there = compare(parts, source, source)
        if wrong.keys() <= right_there - wrong_there.keys():
            raise RetryError(f"the weights on storage are training's, and those of this node not: {said}")
        raise OperatorError(f"wrong weights: {said}. {mend}")
    left = [name for name in names if name not in checked]
    if not left:
        return unseen
    more = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
    return (
        f"{len(names) - len(left)} of {len(names)} tensors of the checkpoint were compared with training's; not checkable, "
        f"since training left no values of this name, shape and kind: {', '.join(left[:MOST_NAMES])}{more}"
        + (f"; {unseen}" if unseen else "")
    )


def compare_logits(text: bytes, model: Any, saved: Mapping[str, Tensor]) -> tuple[str, str]:
    """How the model's logits differ from those of training; else why they are not checkable; both "" where they are alike,
    or training left none. `model`: a torch module, or None.
    """
    import torch  # noqa: PLC0415

    left = next((line["logits"] for line in map(json.loads, text.splitlines()) if line.get("logits")), None)
    if left is None:
        return "", ""
    if model is None:
        return "", "training's logits are not checkable with this engine or an adapter"
    used = [tensor.dtype for tensor in (*model.parameters(), *saved.values())]
    kinds = {*left["dtypes"], *(str(dtype)[6:] for dtype in used)}
    if not kinds <= MOST_APART.keys():
        return "", f"training's logits are not checkable: the model has {', '.join(sorted(kinds))}"
    device, most = next(model.parameters()).device, max(MOST_APART[kind] for kind in kinds)
    distance, spread = 0.0, 0.0
    for row in left["rows"]:
        with torch.no_grad():
            found = model(torch.tensor([row["ids"]], device=device))
        there = found.logits[0, -1, row["at"]].double().cpu()
        values = torch.tensor(row["values"], dtype=torch.float64)
        distance += float((there - values).square().sum())
        spread += float((values - values.mean()).square().sum())
    if not math.isfinite(spread) or not spread:
        return "", "training's logits are not checkable: they are not finite, or all alike"
    apart = math.sqrt(distance / spread)
    if not apart <= most:
        return (
            f"logits differ from training's by {apart:.2g} of their spread, where rounding makes less than {most:g}",
            "",
        )
    return "", ""


def stored(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files: mapped, and read where they are looked at."""
    from safetensors import safe_open  # noqa: PLC0415 (it imports torch)

    files: list[Any] = [safe_open(file, "pt") for file in sorted(Path(folder).glob("*.safetensors"))]
    return {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)


def read(text: bytes) -> Iterator[Part]:
    """The parts that the ranks left, a line each. ValueError and others where they are malformed."""
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
                yield Part(row["names"], tuple(row["shape"]), math.prod(row["part"]), whole, there)


def compare(
    parts: Sequence[Part], served: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> tuple[dict[str, str], set[str]]:
    """Tensors that are wrong, with how they differ; and those of which the parts of all ranks were compared.

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
        right = equal(part.values, there, None if file is None else file.dtype)
        if right is None:
            continue
        covered[name] += part.size
        if not right.all() and name not in wrong:
            at = int((~right).nonzero()[0])
            index = [int(i) for i in torch.unravel_index(part.positions[at], part.shape)]
            wrong[name] = f"has {there[at]:g} at {index}, where training had {part.values[at]:g}"
    return wrong, {name for name, size in covered.items() if size >= served[name].numel()}


def equal(values: Tensor, there: Tensor, saved: dtype | None) -> Tensor | None:
    """Which values are those that are served? As booleans; None where the roundings between them are not known.

    `saved`: the dtype in the file; None: any. Training may save masters, of which its own values are roundings.
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
