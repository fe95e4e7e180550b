"""Scoring: nothing partial, nothing of other prompts, nothing run twice, and no torch."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from support.exactness.pipeline import TASKS, Case, dumped, executed, our_run

from evaljobs.contract.outcomes import Failed, Scored
from evaljobs.contract.paths import entry_manifest
from evaljobs.contract.storage import write_record
from evaljobs.lmeval import run
from evaljobs.lmeval.results import merge_results
from evaljobs.sandbox.code_eval import CodeEval
from evaljobs.scoring import score as metric


@pytest.mark.model
def test_a_task_that_lacks_a_shard_or_has_other_answers_is_not_scored(model_dir, tmp_path):
    """Law 4: one missing record, answers to other prompts, whose request sets are dropped, or of another key: a failure
    says so, and there is no score.
    """
    spec = dumped(model_dir, Case(task="toy_choice"), tmp_path)
    letters = dumped(model_dir, Case(task="toy_letters"), tmp_path / "letters")
    theirs = (tmp_path / "letters" / "responses" / "trial0.frames").read_bytes()
    (tmp_path / "responses" / "other").write_bytes(theirs)
    stray = letters.frames["toy_letters"][0].model_copy(update={"file": "other", "offset": 0})
    other = spec.suite.model_copy(update={"system_instruction": "Be brief."})
    sets = Path(next(iter(spec.request_sets.values()))).parent
    for changes, words in (
        ({"frames": {t: f[1:] for t, f in spec.frames.items()}}, ["no partial score"]),
        ({"frames": {"toy_choice": (stray,)}}, ["answers toy_letters"]),
        ({"suite": other}, ["prompts differ", "run the same command"]),
    ):
        assert entry_manifest(sets).exists()
        outcome = metric.perform_metric_job(spec.model_copy(update=changes))
        assert isinstance(outcome, Failed)
        assert all(word in outcome.error for word in words)
    assert not entry_manifest(sets).exists(), "the next evaluation has them built again"
    assert not list((tmp_path / "scores").glob("*"))


OWN = """def scored(doc, results):
    {}
    return {{"acc": 1.0}}


def whole(items):
    {}
    return 1.0
"""


@pytest.mark.model
@pytest.mark.parametrize(
    ("scored", "whole", "says"),
    [
        (
            "import sys; sys.exit(0)",
            "",
            "process_results of document 0 (columns context, endings, label): SystemExit: 0",
        ),
        (
            "raise KeyboardInterrupt",
            "",
            "KeyboardInterrupt: no message, at own.py:2: raise KeyboardInterrupt",
        ),
        (
            "assert doc['label'] != doc['label']",
            "",
            "AssertionError: no message, at own.py:2: assert doc['label']",
        ),
        ("", "items[999]", "the aggregation of acc: IndexError: list index out of range (FOLDER/own.py:7)"),
    ],
)
def test_what_a_metric_raises_names_task_function_and_document(model_dir, tmp_path, scored, whole, says):
    """It is the operator's to mend, `sys.exit` too: said once, and not tried three times. An `execute` job goes on."""
    for file in ("rows.py", "choice.yaml"):
        shutil.copyfile(TASKS / file, tmp_path / file)
    (tmp_path / "own.py").write_text(OWN.format(scored or "pass", whole or "pass"))
    (tmp_path / "own.yaml").write_text(
        "include: choice.yaml\ntask: own\nprocess_results: !function own.scored\n"
        "metric_list: [{metric: acc, aggregation: !function own.whole, higher_is_better: true}]\n"
    )
    case = Case(task="own", include_path=str(tmp_path), entry={"limit": 4})
    spec = dumped(model_dir, case, tmp_path / "work" / "evaluation")
    assert len(executed(spec, "own", (0, 1)).failed) == (2 if scored else 0)
    outcome = metric.perform_metric_job(spec)
    assert isinstance(outcome, Failed)
    assert outcome.blame == "operator"
    assert outcome.error.startswith("task own: ")
    assert says.replace("FOLDER", str(tmp_path)) in outcome.error


