"""Tries over token ids: how many tokens requests need if each shared beginning is computed once.

Rule: pure, and imports no torch. Inputs of likelihoods are sequences of token ids, truncated as in lm-eval. Sorted sequences
are the depth-first order of their trie, so neighbours reveal all sharing. Called from `requests.units`, the fast engine and
`scripts.bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from evaljobs.lmeval.batches import Piece


def input_of(piece: Piece, max_length: int) -> list[int]:
    """Return the tokens that a likelihood's forward pass computes: all but the last, truncated from the left.

    As in HFLM._loglikelihood_tokens (lm_eval/models/huggingface.py, 0.4.13).
    """
    return (tokens_of(piece.context) + tokens_of(piece.continuation))[-(max_length + 1) : -1]


def tokens_of(part: list[int] | str) -> list[int]:
    """Return a context or a continuation that was tokenised when the requests were built."""
    assert isinstance(part, list)
    return part


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common beginning, by bisection, since slices compare faster than loops."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def trie_size(ordered: Sequence[Sequence[int]]) -> int:
    """Count the tokens of a row if each sequence shares what it can with the previous one.

    For sorted sequences: the nodes of their trie, the fewest tokens to compute.
    """
    first = len(ordered[0]) if ordered else 0
    return first + sum(
        len(after) - common_prefix_length(before, after) for before, after in pairwise(ordered)
    )


class Branch(NamedTuple):
    """A sequence in the layout of its trie.

    It shares its first `shared` tokens with sequences before it. Its own tokens are at the positions `start..end-1` of the
    row.
    """

    shared: int
    start: int
    path: list[int]  # the place of each of its tokens

    @property
    def end(self) -> int:
        return self.start + len(self.path) - self.shared


def lay_out_trie(ordered: Sequence[Sequence[int]]) -> list[Branch]:
    """Lay out the trie of sequences in one row: each shares what it can with the previous one."""
    branches: list[Branch] = []
    path: list[int] = []
    before: Sequence[int] = ()
    used = 0
    for sequence in ordered:
        common = common_prefix_length(before, sequence)
        end = used + len(sequence) - common
        path = [*path[:common], *range(used, end)]
        branches.append(Branch(common, used, path))
        before, used = sequence, end
    return branches
