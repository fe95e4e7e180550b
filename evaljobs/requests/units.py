"""Batches of fast mode: likelihoods as units, in which no token is computed twice.

Rule: units are a pure function of a request set and a token budget. A unit is one forward pass. Its rows are tries: each
token of a row attends to its ancestors, so requests with a common beginning share its tokens. Only the task prefix, computed
separately, is shared between units. Generation is cut by batch size, as in exact mode. Called from `requests.build`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from evaljobs.contract.names import Cut
from evaljobs.lmeval import prefix_tries
from evaljobs.lmeval.batches import (
    Batch,
    Chunk,
    Kind,
    Piece,
    RequestsHead,
    Unit,
    batch_chunks,
    generation_chunks,
)

MIN_PREFIX = 16  # tokens that a task's requests must share to justify a separate forward pass
# Tokens per row for shorter requests. Each token is compared with all positions of its row, so longer rows cost more; shorter
# ones leave more padding.
FILLED_ROW = 512
ROW_STRETCHES = (1.0, 1.5, 2.0)  # row lengths to try, relative to the longest tree
LITTLE_PADDING = 0.02  # fraction of a unit's tokens below which no longer rows are tried
LONGEST_SHARED_ROW = 2048  # tokens of a tree of several requests none of which is nearly as long
NEAR_EQUAL_SLACK = (
    1.25  # largest ratio of a tree's tokens to a request of nearly the same length, at any length
)
SHARE_ALWAYS = 0.25  # fraction of a request's tokens from which sharing justifies a longer row
SHARE_IN_FILLED = 0.05  # the same, if both fit into FILLED_ROW tokens
# A unit stores keys and values of the task prefix once per row, which need less memory than a computed token.
KEPT_PER_COMPUTED = 4


def cut_requests(head: RequestsHead, pieces: Sequence[Piece], cut: Cut) -> Iterator[Chunk]:
    """Yield all batches of a request set in one cut, in execution order.

    If the model class tokenises texts itself, there are no token ids to share, and the batch size decides.
    """
    if cut.token_budget is None or head.text:
        yield from batch_chunks(head, pieces, cut.batch_size)
        return
    by_kind: dict[Kind, list[Piece]] = {}
    for piece in pieces:
        by_kind.setdefault(piece.kind, []).append(piece)
    for kind, members in by_kind.items():
        if kind == "generate_until":
            yield from generation_chunks(head, members, cut.batch_size)
        elif kind == "loglikelihood":
            yield from _units(members, head.max_length, cut.token_budget)
        else:
            yield from _windows(members, head.max_length, cut.token_budget)


class Tree(NamedTuple):
    """Requests that share beginnings, ordered by their tokens without the task prefix."""

    inputs: list[list[int]]
    pieces: list[Piece]
    tokens: int

    def joined(self, other: Tree, common: int) -> Tree:
        """Return both trees joined, if `other` follows and shares `common` tokens with this tree's last request."""
        return Tree(
            self.inputs + other.inputs, self.pieces + other.pieces, self.tokens + other.tokens - common
        )


def task_prefix(inputs: Sequence[list[int]], scored: Sequence[int]) -> int:
    """Count the tokens that all inputs share, before the first that any request scores; 0 below MIN_PREFIX.

    `scored`: the number of last tokens of each input after which a continuation's token is predicted.
    """
    first, last = min(inputs), max(inputs)
    common = min(
        prefix_tries.common_prefix_length(first, last),
        *(len(i) - n for i, n in zip(inputs, scored, strict=True)),
    )
    return common if len(inputs) > 1 and common >= MIN_PREFIX else 0


def request_trees(requests: Sequence[tuple[list[int], Piece]], budget: int) -> list[Tree]:
    """Join neighbours in token order if the tokens that they share justify a longer row.

    A tree of several requests is at most about as large as the budget, so a smaller budget makes smaller units.
    """
    single = [
        Tree([tokens], [piece], len(tokens))
        for tokens, piece in sorted(requests, key=lambda request: (request[0], request[1].index))
    ]
    shared_row, filled_row = min(LONGEST_SHARED_ROW, budget), min(FILLED_ROW, budget)
    whole = _joined(single, SHARE_ALWAYS, lambda tree: max(shared_row, int(NEAR_EQUAL_SLACK * tree.tokens)))
    return _joined(whole, SHARE_IN_FILLED, lambda _tree: filled_row)