@pytest.mark.model
def test_executed_documents_are_not_run_again_by_the_score(model_dir, tmp_path, monkeypatch):
    """After `execute` jobs the score runs no program of theirs, and no value changes. A job builds its task once,
    and runs the metric of each of its documents once.
    """
    case = Case(task="toy_programs")
    spec = dumped(model_dir, case, tmp_path / "a")
    halves = (tuple(range(8)), tuple(range(8, 16)))
    calls = Counter()

    def counted(place, name):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **k: (calls.update([name]), real(*a, **k))[1])

    counted(run, "run_entry")
    counted(CodeEval, "compute")
    for documents in halves:
        calls.clear()
        outcome = executed(spec, "toy_programs", documents)
        assert (outcome.documents, outcome.programs, outcome.failed) == (8, 8, {}), "equal answers run once"
        assert calls == {"run_entry": 1, "compute": 8}
    calls.clear()
    scored = metric.perform_metric_job(spec)
    assert calls == {"run_entry": 1, "compute": 16}
    assert isinstance(scored, Scored)
    assert scored.programs_run == 0
    (samples,) = (tmp_path / "a" / "samples").glob("samples_toy_programs_*.jsonl")
    score, lines = json.loads(Path(scored.result_file).read_text()), samples.read_text()
    again = metric.score_entry(spec)  # as a retried job
    assert json.loads(Path(again.result_file).read_text())["results"] == score["results"]
    assert samples.read_text() == lines
    alone = our_run(model_dir, case, 4, 1, tmp_path / "b")
    assert score["results"] == alone.results["results"]
    assert score["results"]["toy_programs"]["pass@1,create_test"] == 0.5


@pytest.mark.model
def test_scoring_loads_no_torch(model_dir, tmp_path):
    """Programs and a chat template are scored in processes that never import torch."""
    program = (
        "import sys; from evaljobs.__main__ import main; status = main(['score', *sys.argv[1:]]); "
        "print(sorted(m for m in sys.modules if m == 'torch')); sys.exit(status)"
    )
    specs = []
    chat = Case(task="toy_sums", entry={"limit": 4}, suite={"apply_chat_template": True})
    for number, case in enumerate((Case(task="toy_programs"), chat)):
        spec = dumped(model_dir, case, tmp_path / str(number))
        write_record(tmp_path / f"{number}.json", spec)
        specs.append(str(tmp_path / f"{number}.json"))
    done = subprocess.run(
        [sys.executable, "-c", program, *specs], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_merged_results_have_the_shape_of_one_run():
    """Entries merge by name, in order; other results of a name are kept apart, also in their group; no groups, no key."""
    one = {"results": {"b": {"acc,none": 1}}, "versions": {"b": 1}, "n-samples": {"b": {"effective": 2}}}
    two = {"results": {"a": {"acc,none": 2}}, "versions": {"a": 1}}
    group = {"results": {"g": {}, "b": {"acc,none": 1, "alias": " - b"}}, "versions": {"b": 1}}
    other = {**group, "n-samples": {"b": {"effective": 1}}, "group_subtasks": {"g": ["b"]}}
    merged = merge_results([one, two, other])
    assert list(merged["results"]) == ["b", "a", "g", "b#2"]
    assert list(merged["versions"]) == ["a", "b", "b#2"]
    assert merged["n-samples"] == {"b": {"effective": 2}, "b#2": {"effective": 1}}
    assert merged["group_subtasks"] == {"g": ["b#2"]}
    same = merge_results([one, {**group, "n-samples": one["n-samples"]}])
    assert same["results"] == {"b": {"acc,none": 1}, "g": {}}, "equal results but for the indent of a group"
    assert "groups" not in merged
    assert merge_results([{**two, "groups": {"g": {}}}])["groups"] == {"g": {}}


def test_a_function_in_a_config_has_no_address_in_the_results():
    """It differs from run to run: two evaluations of one checkpoint would differ in their bytes."""

    def configs():
        def shuffled(docs):
            return docs

        return {"t": {"process_docs": str(partial(shuffled, 1)), "fewshot_config": {"samples": shuffled}}}

    one, other = configs(), configs()
    assert str(one) != str(other)
    assert metric.reproducible_configs(one) == metric.reproducible_configs(other)
    assert "shuffled" in metric.reproducible_configs(one)["t"]["process_docs"]
