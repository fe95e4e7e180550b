"""Laws of tries over token ids."""

from hypothesis import given
from hypothesis import strategies as st

from evaljobs.lmeval import prefix_tries
from evaljobs.lmeval.batches import Piece

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@given(TOKENS, TOKENS)
def test_two_sequences_share_their_longest_common_beginning(one, other):
    common = prefix_tries.common_prefix_length(one, other)
    assert one[:common] == other[:common]
    assert common == min(len(one), len(other)) or one[common] != other[common]


@given(st.lists(TOKENS, max_size=9))
def test_sorted_sequences_need_each_distinct_beginning_once(sequences):
    beginnings = {tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)}
    assert prefix_tries.trie_size(sorted(sequences)) == len(beginnings)


@given(st.lists(TOKENS, min_size=1, max_size=9))
def test_a_layout_holds_each_sequence_along_its_path(sequences):
    """Own tokens fill the row without gaps; each path reads its sequence, from left to right."""
    branches = prefix_tries.lay_out_trie(sequences)
    row = {}
    for branch, sequence in zip(branches, sequences, strict=True):
        own = range(branch.start, branch.end)
        assert branch.path[branch.shared :] == list(own)
        row.update(zip(own, sequence[branch.shared :], strict=True))
        assert [row[place] for place in branch.path] == sequence
        assert branch.path == sorted(branch.path)
    assert sorted(row) == list(range(prefix_tries.trie_size(sequences)))


@given(TOKENS, TOKENS, st.integers(2, 12))
def test_inputs_are_cut_from_the_left_as_lm_eval_cuts_them(context, continuation, longest):
    piece = Piece("loglikelihood", 0, 0, context, continuation)
    # HFLM._loglikelihood_tokens
    assert prefix_tries.input_of(piece, longest) == (context + continuation)[-(longest + 1) :][:-1]
