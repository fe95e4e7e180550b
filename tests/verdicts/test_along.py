"""Verdicts along a training, as a report, a page and the daemon's news show them."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from pyarrow import compute, parquet
from support.commands import typed
from support.trainings import leave

from coordinator.interface.cli.screen.evaluation_views import all_summaries
from coordinator.interface.page import page_contents
from coordinator.interface.page.index import index_data, training_data
from coordinator.operations.monitor import daemon_services, notify
from coordinator.results.report import training_files
from coordinator.results.report.load_series import find_heads, find_series, read_document
from coordinator.results.report.pairs import Evaluated, compare_one, score_differences
from coordinator.results.report.scores import ScoreValue
from coordinator.results.report.stored_documents import read_documents as documents_of
from coordinator.results.report.training import training_sentence
from coordinator.runtime.summary import (
    SCHEMA_VERSION,
    Summary,
    fields_of_record,
    read_evaluation,
    summary_of_record,
    write_summary,
)
from coordinator.site.config.schema import Config, NotifyConfig
from evaljobs.contract.columns import pack_columns
from evaljobs.contract.paths import EvaluationPaths

COUNT, AT, DOCUMENTS = 16, 12, 400  # checkpoints, the first worse one, documents


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A training whose scores fall at checkpoint 1200, in three ways: of documents, lower is better, and a group."""
    folder, rng = tmp_path_factory.mktemp("training") / "work", np.random.default_rng(2)
    folder.mkdir(mode=0o700)
    (folder / "daemon.lock").touch()
    skill = rng.normal(size=DOCUMENTS)
    for k in range(COUNT):
        paths = leave(folder, 100 * k, 0.5)
        paths.journal.touch()
        right = (skill + 0.5 * rng.normal(size=DOCUMENTS) - (1 if k >= AT else 0) > -0.5).astype(float)
        ids = {"doc_id": np.arange(DOCUMENTS), "doc_hash": np.arange(DOCUMENTS)}
        paths.documents.write_bytes(pack_columns({(0, "add"): {**ids, "acc,none": right}}))
        accuracy, perplexity = {"acc,none": right.mean()}, 12 + 0.1 * rng.normal() + (4 if k >= AT else 0)
        paths.results.write_text(
            json.dumps(
                {
                    "results": {"add": accuracy, "pages": {"word_perplexity,none": perplexity}},
                    "groups": {"all": accuracy},
                    "group_subtasks": {"all": ["add"]},
                    "higher_is_better": {"add": {"acc": True}, "pages": {"word_perplexity": False}},
                    "n-samples": {"add": {"original": DOCUMENTS, "effective": DOCUMENTS}},
                }
            )
        )
        main = (ScoreValue(task="add", metric="acc", filter="none", value=right.mean()),)
        known = fields_of_record(read_evaluation(paths)) | {"schema_version": SCHEMA_VERSION, "scores": main}
        write_summary(paths, Summary(written_at=0.0, ended_at=100.0 * k, stage="ended", **known))
    return folder


def curves(work, **more):
    found = training_files.series_of(find_series(work, "/runs/a"), Config(work_dir=work, **more))
    return {curve.name: curve.points for curve in found.curves}


def test_each_leaf_score_says_since_when_it_is_worse(work):
    """Law: a score of documents, and one whose documents are not known, where lower is better, too; a group says nothing."""
    found = curves(work)
    for name in ("add/acc", "pages/word_perplexity"):
        (said,) = [p.worse for p in found[name] if p.worse]
        assert said.since == str(100 * AT), name
        assert int(said.low) <= 100 * AT <= int(said.high)
        assert [p.yardstick is None for p in found[name]] == [True] * 6 + [False] * 10
    assert 12 < next(p.worse.mean for p in found["pages/word_perplexity"] if p.worse) + 0.2 < 13
    assert all(p.yardstick is p.worse is None for p in found["all/acc"])


def test_a_longer_horizon_is_stricter(work):
    """Law: the settings' horizon shares the false verdicts among its checkpoints."""
    found = curves(work, horizon=10**15)
    assert not any(p.worse for points in found.values() for p in points[: AT + 1])


