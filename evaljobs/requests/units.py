"""Batches of fast mode: likelihoods as units, in which no token is computed twice.

Rule: units are a pure function of a request set and a token budget. A unit is one forward pass. Its
rows are tries: each token of a row attends to its ancestors, so requests that begin alike share the
tokens of their beginning. Nothing crosses a unit but the task prefix, which is computed alone.
Generation is cut by batch size, as in exact mode. Called from `requests.build`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain

from evaljobs.contract.names import Cut
from evaljobs.lmeval import tries
from evaljobs.lmeval.batches import Batch, Chunk, Kind, Piece, RequestsHead, Unit, chunks, generations

MIN_PREFIX = 16  # tokens that a task's requests share before they are worth a forward pass of their own
# Tokens up to which a row is filled with tries of other documents. A token is compared with each place
# of its row, so longer rows cost more; shorter ones leave padding.
FILLED_ROW = 256
LONGEST_SHARED_ROW = 2048  # tokens of a row of several requests; a longer request stands alone
SHARE_ALWAYS = 0.25  # part of a request's tokens from which sharing them is worth a longer row
SHARE_IN_FILLED = 4  # shared tokens from which neighbours belong in one row of at most FILLED_ROW tokens
# A unit holds keys and values of the task prefix once a row, which need less memory than a computed token.
KEPT_PER_COMPUTED = 4


def cut_requests(head: RequestsHead, pieces: Sequence[Piece], cut: Cut) -> Iterator[Chunk]:
    """All batches of a request set in one cut, in the order to run them.

    Where the model class tokenises texts itself, there are no token ids to share: batch size decides.
    """
    if cut.token_budget is None or head.text:
        yield from chunks(head, pieces, cut.batch_size)
        return
    by_kind: dict[Kind, list[Piece]] = {}
    for piece in pieces:
        by_kind.setdefault(piece.kind, []).append(piece)
    for kind, members in by_kind.items():
        if kind == "generate_until":
            yield from generations(head, members, cut.batch_size)
        elif kind == "loglikelihood":
            yield from _units(members, head.max_length, cut.token_budget)
        else:
            yield from _windows(members, head.max_length, cut.token_budget)


class Tree:
    """Requests that share beginnings, in the order of their tokens without the task prefix."""

    def __init__(self, inputs: list[list[int]], pieces: list[Piece], tokens: int) -> None:
        self.inputs = inputs
        self.pieces = pieces
        self.tokens = tokens

    def joined(self, other: Tree, common: int) -> Tree:
        """Both, where `other` follows and shares `common` tokens with this tree's last request."""
        return Tree(
            self.inputs + other.inputs, self.pieces + other.pieces, self.tokens + other.tokens - common
        )


def task_prefix(inputs: Sequence[Sequence[int]], scored: Sequence[int]) -> int:
    """Tokens that all inputs share, before the first that any request scores; 0 below MIN_PREFIX.

    `scored`: the number of last tokens of each input after which a continuation's token is predicted.
    """
    first, last = min(inputs), max(inputs)
    common = min(tries.shared(first, last), *(len(i) - n for i, n in zip(inputs, scored, strict=True)))
    return common if len(inputs) > 1 and common >= MIN_PREFIX else 0


def trees(requests: Sequence[tuple[list[int], Piece]]) -> list[Tree]:
    """Neighbours in token order, joined where the tokens that they share are worth a longer row."""
    ordered = sorted(requests, key=lambda r: (r[0], r[1].index))
    whole: list[Tree] = []
    for tokens, piece in ordered:
        tree = Tree([tokens], [piece], len(tokens))
        common = tries.shared(whole[-1].inputs[-1], tokens) if whole else 0
        together = whole[-1].tokens + len(tokens) - common if whole else 0
        if whole and common >= SHARE_ALWAYS * len(tokens) and together <= LONGEST_SHARED_ROW:
            whole[-1] = whole[-1].joined(tree, common)
        else:
            whole.append(tree)
    near: list[Tree] = []
    for tree in whole:
        common = tries.shared(near[-1].inputs[-1], tree.inputs[0]) if near else 0
        if near and common >= SHARE_IN_FILLED and near[-1].tokens + tree.tokens - common <= FILLED_ROW:
            near[-1] = near[-1].joined(tree, common)
        else:
            near.append(tree)
    return near


def rows(found: Sequence[Tree]) -> list[list[Tree]]:
    """Trees in rows of at most FILLED_ROW tokens, longest first; a longer tree is a row alone.

    First fit in decreasing order, where the row with the most room is tried first.
    """
    made: list[list[Tree]] = []
    room: list[tuple[int, int]] = []  # (-tokens left, row)
    for tree in sorted(found, key=lambda t: (-t.tokens, t.pieces[0].index)):
        if room and -room[0][0] >= tree.tokens:
            left, number = heapq.heappop(room)
            made[number].append(tree)
            left += tree.tokens
        else:
            number, left = len(made), tree.tokens - FILLED_ROW
            made.append([tree])
        if left < 0:
            heapq.heappush(room, (left, number))
    return made


def _units(pieces: Sequence[Piece], max_length: int, budget: int) -> Iterator[Chunk]:
    """Requests that lm-eval would cut from the left share no beginning: their units have no prefix."""
    whole = [p for p in pieces if p.length <= max_length + 1]
    cut_off = [p for p in pieces if p.length > max_length + 1]
    for members in (cut_off, whole):
        if not members:
            continue
        inputs = [tries.input_of(piece, max_length) for piece in members]
        scored = [len(piece.continuation) for piece in members]
        prefix = task_prefix(inputs, scored) if members is whole else 0
        own = [(tokens[prefix:], piece) for tokens, piece in zip(inputs, members, strict=True)]
        yield from _filled(rows(trees(own)), prefix, budget)


def _filled(made: Sequence[list[Tree]], prefix: int, budget: int) -> Iterator[Chunk]:
    """Rows in units, longest first: the first row of a unit sets its padded length."""
    tokens = [tries.size([own for tree in row for own in tree.inputs]) for row in made]
    numbers = sorted(range(len(made)), key=lambda number: (-tokens[number], number))
    ordered = [made[number] for number in numbers]
    at = 0
    while at < len(ordered):
        longest = tokens[numbers[at]]
        number = max(1, min(budget // longest, KEPT_PER_COMPUTED * budget // (prefix + longest)))
        chosen = ordered[at : at + number]
        at += number
        members = [[piece for tree in row for piece in tree.pieces] for row in chosen]
        unit = Unit(prefix, [len(row) for row in members])
        batch = Batch(
            kind="loglikelihood", text=False, settings=None, pieces=list(chain(*members)), unit=unit
        )
        yield batch, longest * len(chosen), 0


def _windows(pieces: Sequence[Piece], max_length: int, budget: int) -> Iterator[Chunk]:
    """Windows of rolling likelihoods, longest first; each predicts all its tokens, so they share none."""
    ordered = sorted(pieces, key=lambda p: (-p.length, p.index, p.window))
    at = 0
    while at < len(ordered):
        longest = max(1, min(ordered[at].length - 1, max_length))
        chosen = ordered[at : at + max(1, budget // longest)]
        at += len(chosen)
        batch = Batch(kind="loglikelihood_rolling", text=False, settings=None, pieces=chosen)
        yield batch, longest * len(chosen), 0
