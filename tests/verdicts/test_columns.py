"""Columns of a task's documents: what its samples say, kept in one file; which of several choices is the right one; which
documents two checkpoints answer differently."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.results.report.flips import find_flips
from coordinator.results.report.stored_documents import read_documents
from evaljobs.contract.columns import SIGNALS, columns_of, document_signals, pack_columns, unpack_columns
from evaljobs.contract.paths import EvaluationPaths
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
    found = document_signals(sample(0, likelihoods, gold))
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
    found = document_signals(sample(0, likelihoods, target, texts, acc=acc))
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
    back = unpack_columns(pack_columns({(3, "t"): made, (4, "u"): columns_of(lines[:1])}), "x").of("t")
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
        unpack_columns(
            pack_columns({(0, "t"): columns_of([sample(0, [-1.0, -2.0], 0)])})[:40], "of-hellaswag"
        )


def test_files_of_entries_become_one_and_a_retried_entry_replaces_its_rows(tmp_path):
    """Law: a merge keeps what it does not replace, takes the linked entry of another evaluation by its number there, and removes
    what it merged; before the end nothing is removed.
    """
    paths = EvaluationPaths(tmp_path)
    paths.scores.mkdir()

    def of(value):
        return {"doc_id": np.arange(3), "doc_hash": np.arange(3), "acc,none": np.full(3, value)}

    paths.columns(2).write_bytes(pack_columns({(2, "t"): of(2.0)}))
    paths.columns(3, 9).write_bytes(
        pack_columns({(8, "other"): of(8.0), (9, "t"): of(9.0), (9, "u"): of(9.5)})
    )

    def values():
        found = read_documents(paths)
        return {task: found.of(task)["acc,none"][0] for task in found.tasks}

    expected = {"t": 2.0, "t#2": 9.0, "u": 9.5}
    assert values() == expected
    assert paths.columns(2).exists()
    paths.results.write_text("{}")
    assert values() == expected
    assert not list(paths.scores.glob("*.parquet"))
    paths.columns(2).write_bytes(pack_columns({(2, "t"): of(2.5)}))
    assert values() == expected | {"t": 2.5}
    assert values() == expected | {"t": 2.5}
    assert not list(paths.scores.glob("*.parquet"))


# --- documents that two checkpoints answer differently ---------------------------------------------------------------


def choice(document, likelihoods, target=0, acc=1.0, content="h"):
    asked = {f"gen_args_{i}": {"arg_0": "Q", "arg_1": f" {'AB'[i]}"} for i in range(2)}
    return {"doc_id": document, "doc_hash": content, "target": str(target), "arguments": asked, "filter": "none",
            "filtered_resps": [[str(x), "False"] for x in likelihoods], "metrics": ["acc"], "acc": acc}  # fmt: skip


def text(document, answer, score=0.0):
    return {"doc_id": document, "doc_hash": "h", "target": "8", "arguments": {"gen_args_0": {"arg_0": "Q"}},
            "filter": "strict", "filtered_resps": [answer], "metrics": ["exact_match"], "exact_match": score}  # fmt: skip


def found(tmp_path, before, after, **how):
    for name, samples in (("a", before), ("b", after)):
        (tmp_path / name / "samples").mkdir(parents=True)
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (tmp_path / name / "samples" / "samples_t_000.jsonl").write_text(lines)
    return list(find_flips(EvaluationPaths(tmp_path / "a"), EvaluationPaths(tmp_path / "b"), "t", **how))


def test_answers_that_differ_are_listed_with_both_and_the_right_one(tmp_path):
    """Law: a choice is named by its text, with the right one's lead; equal answers, other documents are left out."""
    before = [
        choice(0, (-1, -3)),
        choice(1, (-1, -3)),
        choice(2, (-1, -3)),
        choice(3, (-1, -3), content="x"),
        text(4, "7"),
    ]
    after = [
        choice(0, (-4, -3), acc=0.0),
        choice(1, (-1, -9)),
        choice(9, (-9, -1)),
        choice(3, (-9, -1)),
        text(4, "8", 1.0),
    ]
    one, other = found(tmp_path, before, after)
    assert (one["doc_id"], one["question"], one["right"]) == (0, "Q", "A")
    assert (one["before"], one["after"]) == ("A", "B")
    assert (one["margin_before"], one["margin_after"], one["metrics"]) == (2.0, -1.0, {"acc": [1.0, 0.0]})
    assert (other["filter"], other["before"], other["after"], other["margin_after"]) == (
        "strict",
        "7",
        "8",
        None,
    )


@pytest.mark.parametrize(
    ("answer", "score", "listed"), [("9", 0.0, 0), ("9", 1.0, 1), ("7", 1.0, 1), ("7", 0.0, 0)]
)
def test_flips_are_documents_whose_metrics_changed(tmp_path, answer, score, listed):
    """Law: with --flips another wrong answer is none; the same answer with another verdict is one, as after a rescore."""
    assert len(found(tmp_path, [text(0, "7")], [text(0, answer, score)], scored=True)) == listed


def test_a_broken_line_hides_its_document_alone(tmp_path):
    """Law: a sample file that was cut short is read as far as it can be."""
    found(tmp_path, [text(0, "7"), text(1, "7")], [text(0, "8"), text(1, "8")])
    file = tmp_path / "a" / "samples" / "samples_t_000.jsonl"
    file.write_text(file.read_text()[:-10])
    left = list(find_flips(EvaluationPaths(tmp_path / "a"), EvaluationPaths(tmp_path / "b"), "t"))
    assert [row["doc_id"] for row in left] == [0]