def test_every_view_says_the_same(work):
    """Law: terminal, JSON, CSV, pages, `status` and news print one document: since when, both levels, the mean, verdicts, horizon."""
    settings = Config(work_dir=work)
    found = training_files.judge_training(settings, find_heads(work, "/runs/a"), whole=True)
    training, series = found
    stands = training_sentence(training)
    (drop,) = [d for d in training.drops if d.name == "add/acc"]
    at = next(p for p in curves(work)["add/acc"] if p.worse)
    assert (drop.label, drop.after, drop.worse) == (at.label, at.value, at.worse)
    levels = f"add/acc since 1200 ({at.worse.mean:.4f} before, {at.value:.4f} at 1200)"
    assert levels in stands

    series_of = ["report", "--series", "/runs/a", "--work-dir", work]
    text, as_json, as_csv = (typed(*series_of, *more).stdout for more in ([], ["--json"], ["--csv"]))
    newest = training.scored[-1][0]
    views = [
        text,
        typed("status", "--work-dir", work).stdout,
        typed("report", newest, "--work-dir", work).stdout,
    ]
    for view in views:
        assert stands in " ".join(view.split())
    assert "100 checkpoints" in " ".join(text.split())
    made = json.loads(as_json)
    status = json.loads(typed("status", "--json", "--work-dir", work).stdout)
    assert (made["horizon"], made["trainings"]) == (100, [training.model_dump(mode="json")])
    (known,) = status["trainings"]
    assert known.items() >= {**made["trainings"][0], "standing": stands}.items()
    (row,) = [
        r for r in csv.DictReader(io.StringIO(as_csv)) if (r["task"], r["worse_since"]) == ("add", "1200")
    ]
    assert (row["step"], row["worse_low"], row["worse_high"]) == (at.label, at.worse.low, at.worse.high)

    page = training_data([found])["trainings"][0]
    curve = next(c for c in page["curves"] if c["task"] == "add")
    place = [p.label for p in series.curves[0].points].index(at.label)
    shown = [(one["at"], one["words"]) for one in curve["drops"]]
    assert (shown, curve["marks"][place]) == ([(place, drop.words)], "!")
    ended = all_summaries(settings)
    first = index_data(
        [],
        ended,
        lambda key, scored: training_files.find_training(settings, key, [s.evaluation_id for s in scored]),
        0,
    )
    said = [page["clauses"], first["trainings"][0]["standing"]["clauses"]]
    evaluation = page_contents.evaluation_contents(settings, newest).data["training"]["standing"]["clauses"]
    assert [[clause["text"] for clause in clauses] for clauses in (*said, evaluation)] == [
        stands.split("; ")
    ] * 3
    (news,) = [
        one
        for s in ended
        if s.evaluation_id == drop.evaluation_id
        for one in daemon_services.news_of_ended(settings, s)
        if one.fell
    ]
    assert f"add/acc is {drop.words}" in news.text
    assert drop in news.fell
    assert stands in news.text


def test_what_is_kept_of_a_training_counts_while_its_results_are_those_on_disk(work, tmp_path):
    """Law: made once; made anew after results were written again or removed, and for another horizon; and where nothing can be kept."""
    settings = Config(work_dir=shutil.copytree(work, tmp_path / "work"))
    key, ids = ("/runs/a", "mini", "exact"), [p.name for p in settings.work_dir.glob("step-*")]
    made = training_files.find_training(settings, key, ids)
    assert training_files.read_kept(settings, key, ids) == made
    assert training_files.read_kept(settings, key, [*ids, "another"]) is None
    assert training_files.read_kept(settings.model_copy(update={"horizon": 7}), key, ids) is None
    some = find_heads(settings.work_dir, "/runs/a/step-?00")
    assert training_files.judge_training(settings, some, whole=False)[0].scored == made.scored[1:10]
    assert (
        training_files.read_kept(settings, key, ids) == made
    )  # a part of the checkpoints is not kept in its place
    (file,) = (settings.work_dir / "cache" / "trainings").iterdir()
    results = settings.work_dir / made.scored[-1][0] / "results.json"
    changed = json.loads(results.read_text())
    changed["results"]["add"]["acc,none"] = 1.0
    results.write_text(json.dumps(changed))
    assert training_files.read_kept(settings, key, ids) is None
    assert training_files.find_training(settings, key, ids).mean[-1] == 1.0
    shutil.rmtree(results.parent)
    assert training_files.find_training(settings, key, ids[:1]).scored == made.scored[:-1]
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()  # nothing can be written there
    assert training_files.find_training(settings, key, ids[:1]).scored == made.scored[:-1]