def _joined(found: Sequence[Tree], share: float, most: Callable[[Tree], int]) -> list[Tree]:
    """Join each tree to the previous one if it shares this fraction of its first request's tokens with it.

    `most`: maximum tokens of a tree to join.
    """
    made: list[Tree] = []
    for tree in found:
        common = prefix_tries.common_prefix_length(made[-1].inputs[-1], tree.inputs[0]) if made else 0
        enough = made and common >= share * len(tree.inputs[0])
        if enough and made[-1].tokens + tree.tokens - common <= most(tree):
            made[-1] = made[-1].joined(tree, common)
        else:
            made.append(tree)
    return made


def rows_of_a_unit(left: list[Tree], budget: int, prefix: int) -> tuple[list[list[Tree]], list[Tree]]:
    """Return the rows of the next unit, and the trees left for later ones. `left`: longest first.

    Rows hold as many tokens as the longest tree, or more if that leaves less padding.
    """
    longest = max(min(FILLED_ROW, budget), left[0].tokens)
    best: tuple[list[list[Tree]], list[Tree]] = ([left[:1]], left[1:])
    least = 1.0
    for stretch in ROW_STRETCHES:
        room = int(stretch * longest)
        number = min(
            budget // room,
            KEPT_PER_COMPUTED * budget // (prefix + room),
            -(-sum(tree.tokens for tree in left) // room),
        )
        if number < 1:
            break
        made, later = _spread(left, number, room)
        tokens = [sum(tree.tokens for tree in row) for row in made]
        padding = 1 - sum(tokens) / (len(made) * max(tokens))
        if padding < least:
            best, least = (made, later), padding
        if least <= LITTLE_PADDING:
            break
    return best


def _spread(left: list[Tree], number: int, room: int) -> tuple[list[list[Tree]], list[Tree]]:
    """Fill rows of at most `room` tokens and about equal length: the next tree that fits goes to the shortest row."""
    made: list[list[Tree]] = [[] for _ in range(number)]
    loads = [(0, place) for place in range(number)]
    later: list[Tree] = []
    at = 0
    while at < len(left):
        load, place = loads[0]
        fits = bisect_left(left, load - room, lo=at, key=lambda tree: -tree.tokens)
        later += left[at:fits]
        at = fits
        if at < len(left):
            made[place].append(left[at])
            heapq.heapreplace(loads, (load + left[at].tokens, place))
            at += 1
    return made, later


def _units(pieces: Sequence[Piece], max_length: int, budget: int) -> Iterator[Chunk]:
    """Yield all units. Requests that lm-eval would cut from the left share no beginning: their units have no prefix."""
    whole = [p for p in pieces if p.length <= max_length + 1]
    cut_off = [p for p in pieces if p.length > max_length + 1]
    for members in (cut_off, whole):
        if not members:
            continue
        inputs = [prefix_tries.input_of(piece, max_length) for piece in members]
        scored = [len(piece.continuation) for piece in members]
        prefix = task_prefix(inputs, scored) if members is whole else 0
        own = [(tokens[prefix:], piece) for tokens, piece in zip(inputs, members, strict=True)]
        yield from _filled(request_trees(own, budget), prefix, budget)


def _filled(found: Sequence[Tree], prefix: int, budget: int) -> Iterator[Chunk]:
    """Yield all units of these trees, longest first, with rows in the same order."""
    left = sorted(found, key=lambda tree: (-tree.tokens, tree.pieces[0].index))
    while left:
        made, left = rows_of_a_unit(left, budget, prefix)
        sizes = [prefix_tries.trie_size([own for tree in row for own in tree.inputs]) for row in made]
        order = sorted(range(len(made)), key=lambda place: -sizes[place])
        members = [[piece for tree in made[place] for piece in tree.pieces] for place in order]
        unit = Unit(prefix, [len(row) for row in members])
        batch = Batch(
            kind="loglikelihood", text=False, settings=None, pieces=list(chain(*members)), unit=unit
        )
        yield batch, max(sizes) * len(made), 0


def _windows(pieces: Sequence[Piece], max_length: int, budget: int) -> Iterator[Chunk]:
    """Yield windows of rolling likelihoods, longest first; each predicts all its tokens, so they share none."""
    ordered = sorted(pieces, key=lambda p: (-p.length, p.index, p.window))
    at = 0
    while at < len(ordered):
        longest = max(1, min(ordered[at].length - 1, max_length))
        chosen = ordered[at : at + max(1, budget // longest)]
        at += len(chosen)
        batch = Batch(kind="loglikelihood_rolling", text=False, settings=None, pieces=chosen)
        yield batch, longest * len(chosen), 0
