"""`evalspan rescore` by the command line: the digits of a fresh evaluation, from answers on disk, and no trial."""

import json
import shutil

import pytest
from dev_cluster.testing import wait_until
from support import sites
from support.exactness.pipeline import TASKS
from support.toys import suite_text

from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.model

ENTRIES = {"toy_choice": {"limit": 12}, "toy_sums": {"limit": 12}, "toy_letters": {"limit": 12}}
# task file -> (what stands there, what stands there now): a gold answer, a regex, a metric
EDITS = {
    "choice.yaml": ("doc_to_target: label", 'doc_to_target: "{{ (label + 1) % 2 }}"'),
    "sums.yaml": ('"([a-z]+)"', '"([a-z])"'),
    "letters.yaml": ("brier_score, aggregation: brier_score, higher_is_better: false", "acc_norm, aggregation: mean"),
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory, toy_model):
    """An evaluation of a copy of the toy model, on task files of its own."""
    folder = tmp_path_factory.mktemp("rescore")
    shutil.copytree(TASKS, folder / "tasks")
    shutil.copytree(toy_model, folder / "runs" / "step-1000")
    made = sites.local(folder, folder / "runs" / "step-1000", "--slots", "2", entries=ENTRIES)
    made.suite.write_text(suite_text("toys", ENTRIES, folder / "tasks"))
    done = made.run(made.evaluate())
    assert done.returncode == 0, done.stderr
    yield made
    made.end_workers()


def edit(site, edits):
    for name, (before, after) in edits.items():
        file = site.folder / "tasks" / name
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))


def parent(site):
    return min(site.work.glob("*/evaluation.json"), key=lambda p: p.stat().st_mtime_ns).parent.name


def rescore(site, *more):
    return site.run(site.command("rescore", parent(site), "--json", *more))


def scored(site, done):
    """(results, folder) of a new evaluation that names its parent and had no job that infers."""
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    folder = site.work / results["evalspan"]["evaluation_id"]
    assert results["evalspan"]["parent"] == parent(site) != folder.name
    assert {log.name.split("-")[2] for log in folder.glob("logs/es-*")} <= {"build", "metric"}
    return results, folder


def samples(folder):
    return {file.name: file.read_text() for file in folder.glob("samples/*")}


def same(ours, theirs):
    parts = ("results", "versions", "n-shot", "higher_is_better", "n-samples")
    return all(ours.get(part) == theirs.get(part) for part in parts)


@pytest.fixture
def edited(site):
    """Edits task files for one test."""
    before = {file: file.read_text() for file in (site.folder / "tasks").glob("*.yaml")}
    yield lambda edits: edit(site, edits)
    for file, text in before.items():
        file.write_text(text)


def test_the_same_suite_gives_the_same_digits_also_where_the_checkpoint_is_gone(site):
    """Of a removed checkpoint config and tokenizer are asked for; it stays in its series. Typed again, nothing is run."""
    first = site.work / parent(site)
    theirs = json.loads((first / "results.json").read_text())
    kept = site.folder / "tokenizer"
    kept.mkdir()
    for file in site.model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, kept)
    aside = site.model.rename(site.folder / "aside")
    try:
        refused = rescore(site)
        assert (refused.returncode, "--tokenizer" in refused.stderr) == (2, True)
        results, folder = scored(site, rescore(site, "--tokenizer", str(kept)))
        shown = site.run(site.command("report", "--series", str(site.model.parent), "--json"))
        assert {p["checkpoint"] for p in json.loads(shown.stdout)["points"]} == {str(site.model)}
    finally:
        aside.rename(site.model)
    assert same(results, theirs)
    assert samples(folder) == samples(first)
    again = rescore(site)
    assert "nothing was run" in again.stderr
    assert scored(site, again)[1] == folder


def test_edited_gold_answers_filters_and_metrics_give_the_digits_of_a_fresh_evaluation(site, edited):
    """Killed in the middle and typed again it goes on. A daemon that has the work folder does the same work."""
    edited(EDITS)
    before = set(site.work.glob("*/journal.jsonl"))
    process = site.start(site.command("rescore", parent(site), "--json"))
    wait_until(lambda: set(site.work.glob("*/journal.jsonl")) - before or process.poll() is not None)
    process.kill()
    process.wait()
    results, folder = scored(site, rescore(site))
    fresh = site.run(site.evaluate("--fresh"))
    assert fresh.returncode == 0, fresh.stderr
    theirs = json.loads(fresh.stdout)
    assert same(results, theirs)
    assert samples(folder) == samples(site.work / theirs["evalspan"]["evaluation_id"])
    base, ours = samples(site.work / parent(site)), samples(folder)
    assert all(base[name] != text for name, text in ours.items())
    edited({"sums.yaml": ('"([a-z])"', '"([a-z]{2})"')})
    daemon = site.start(site.command("daemon"))
    try:
        wait_until(lambda: WorkLock(WorkPaths(site.work).lock).holder().startswith(DAEMON))
        by_daemon, other = scored(site, rescore(site))
    finally:
        daemon.terminate()
        daemon.communicate(timeout=60)
    assert other != folder
    assert by_daemon["results"]["toy_choice"] == results["results"]["toy_choice"]
    changed = {name for name, text in samples(other).items() if ours[name] != text}
    assert changed == {"samples_toy_sums_001.jsonl"}


@pytest.mark.parametrize(
    ("limit", "edits", "says"),
    [
        (4, {}, "toy_choice: its requests are not those of"),
        (12, {"choice.yaml": ("{{context}}", "So: {{context}}")}, "toy_choice: its requests"),
    ],
)
def test_other_requests_are_refused_by_task_and_key_before_anything_is_submitted(
    site, edited, limit, edits, says
):
    edited(edits)
    there = set(site.work.glob("*/evaluation.json"))
    suite = site.folder / "other.toml"
    suite.write_text(suite_text("toys", {"toy_choice": {"limit": limit}}, site.folder / "tasks"))
    refused = rescore(site, "--suite", str(suite))
    assert refused.returncode == 2
    assert says in refused.stderr
    assert ("limit is 4, not 12" if limit == 4 else "other prompts or documents") in refused.stderr
    assert set(site.work.glob("*/evaluation.json")) == there


def test_pruned_answers_and_unknown_evaluations_are_refused(site):
    """Last: it prunes."""
    unknown = site.run(site.command("rescore", "nothing-of-this-name"))
    assert (unknown.returncode, "nothing-of-this-name" in unknown.stderr) == (2, True)
    pruned = site.run(site.command("prune", "--older-than", "0d", "--keep", "scores", "--yes"))
    assert pruned.returncode == 0, pruned.stderr
    suite = site.folder / "one.toml"
    suite.write_text(suite_text("one", {"toy_choice": {"limit": 12}}, site.folder / "tasks"))
    refused = rescore(site, "--suite", str(suite))
    assert refused.returncode == 2
    assert "are not whole, or were removed" in refused.stderr
