"""Columns of a task's documents: what its samples say, kept in one file, and which of several choices is the right one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaljobs.contract.columns import SIGNALS, columns_of, packed, signals, unpacked
from evaljobs.errors import OperatorError

LIKELIHOODS = st.lists(st.floats(-50, -0.01), min_size=2, max_size=5, unique=True)


def sample(document, likelihoods, target, texts=None, **more):
    """A line of lm-eval's sample file of a multiple-choice document."""
    texts = texts or [f" {letter}" for letter in "ABCDE"[: len(likelihoods)]]
    asked = {f"gen_args_{i}": {"arg_0": "Q:", "arg_1": text} for i, text in enumerate(texts)}
    answers = [[str(x), "False"] for x in likelihoods]
    return {"doc_id": document, "doc_hash": f"h{document}", "doc": {"passage": f"p{document // 2}"}, "target": str(target),
            "arguments": asked, "filtered_resps": answers, "filter": "none", "metrics": ["acc"], **more}  # fmt: skip


@given(LIKELIHOODS, st.data())
def test_signals_follow_from_the_likelihoods(likelihoods, data):
    """Law: margin above 0 exactly where the right choice is chosen; its share is the softmax; bits are base 2, a byte."""
    gold = data.draw(st.integers(0, len(likelihoods) - 1))
    found = signals(sample(0, likelihoods, gold))
    assert (found["margin"] > 0) == (np.argmax(likelihoods) == gold)
    softmax = np.exp(likelihoods) / np.exp(likelihoods).sum()
    assert found["gold_probability"] == pytest.approx(softmax[gold], rel=1e-9)
    assert found["gold_bits_per_byte"] == pytest.approx(-likelihoods[gold] / math.log(2) / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("texts", "target", "acc", "gold"),
    [
        ([" no", " yes"], "1", 0.0, 1),  # by number
        ([" no", " yes"], "yes", 0.0, 1),  # by text
        (["3", "0", "1"], "1", 0.0, 1),  # by number: as text it would be the chosen one
        (["3", "0", "1"], "1", 1.0, 2),
        ([" no", " yes"], "[0, 1]", 1.0, None),  # several are right
        ([" no", " yes"], "7", 0.0, None),
    ],
)
def test_the_right_choice_is_known_or_said_to_be_unknown(texts, target, acc, gold):
    """Law: `target` names the right choice by number or text; `acc` decides between both; no guess where neither does."""
    likelihoods = [-3.0, -2.0, -1.0][: len(texts)]
    found = signals(sample(0, likelihoods, target, texts, acc=acc))
    if gold is None:
        assert found == {}
    else:
        bits = -likelihoods[gold] / math.log(2) / len(texts[gold])
        assert found["gold_bits_per_byte"] == pytest.approx(bits)


def test_columns_have_a_row_a_document_and_come_back_from_the_file():
    """Law: filters of a document share its row; what it lacks is NaN; texts and pairs are no numbers; the file is exact."""
    lines = [
        sample(i, [-1.0, -2.0 - i], 0, acc=float(i % 2), filter=f) for i in (2, 0, 1) for f in ("a", "b")
    ]
    lines[0]["acc"], lines[1]["acc"] = [1.0, 2], None
    made = columns_of(lines, "passage")
    back = unpacked(packed(made), "x")
    assert set(made) == {"doc_id", "doc_hash", "cluster", "acc,a", "acc,b", *SIGNALS}
    assert back["doc_id"].tolist() == [0, 1, 2]
    assert back["cluster"][0] == back["cluster"][1] != back["cluster"][2]
    for name, column in made.items():
        np.testing.assert_array_equal(back[name], column)
    assert np.isnan(made["acc,a"]).tolist() == [False, False, True]


def test_generated_answers_have_metrics_and_no_signals():
    """Law: an answer in words says nothing of likelihoods."""
    line = {"doc_id": 0, "target": "8", "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": []}}},
            "filtered_resps": ["8"], "filter": "none", "metrics": ["exact_match"], "exact_match": 1}  # fmt: skip
    assert set(columns_of([line])) == {"doc_id", "doc_hash", "exact_match,none"}


def test_a_cluster_that_documents_lack_and_a_damaged_file_are_named():
    """Law: both are errors that say the field or the file."""
    with pytest.raises(OperatorError, match=r"passages.*passage"):
        columns_of([sample(0, [-1.0, -2.0], 0)], "passages")
    with pytest.raises(OperatorError, match="of-hellaswag"):
        unpacked(packed(columns_of([sample(0, [-1.0, -2.0], 0)]))[:40], "of-hellaswag")
