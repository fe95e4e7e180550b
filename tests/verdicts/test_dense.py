"""Dense signals: their formula on lm-eval's own samples, and where they stand among scores."""

import json
import math

import numpy as np
import pytest
from scipy.special import softmax
from support.exactness.pipeline import TASKS, Case, lm_eval_run
from support.trainings import compared, leave, results

from coordinator.decide.verdicts.gate import Policy, judge_rows
from coordinator.errors import OperatorError
from coordinator.operations.monitor.gate import gate_evaluation
from coordinator.results.report.scores import scores_of
from coordinator.site.config.schema import Config
from evaljobs.contract.columns import columns_of, signal_means


@pytest.mark.model
@pytest.mark.parametrize(
    ("task", "gold", "text"),
    [
        ("toy_choice", lambda doc: doc["label"], lambda doc, i: f" {doc['endings'][i]}"),
        ("toy_letters", lambda doc: doc["answer"], lambda _doc, i: f" {'ABCD'[i]}"),
    ],
)
def test_signals_are_the_formula_on_the_samples_of_lm_eval(toy_model, task, gold, text):
    """To 1e-12, from documents and log-likelihoods alone; metrics are lm-eval's to the last digit."""
    made = lm_eval_run(toy_model, Case(task=task, entry={"limit": 12}, include_path=str(TASKS)), 8)
    samples = made.samples[task]
    columns = columns_of(samples)
    for row, sample in enumerate(samples):
        found = np.array([float(answers[0][0]) for answers in sample["resps"]])
        right = gold(sample["doc"])
        size = len(text(sample["doc"], right).encode())
        expected = {
            "gold_bits_per_byte": -found[right] / math.log(2) / size,
            "gold_probability": softmax(found)[right],
            "margin": found[right] - np.delete(found, right).max(),
        }
        assert {name: columns[name][row] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert float(columns["acc,none"].mean()) == made.results["results"][task]["acc,none"]
    assert signal_means(columns)["margin,dense"] == pytest.approx(columns["margin"].mean(), rel=1e-12)


@pytest.mark.model
def test_a_task_that_has_bits_per_byte_of_lm_eval_keeps_that_one(toy_model):
    """Of whole pages there is no choice and no right answer: lm-eval's value is the only one, with its digits."""
    made = lm_eval_run(toy_model, Case(task="toy_pages", entry={"limit": 4}, include_path=str(TASKS)), 8)
    assert signal_means(columns_of(made.samples["toy_pages"])) == {}
    scores = {s.metric: s.value for s in scores_of({**made.results, "dense": {"toy_pages": {}}})}
    assert scores["bits_per_byte"] == made.results["results"]["toy_pages"]["bits_per_byte,none"]


def sample(document, likelihoods):
    asked = {f"gen_args_{i}": {"arg_0": "Q:", "arg_1": f" {i}"} for i in range(len(likelihoods))}
    answers = [[str(x), "False"] for x in likelihoods]
    return {"doc_id": document, "doc_hash": f"h{document}", "doc": {}, "target": "0", "arguments": asked, "metrics": ["acc"],
            "filtered_resps": answers, "filter": "none", "acc": float(likelihoods[0] == max(likelihoods))}  # fmt: skip


def test_signals_have_verdicts_and_a_gate_takes_those_that_a_rule_names():
    """A rule for each metric means lm-eval's: a policy of before says the same."""
    before = columns_of([sample(i, [-1.0 - i % 3, -2.0]) for i in range(40)])
    better = columns_of([sample(i, [-0.5 - i % 3 / 2, -2.0 - i / 100]) for i in range(40)])
    made = [
        {
            "results": {"t0": {"acc,none": columns["acc,none"].mean()}},
            "n-samples": {"t0": {"effective": 40}},
            "evalspan": {"signals": {"t0": signal_means(columns)}},
        }
        for columns in (before, better)
    ]
    rows = compared(*made, documents=lambda i, _task: better if i else before)
    said = {row["metric"]: row["verdicts"][0]["verdict"] for row in rows}
    assert (said["margin,dense"], said["gold_bits_per_byte,dense"]) == ("better", "better")

    def ruled(**rule):
        return [
            one.metric for one in judge_rows(Policy.model_validate({"rule": [{"task": "t0", **rule}]}), rows)
        ]

    assert ruled(at_least=0.0) == ["acc,none"]
    assert ruled(metric="margin", max_drop=0.1) == ["margin,dense"]


def test_the_best_checkpoint_by_a_dense_signal_is_the_baseline(tmp_path):
    """Where rules name dense signals alone, these decide which checkpoint was the best."""
    for step, margin in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.6)):
        signals = {"add": {"margin,dense": margin}}
        paths = leave(tmp_path, step, 0.5)
        paths.journal.touch()
        paths.results.write_text(json.dumps(results(0.5, evalspan={"signals": signals})))
    rule = {"task": "add", "metric": "margin", "at_least": 0.0}
    policy = Policy.model_validate({"baseline": "best", "rule": [rule]})
    _, (against, _) = gate_evaluation(Config(work_dir=tmp_path), "step-40-mini-00000040", policy)
    assert against == "step-20-mini-00000020"


def test_a_baseline_is_another_checkpoint_of_the_same_training(tmp_path):
    """In the same mode unless they are mixed. The best one has the highest mean that reports show: perplexity does not count."""
    places = [leave(tmp_path, step, 0.2) for step in (10, 20)]
    places += [leave(tmp_path, 30, 0.4, mode="fast", at=99), leave(tmp_path, 40, 0.3, mode="fast", at=98)]
    places += [leave(tmp_path, 40, 0.3), leave(tmp_path, 40, 0.3, at=100)]
    for paths in places:
        paths.journal.touch()
    only = {
        "results": {"pages": {"word_perplexity,none": 1.0}},
        "higher_is_better": results(0.2)["higher_is_better"],
    }
    places[0].results.write_text(json.dumps(only))

    def baseline(name, evaluation="step-40-mini-00000040", **more):
        rules = [{"task": task, "at_least": 0.0} for task in ("add", "pages")]
        policy = Policy.model_validate({"baseline": name, "rule": rules})
        return gate_evaluation(Config(work_dir=tmp_path), evaluation, policy, **more)[1][0]

    assert baseline("previous") == baseline("best") == "step-20-mini-00000020"
    assert baseline("previous", "step-40-mini-00000100") == "step-20-mini-00000020"
    with pytest.raises(OperatorError, match="cannot be its own baseline"):
        baseline("step-40-mini-00000040")
    assert baseline("previous", mixed=True) == baseline("best", mixed=True) == "step-30-mini-00000099"
