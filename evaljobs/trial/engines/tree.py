"""Tensors of a unit: the tokens of its rows, and which of them each token attends to.

Rule: pure; a function of the unit's requests. Imports torch, so only `hf_fast` imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evaljobs.lmeval import tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One likelihood: its input without the task prefix, and the tokens that are scored after its end."""

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


def tensors(rows: Sequence[Sequence[Ask]], prefix: int) -> UnitTensors:
    """The tensors of a unit, on the CPU. `prefix`: tokens of the task prefix. Requests in order of rows."""
    laid = [tries.layout([ask.tokens for ask in row]) for row in rows]
    width = max(row[-1].end for row in laid)
    tokens: NDArray[np.int64] = np.zeros((len(rows), width), dtype=np.int64)
    positions: NDArray[np.int64] = np.zeros((len(rows), width), dtype=np.int64)
    visible: NDArray[np.bool_] = np.zeros((len(rows), 1, width, prefix + width), dtype=bool)
    numbers: dict[int, int] = {}  # place -> index into `scored`
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
        seen[padding, prefix + padding] = True  # a token that attends to none would give NaN
    return UnitTensors(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        visible=torch.from_numpy(visible),
        scored=torch.tensor(list(numbers)),
        predicted_from=torch.tensor(predicted_from),
        predicted=torch.tensor([token for row in rows for ask in row for token in ask.continuation]),
        lengths=[len(ask.continuation) for row in rows for ask in row],
    )
