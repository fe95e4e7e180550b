"""Laws of units: how fast mode cuts likelihoods into forward passes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaljobs.contract.names import Cut, ShardId
from evaljobs.lmeval import prefix_tries
from evaljobs.lmeval.batches import (
    Piece,
    RequestsHead,
    batch_chunks,
    decode_batch,
    encode_batch,
    encode_batches,
)
from evaljobs.requests.units import MIN_PREFIX, cut_requests

LONGEST = 60  # the model's length, in tokens


def head(**more):
    fields = {"digests": {}, "order": {}, "settings": [{}], "max_gen_tokens": [8], "text": False}
    return RequestsHead(
        **{"task": "t", "requests": 0, "grouped": True, "max_length": LONGEST} | fields | more
    )


def likelihood(index, document, context, continuation):
    length = len(context) + len(continuation)
    return Piece("loglikelihood", index, document, context, continuation, length=length)


@st.composite
def tasks(draw):
    """Documents with choices, that share examples or do not; some requests longer than the model."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    shots = [rng.randrange(3) for _ in range(draw(st.sampled_from([0, 5, 20, 40])))]
    pieces = []
    for document in range(draw(st.integers(1, 12))):
        context = [*shots, *(rng.randrange(3) for _ in range(rng.randint(1, 30)))]
        for _ in range(rng.choice([1, 2, 4])):
            ending = [rng.randrange(3) for _ in range(rng.choice([1, 1, 5]))]
            pieces.append(likelihood(len(pieces), document, context, ending))
    return pieces


BUDGETS = st.sampled_from([1, 50, 400, 8192])


def cut(pieces, budget):
    return list(cut_requests(head(), pieces, Cut(4, budget)))


def rows_of(batch):
    left = iter(batch.pieces)
    return [[next(left) for _ in range(count)] for count in batch.unit.rows]


@given(tasks(), BUDGETS, st.randoms(use_true_random=False))
def test_units_hold_each_request_once_within_their_budget(pieces, budget, rng):
    """In whatever order requests come. A unit's cost is the tokens that are computed: rows times the longest of them,
    without the prefix, which begins each request that has it and is never scored; past the budget it is one row. It is
    read as it was written.
    """
    made = cut(pieces, budget)
    shuffled = list(pieces)
    rng.shuffle(shuffled)
    assert cut(shuffled, budget) == made
    assert sorted(piece.index for batch, _, _ in made for piece in batch.pieces) == list(range(len(pieces)))
    prefixes = set()
    for batch, cost, _ in made:
        prefix = batch.unit.prefix
        rows = [
            prefix_tries.trie_size([prefix_tries.input_of(piece, LONGEST)[prefix:] for piece in row])
            for row in rows_of(batch)
        ]
        assert cost == len(rows) * max(rows)
        assert cost <= budget or len(rows) == 1
        assert decode_batch(encode_batch(batch)) == batch
        for piece in batch.pieces if prefix else ():
            own = prefix_tries.input_of(piece, LONGEST)
            assert prefix <= len(own) - len(piece.continuation)
            prefixes.add(tuple(own[:prefix]))
    assert len(prefixes) <= 1
    assert all(len(prefix) >= MIN_PREFIX for prefix in prefixes)


def test_documents_cost_no_more_than_their_tries_where_they_share_little():
    """Four choices of long contexts: each context is computed once, and padding is small."""
    rng = random.Random(1)
    pieces = []
    for document in range(300):
        context = [rng.randrange(1000) for _ in range(rng.randint(20, 50))]
        for _ in range(4):
            ending = [rng.randrange(1000) for _ in range(2)]
            pieces.append(likelihood(len(pieces), document, context, ending))
    fewest = prefix_tries.trie_size(sorted(prefix_tries.input_of(piece, LONGEST) for piece in pieces))
    assert sum(tokens for _, tokens, _ in cut(pieces, 8192)) <= 1.05 * fewest


@pytest.mark.parametrize("budget", [100, 8192])
def test_a_long_context_is_computed_once_for_its_choices(budget):
    """Also where it is longer than the budget, which it exceeds with or without its choices."""
    pieces = [likelihood(n, n // 4, [n // 4, *range(2999)], [n, 1, 2]) for n in range(8)]
    made = list(cut_requests(head(max_length=8192), pieces, Cut(4, budget)))
    assert sum(cost for _, cost, _ in made) == 2 * (3000 + 4 * 2)


def test_choices_of_one_token_come_from_one_row():
    """Their inputs are equal, so a document costs its context alone. An index says what the same requests ask one by one."""
    pieces = [likelihood(number, 0, [1] * 10, [number]) for number in range(4)]
    ((batch, cost, _),) = made = cut(pieces, 100)
    assert (cost, len(batch.pieces)) == (10, 4)
    _, index = encode_batches(head(), "k", made, 4)
    assert (sum(index.prefill_tokens), sum(index.asked_tokens)) == (10, 40)


def test_generation_and_texts_are_cut_by_batch_size_and_windows_by_tokens():
    prompts = [Piece("generate_until", n, n, "text", length=5 + n, settings=0) for n in range(6)]
    texts = [Piece("loglikelihood", n, n, "one", " two", length=5) for n in range(6)]
    windows = [
        Piece("loglikelihood_rolling", n, 0, [1], [2] * (n + 9), window=n, length=n + 10) for n in range(6)
    ]
    assert list(cut_requests(head(), prompts, Cut(4, 50))) == list(batch_chunks(head(), prompts, 4))
    text = head(text=True)
    assert list(cut_requests(text, texts, Cut(4, 50))) == list(batch_chunks(text, texts, 4))
    made = list(cut_requests(head(), windows, Cut(4, 50)))
    assert [[p.window for p in batch.pieces] for batch, _, _ in made] == [[5, 4, 3], [2, 1, 0]]
    assert [cost for _, cost, _ in made] == [42, 33]


@given(st.integers(1, 512), st.none() | st.integers(1, 10**6))
def test_a_cut_is_read_as_it_was_written(batch_size, budget):
    """Other texts are no cuts."""
    one = Cut(batch_size, budget)
    assert Cut.parse(str(one)) == one
    shard = ShardId("a|b", 3, 9, str(one))
    assert ShardId.parse(str(shard)) == shard
    for text in ("", "x", "0", "fast", "fast-8", "fast-8-", "fast--8-1", "slow-8-1", "08"):
        with pytest.raises(ValueError, match=r"."):
            Cut.parse(text)