def test_differences_are_kept_until_a_result_changes(work):
    """Law: a series that is shown again reads no documents; results that were written again are compared again."""
    curves(work)
    file = work / "step-300-mini-00000300" / "paired.jsonl"
    (kept,) = file.read_text().splitlines()
    variance = score_differences(work, "step-200-mini-00000200", "step-300-mini-00000300")["add/acc"].variance
    file.write_text(kept.replace(repr(variance), "7.0"))
    assert curves(work)["add/acc"][8].yardstick > 0.5
    results = file.with_name("results.json")
    results.write_bytes(results.read_bytes())
    assert curves(work)["add/acc"][8].yardstick < 0.1
    assert (
        score_differences(work, "step-200-mini-00000200", "step-300-mini-00000300")["add/acc"].variance
        == variance
    )


def test_a_task_that_a_checkpoint_lacks_is_compared_once_with_an_earlier_one(work, tmp_path):
    """Law: a checkpoint keeps its differences to each checkpoint that one of its scores is held against."""
    made = shutil.copytree(work, tmp_path / "work")
    lacking = made / "step-300-mini-00000300" / "results.json"
    found = json.loads(lacking.read_bytes())
    del found["results"]["pages"]
    lacking.write_text(json.dumps(found))
    curves(made)
    file = made / "step-400-mini-00000400" / "paired.jsonl"
    written = file.stat().st_mtime_ns
    curves(made)
    assert file.stat().st_mtime_ns == written
    befores = {line.split('"')[1] for line in file.read_text().splitlines()}
    assert befores == {"step-200-mini-00000200", "step-300-mini-00000300"}


@pytest.mark.parametrize("same", [True, False])
def test_differences_in_vectors_are_those_of_each_pair(tmp_path, same):
    """Law: to rounding, documents, difference, variance, degrees and flips of `paired`, whether the documents are the same or
    not, with clusters and documents without a value; what cannot be compared has the reason.
    """
    rng, kept = np.random.default_rng(3), []
    for i, step in enumerate((100, 200)):
        paths = leave(tmp_path, step, 0.5)
        parts, scores = {}, {}
        for k, task in enumerate(("plain", "passages", "gaps", "other", "one")):
            count = 1 if task == "one" else 60 + 10 * k + (0 if same or task != "plain" else i)
            value = (rng.random(count) < 0.6).astype(float)
            value[: 7 * (task == "gaps")] = np.nan
            ids = {
                "doc_id": np.arange(count),
                "doc_hash": np.arange(count) + (task == "gaps") * (np.arange(count) == 9) * i,
            }
            if same:
                ids["doc_hash"] = np.arange(count)
            parts[k, task] = ids | {"acc,none": value, "margin": rng.normal(size=count) * 1e3 + 1e4}
            if task == "passages":
                parts[k, task]["cluster"] = np.arange(count) // 4 + 1
            mean = np.nanmean(value) if task != "other" else 0.123
            scores[task] = {"acc,none": mean, "acc_stderr,none": 0.1}
        signals = {t: {"margin,dense": p["margin"].mean(), "n": 9} for (_, t), p in parts.items()}
        paths.documents.write_bytes(pack_columns(parts))
        found = {
            "results": scores,
            "n-samples": {task: {} for task in scores},
            "evalspan": {"signals": signals},
        }
        paths.results.write_text(json.dumps(found))
        kept.append(paths)
    found = score_differences(tmp_path, *(paths.root.name for paths in kept))
    assert score_differences(tmp_path, *(paths.root.name for paths in kept)) == found
    both = [Evaluated(read_document(paths), documents_of(paths)) for paths in kept]
    each = {both[0].scores[key].name: compare_one(*both, key) for key in both[0].scores}
    assert found.keys() == each.keys()
    reasons = {name: one for name, one in each.items() if isinstance(one, str)}
    assert {name: one for name, one in found.items() if isinstance(one, str)} == reasons
    assert [*reasons] == ["other/acc", "one/acc", "one/margin,dense"]
    for name in found.keys() - reasons.keys():
        whole = [value for value in each[name] if value is not None]
        assert [value for value in found[name] if value is not None] == pytest.approx(whole, rel=1e-9), name


