"""`evalspan diff`: the documents that two checkpoints answer differently."""

import json

import pytest

from coordinator.report.flips import flips
from evaljobs.contract.paths import EvaluationPaths


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
    return list(flips(EvaluationPaths(tmp_path / "a"), EvaluationPaths(tmp_path / "b"), "t", **how))


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
    assert (one["doc_id"], one["right"], one["before"], one["after"]) == (0, "A", "A", "B")
    assert (one["margin_before"], one["margin_after"], one["metrics"]) == (2.0, -1.0, {"acc": [1.0, 0.0]})
    assert (other["filter"], other["before"], other["after"], other["margin_after"]) == (
        "strict",
        "7",
        "8",
        None,
    )


@pytest.mark.parametrize(("score", "listed"), [(0.0, 0), (1.0, 1)])
def test_flips_are_answers_whose_metrics_changed(tmp_path, score, listed):
    """Law: with --flips another wrong answer is none."""
    assert len(found(tmp_path, [text(0, "7")], [text(0, "9", score)], scored=True)) == listed


def test_a_broken_line_hides_its_document_alone(tmp_path):
    """Law: a sample file that was cut short is read as far as it can be."""
    found(tmp_path, [text(0, "7"), text(1, "7")], [text(0, "8"), text(1, "8")])
    file = tmp_path / "a" / "samples" / "samples_t_000.jsonl"
    file.write_text(file.read_text()[:-10])
    left = list(flips(EvaluationPaths(tmp_path / "a"), EvaluationPaths(tmp_path / "b"), "t"))
    assert [row["doc_id"] for row in left] == [0]
