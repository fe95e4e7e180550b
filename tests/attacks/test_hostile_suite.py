"""Attacks of a suite file, or of tasks beside it, in a folder that others write to.

Who names such a file in a command or in the settings runs its code, by design: a notice cannot (tests/intake/test_admission.py).
Here: what the file may not do besides, to those who only look at it, and to other folders.
"""

import json

import pytest
from support.trainings import leave, results

from coordinator.decide.evaluation.records import id_stem
from coordinator.errors import OperatorError
from coordinator.intake.suites import load_suite
from coordinator.results.trackers import lm_eval_files
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x9b31m\x08\r"
PATHS = ["../../../evil", "/tmp/evil", "a/../../evil", "..", "evaluation.json", "journal.jsonl"]


def toml(folder, suite, task):
    file = folder / "suite.toml"
    file.write_text(f"name = {json.dumps(suite)}\n[[task]]\nname = {json.dumps(task)}\n")
    return file


def commands(text):
    """The control characters in what a terminal is sent, but for line ends and tabs."""
    return [c for c in text if c not in "\n\t" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0)]


@pytest.mark.parametrize(
    ("suite", "task"), [(f"x{ESCAPES}", "t"), ("x", f"t{ESCAPES}"), ("x\n", "t"), ("x" * 10**6, "t")]
)
def test_a_name_that_commands_a_terminal_is_no_suites_and_no_tasks(suite, task, tmp_path):
    with pytest.raises(OperatorError) as refused:
        load_suite(toml(tmp_path, suite, task))
    assert not commands(str(refused.value))
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize("name", PATHS)
def test_no_name_of_a_suite_or_task_leads_out_of_its_evaluations_folder(name, tmp_path):
    """Nor onto a file that the coordinator writes: specs, outcomes, samples and scores have names of their own kind."""
    suite = load_suite(toml(tmp_path, name, name))
    stem = id_stem(name, suite.name)
    work = WorkPaths(tmp_path / "work")
    root = work.evaluation(stem).root
    assert root.parent == work.root
    assert root.name not in ("", ".", "..")
    paths = EvaluationPaths(root)
    kept = {paths.evaluation, paths.journal, paths.results, paths.report, paths.status, paths.request_sets}
    for made in (paths.spec(name), paths.log(name), paths.outcome("failed", name), paths.response_file(name)):
        assert made.resolve().parent.parent == root
        assert made not in kept


@pytest.mark.parametrize("task", ["../../../evil", "/evil", "a/../../../../evil", "..", "x\0y"])
def test_an_export_writes_below_its_folder_alone(task, tmp_path):
    """Samples are written under their tasks' names, as lm_eval does it: a name may be a path."""
    paths = leave(tmp_path / "work", 10, 0.5)
    found = results(0.5) | {"configs": {task: {"task": task}}}
    paths.results.write_text(json.dumps(found))
    paths.samples.mkdir(exist_ok=True)
    (paths.samples / f"samples_{slug(task)}_000.jsonl").write_text(
        json.dumps({"doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}) + "\n"
    )
    before = set(tmp_path.rglob("*"))
    written = lm_eval_files.write_lm_eval_files(paths.root, tmp_path / "out" / "a" / "b")
    its_document = {paths.ended}  # which any reader writes
    made = {p for p in tmp_path.rglob("*") if p.is_file()} - before - its_document
    assert made == set(written)
    assert len(written) == 2
    assert all(p.resolve().is_relative_to((tmp_path / "out" / "a" / "b").resolve()) for p in written)