def test_a_series_is_exported_as_a_row_a_document(work, tmp_path):
    """Law: the table has each checkpoint's documents with its step and metrics, as they are kept."""
    file = tmp_path / "documents.parquet"
    typed("export", "--series", "/runs/a", "--to", "parquet", "--out", file, "--work-dir", work)
    table = parquet.read_table(file)
    assert len(table) == COUNT * DOCUMENTS
    last = table.filter(compute.equal(table["step"], 1500))
    own = documents_of(EvaluationPaths(work / "step-1500-mini-00001500")).of("add")
    np.testing.assert_array_equal(last["acc,none"].to_numpy(), own["acc,none"])
    assert set(last["task"].to_pylist()) == {"add"}
    assert set(last["evaluation_id"].to_pylist()) == {"step-1500-mini-00001500"}


def test_the_daemon_tells_what_fell_and_what_its_gate_says(work, tmp_path):
    """Law: the checkpoint that shows a score to be worse is news, no other one; the news of each end have the gate's outcome."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rule]]\ntask = "add"\nmax_drop = 0.05\n')
    settings = Config(work_dir=work, notify=NotifyConfig(gate=policy))
    points = curves(work)["add/acc"]
    places = [EvaluationPaths(work / p.evaluation_id) for p in points]
    ends = [summary_of_record(place, "").model_copy(update={"ended_at": 1.0}) for place in places]
    told = [
        [drop.task for one in daemon_services.news_of_ended(settings, end) for drop in one.fell]
        for end in ends
    ]
    assert ["add" in tasks for tasks in told] == [p.worse is not None for p in points]
    gates = [notify.gate_outcome(settings, end) for end in ends]
    assert [outcome for outcome, _ in gates][AT] == "regression"
    assert gates[0][0] == "undecidable"
    assert "first checkpoint" in gates[0][1]
    news = notify.ended_news(ends[AT], gates[AT])
    assert (news.gate, "; gate: regression; regression: add acc: " in news.text) == ("regression", True)
    assert notify.gate_outcome(Config(work_dir=work), ends[AT]) is None


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ('task = "add"\nmax_drop = 0.2', 0),
        ('task = "*"\nmax_drop = 0.2', 4),
        ('task = "*"\nmax_drop = 0.2\nrequired = true', 1),
        ('task = "*"\nmax_drop = 0.2\nrequired = true\ntier = "supporting"', 0),
    ],
)
def test_a_task_that_failed_since_the_baseline_is_no_pass(tmp_path, rule, code):
    """Law: `gate` exits with 4 where a score is missing, with 1 where it is required, and says so in a line."""
    (tmp_path / "work").mkdir(mode=0o700)
    right = np.arange(60) % 2.0
    for step, tasks in ((100, ("add", "sub")), (200, ("add",))):
        paths = leave(tmp_path / "work", step, 0.5)
        paths.journal.touch()
        one = {"doc_id": np.arange(60), "doc_hash": np.arange(60), "acc,none": right}
        paths.documents.write_bytes(pack_columns(dict.fromkeys(enumerate(tasks), one)))
        found = {"results": {task: {"acc,none": 0.5} for task in tasks}}
        found["n-samples"] = {task: {"effective": 60} for task in tasks}
        paths.results.write_text(json.dumps(found))
    policy = tmp_path / "policy.toml"
    policy.write_text(f"[[rule]]\n{rule}\n")
    asked = ["gate", "step-200-mini-00000200", "--policy", policy, "--work-dir", tmp_path / "work"]
    said = typed(*asked, code=code).stdout
    assert ("missing: sub acc: no score; the baseline has 0.5000" in said) == ("*" in rule)
