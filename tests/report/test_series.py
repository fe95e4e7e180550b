"""Laws of learning curves and comparisons: order, regressions, cost, headings; scores of different modes are never silently on one
curve or without their mode. How they look is in tests/golden/test_screens.py.
"""

import csv
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.commands import typed
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave, point, results, two_trainings

from coordinator.base.strict_json import replace_non_finite
from coordinator.base.words import format_score
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.intake import places
from coordinator.interface.page.index import training_data
from coordinator.results.report import load_series
from coordinator.results.report.comparisons import heads_of
from coordinator.results.report.learning_curves import Worse, make_series, to_csv, to_json
from coordinator.results.report.load_series import checkpoint_matcher, find_series
from coordinator.results.report.measurements import UNMEASURED, make_report
from coordinator.results.report.mode_check import task_check
from coordinator.results.report.render import mode_lines
from coordinator.results.report.scores import scores_of
from coordinator.results.report.series_screen import show_series, sparkline
from coordinator.results.report.training import training_of, training_sentence
from coordinator.results.trackers import values_of
from coordinator.runtime.finalize import results_in_files
from evaljobs.contract.paths import EvaluationPaths


@pytest.fixture
def work(tmp_path):
    return two_trainings(tmp_path / "work")


def test_a_group_counts_the_documents_of_its_tasks():
    """None where one of them is unknown."""
    group = {
        "results": {name: {"acc,none": 0.25} for name in ("part", "all")},
        "groups": {"all": {"acc,none": 0.25}},
        "group_subtasks": {"all": ["part"]},
        "n-samples": {"part": {"effective": 193}},
        "versions": {"all": 2},
        "n-shot": {"part": 5},
    }
    known = {s.task: (s.documents, s.version, s.n_shot) for s in scores_of(group)}
    assert known == {"part": (193, "", 5), "all": (193, "2", None)}
    group["group_subtasks"] = {"all": ["part", "other"]}
    assert {s.task: s.documents for s in scores_of(group)}["all"] is None


def test_the_page_says_the_levels_of_a_drop_that_the_terminal_says():
    """Before it: not the mean before the checkpoint that shows it, which holds the drop already where that comes late."""
    series = make_series([point(1, 0.7), point(2, 0.5)])
    worse = Worse(since="1", low="1", high="2", mean=0.6813)
    curves = []
    for curve in series.curves:
        last = curve.points[-1]._replace(worse=worse, mean_before=0.625)
        curves.append(curve._replace(points=(*curve.points[:-1], last)))
    found = series._replace(curves=curves)
    stands = training_of(found, lambda *_: {"verdict": "better", "change": 0.1, "reach": 0.05, "tasks": 1})
    out = io.StringIO()
    show_series(Console(file=out, width=200), found, [stands])
    (training,) = training_data([(stands, found)])["trainings"]
    said = [drop["words"] for curve in training["curves"] for drop in curve["drops"]]
    assert said[0] == "worse since 1 (95 %: 1 to 2): 0.6813 before, 0.5000 at 2"
    assert [drop["words"] for drop in training["drops"]] == said
    levels = "add/exact_match since 1 (0.6813 before, 0.5000 at 2)"
    best = "2 is better than 1, the best one before it (+0.1000 ± 0.0500 over 1 task)"
    drops = f"2 scores are worse: {levels}, pages/word_perplexity since 1 (0.6813 before, 9.5000 at 2)"
    assert training_sentence(stands) == f"{best}; {drops}"
    assert [clause["text"] for clause in training["clauses"]] == training_sentence(stands).split("; ")
    assert training_sentence(stands) in " ".join(out.getvalue().split())


def test_columns_are_in_training_order_whichever_scores_the_first_row_has():
    """The mean, the first row, has no checkpoint that lacks a task; without steps a chart has the same order."""
    both, one = (scores_of({"results": {task: {"acc,none": 0.5} for task in tasks}}) for tasks in ("ab", "a"))
    for steps in ((1, 2, 3), (None,) * 3):
        points = [
            point(step, 0.5, checkpoint=f"/r/c{i}", evaluation_id=f"e{i}", accepted_at=i, scores=scores)
            for i, (step, scores) in enumerate(zip(steps, (one, both, one), strict=True), 1)
        ]
        out = io.StringIO()
        show_series(Console(file=out, width=200), make_series(points))
        text = out.getvalue()
        labels = ["1", "2", "3"] if steps[0] else ["c1", "c2", "c3"]
        (head,) = (line for line in text.splitlines() if line.startswith("score "))
        assert head.split()[1:4] == labels
        (axis,) = (line for line in text.splitlines() if line.split() == labels)
        assert axis


def test_drops_are_told_the_latest_first_in_the_table_as_in_the_sentence():
    series = make_series([point(i, 0.9 - i / 10) for i in range(5)])
    curve = series.curves[0]
    worse = [
        Worse(since=str(i), low=str(i), high=str(i), mean=0.9) if i in (1, 3) else None for i in range(5)
    ]
    points = tuple(p._replace(worse=w) for p, w in zip(curve.points, worse, strict=True))
    found = series._replace(curves=[curve._replace(points=points)])
    stands = training_of(found, lambda *_: {"verdict": "worse", "change": -0.1, "reach": 0.05, "tasks": 1})
    out = io.StringIO()
    show_series(Console(file=out, width=200), found, [stands])
    table = out.getvalue().partition("Worse than before")[2].splitlines()[3:5]
    assert [line.split()[1] for line in table] == [drop.worse.since for drop in stands.drops] == ["3", "1"]


def test_a_huge_score_has_six_digits():
    """The perplexity of an untrained model, in tables and sentences alike."""
    assert [format_score(value) for value in (0.5, 999_999.0, 1e6, 13555358093614451915751424.0)] == [
        "0.5000", "999999.0000", "1.00000e+06", "1.35554e+25",
    ]  # fmt: skip
    assert format_score(-1234567.0, "+") == "-1.23457e+06"


VALUES = st.one_of(st.floats(0, 1), st.just(math.nan), st.none())


@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_mean_is_that_of_each_task_s_first_score_where_a_checkpoint_has_all(rows):
    """No group counts again, nor a score of which lower is better; a checkpoint that lacks one has no mean."""
    groups = {"all": ("a", "b", "c"), "some": ("a", "b"), "own": ("b", "c")}

    def scores(values):
        known = {t: v for t, v in zip("abc", values, strict=True) if v is not None}
        tables = {t: {"acc,none": v, "acc_norm,none": 0.1} for t, v in known.items()}
        tables |= {"own": {"acc,none": 0.9}, "d": {"perplexity,none": 0.5}}
        return scores_of({"results": tables, "higher_is_better": {"d": {"perplexity": False}}})

    made = make_series(point(i, 0.5, scores=scores(values), groups=groups) for i, values in enumerate(rows))
    found = {curve.task: {p.step: p.value for p in curve.points} for curve in made.means}
    known = [[v for v in values if v is not None] for values in zip(*rows, strict=True)]
    assert [c.task for c in made.means if c.task in groups] == [] if "all" not in found else ["all"]
    counted = [t for t, values in zip(range(3), known, strict=True) if values]
    expected = {
        i: sum(values[t] for t in counted) / len(counted)
        for i, values in enumerate(rows)
        if len(counted) > 1 and all(values[t] is not None and math.isfinite(values[t]) for t in counted)
    }
    assert found.get("mean of all tasks", {}) == pytest.approx(expected)


def test_a_sparkline_has_the_lowest_and_the_highest_bar_at_its_ends():
    """Each bar the mean of its share; a blank where nothing is a number."""
    assert sparkline([0.1, 0.5, 0.9]) == "▁▅█"
    assert sparkline([0.3, 0.3], ascii_only=True) == "__"
    assert sparkline([math.nan, 0.0, 1.0]) == " ▁█"
    assert len(sparkline([i / 200 for i in range(200)])) == 12


def test_cost_is_gpu_hours_at_the_price():
    """1,800 s at 2 an hour cost 1; a checkpoint that runs costs nothing yet."""
    running = point(2, 0.1, status="open", gpu_seconds=None, scores=())
    series = make_series([point(1, 0.1), running], gpu_hour_price=2.0)
    assert [p.cost for p in series.points] == [1.0, None]
    assert [p.gpu_seconds for p in series.points] == [1800.0, None]


def test_a_folder_or_a_glob_names_a_training(tmp_path, monkeypatch):
    """The parent folder, relative or not, or a glob of the checkpoint folders."""
    monkeypatch.chdir(tmp_path)
    checkpoint = str(tmp_path / "runs" / "step-10")
    for selector in ("runs", str(tmp_path / "runs"), "runs/step-*", str(tmp_path / "*/step-1?"), "*step-10"):
        assert checkpoint_matcher(selector)(checkpoint), selector
    for selector in ("run", "runs/step-2*", str(tmp_path)):
        assert not checkpoint_matcher(selector)(checkpoint), selector


def test_a_series_is_found_in_the_work_folder(work):
    """Ended ones with scores, a running one without, none of another training or suite; half a record is skipped. What names
    no evaluation is refused with what there is.
    """
    leave(work, 10, 0.1, suite="other")
    (work / "broken").mkdir()
    (work / "broken" / "evaluation.json").write_text('{"schema_version": 1')
    points = make_series(find_series(work, "/runs/a", "mini")).points
    assert [(p.step, p.status, len(p.scores)) for p in points] == [
        (10, "done", 2),
        (20, "done", 2),
        (30, "open", 0),
    ]
    assert len(find_series(work, "/runs/*")) == len(find_series(work, "/runs/a")) + 1
    for selector, suite, said in (
        ("/runs/c", None, "checkpoints are in: /runs/a, /runs/b;"),
        ("/runs/a", "nope", r"suite 'nope' \(there are: mini, other\)"),
        ("/runs/", None, r"try '/runs/\*'"),
    ):
        with pytest.raises(OperatorError, match=said):
            find_series(work, selector, suite)


def test_an_evaluation_without_scores_hides_none_of_its_checkpoint(work):
    """A later one that runs, or failed: curves have the earlier one's scores, whether or not other suites are beside them."""
    leave(work, 20, None, at=21)
    leave(work, 10, 0.0, at=11).results.write_text(json.dumps({"results": {}, "failed": {"add": "why"}}))
    for more in ((), (50, 0.5)):
        if more:
            leave(work, *more, suite="other")
        made = json.loads(typed("report", "--series", "/runs/a", "--json", "--work-dir", work).stdout)
        curve = next(c for c in made["curves"] if c["name"] == "add/exact_match" and c["suite"] == "mini")
        assert {p["step"]: p["value"] for p in curve["points"]} == {10: 0.2, 20: 0.6}
        assert [p["status"] for p in made["points"] if p["suite"] == "mini"] == ["done", "done", "open"]


@pytest.mark.parametrize("field", UNMEASURED)
def test_a_report_that_lacks_a_figure_is_refused_and_not_read_as_zero(work, field):
    """With what to do; in a series its checkpoint is unreadable, and hides no other one."""
    paths = EvaluationPaths(work / "step-5-mini-00000005")
    report = json.loads(paths.report.read_text())
    paths.report.write_text(json.dumps({name: value for name, value in report.items() if name != field}))
    with pytest.raises(OperatorError, match=rf"(?s){paths.root}.*{field}.*move"):
        load_series.read_document(paths)
    found = find_series(work, "/runs/*")
    assert sorted(p.status for p in found) == ["done", "done", "open", "unreadable"]
    assert results_in_files(paths) is None


def test_checkpoints_of_one_step_have_curves_with_both():
    """Two trainings in one glob: neither hides the other."""
    series = make_series([point(10, 0.2), point(10, 0.4, checkpoint="/runs/b/step-10", evaluation_id="x-1")])
    assert [p.label for p in series.curves[0].points] == ["a/10", "b/10"]
    assert [p.value for p in series.curves[0].points] == [0.2, 0.4]


def test_csv_and_json_have_every_fact_of_a_score():
    """A line per checkpoint and score, readable by name; a running checkpoint has a line with empty scores. `differs` stands at
    the first point of other requests. The printed JSON is the record itself.
    """

    def of(step, value, key):
        made = results(value, versions={"add": 2.0}, **{"n-shot": {"add": 5}})
        made["evalspan"] = {"keys": {"add": {"asks": key, "score": "s"}}}
        return point(step, value, scores=scores_of(made), paused_seconds=3.0)

    running = point(4, 0, status="open", scores=())
    series = make_series([of(1, 0.9, "a"), of(2, 0.1, "b"), of(3, 0.05, "b"), running], 2.0)
    rows = list(csv.DictReader(io.StringIO("".join(to_csv(series)))))
    names = ("step", "task", "value", "differs", "version", "n_shot", "higher_is_better")
    assert [tuple(r[name] for name in names) for r in rows if r["task"] != "pages"] == [
        ("1", "add", "0.9", "", "2.0", "5", "1"),
        ("2", "add", "0.1", "requests", "2.0", "5", "1"),
        ("3", "add", "0.05", "", "2.0", "5", "1"),
        ("4", "", "", "", "", "", ""),
    ]
    assert [r["paused_seconds"] for r in rows] == ["3.0"] * 6 + ["0.0"]
    made = json.loads("".join(to_json(series)))
    assert [point["step"] for point in made["points"]] == [1, 2, 3, 4]
    curve = series.curves[0]
    assert made["curves"][0]["points"] == [p._asdict() for p in curve.points]
    assert made["curves"][0]["name"] == curve.name


def test_a_copied_checkpoint_is_in_the_series_of_both_trainings(tmp_path):
    """Under its own folder in each; a copy of an older work folder's evaluation, without that file, is in one."""
    paths = leave(tmp_path, 10, 0.2, parent="/runs/a")
    leave(tmp_path, 20, 0.3, parent="/runs/b")
    assert [p.step for p in find_series(tmp_path, "/runs/b")] == [20]
    for _ in range(2):
        places.record_place(paths, "/runs/a/step-10", "/runs/b/step-10")
        places.record_place(paths, "/runs/a/step-10", "/runs/a/step-10")
    assert places.read_places(paths) == ("/runs/b/step-10",)
    found = make_series(find_series(tmp_path, "/runs/b")).points
    assert [p.checkpoint for p in found] == ["/runs/b/step-10", "/runs/b/step-20"]
    assert [p.checkpoint for p in find_series(tmp_path, "/runs/a")] == ["/runs/a/step-10"]


@given(
    chosen=st.lists(
        st.tuples(
            st.sampled_from([None, 100, 200]),
            st.sampled_from(["/runs/a", "/runs/b/", "/c"]),
            st.sampled_from(["mini", "core"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_heading_names_one_evaluation(chosen):
    """By step and name; the training, the suite or the digest are added where two would be alike."""
    points = [
        point(step, 0.5, checkpoint=f"{parent}/step-{step}", suite=suite, evaluation_id=f"x-{i:08x}")
        for i, (step, parent, suite) in enumerate(chosen)
    ]
    heads = heads_of(points)
    assert len(set(heads)) == len(heads) == len(points)
    for head, one in zip(heads, points, strict=True):
        assert str(one.step if one.step is not None else "step-None") in head
    if len({step for step, _, _ in chosen}) == len(points) and all(step for step, _, _ in chosen):
        assert heads == [f"step {step}" for step, _, _ in chosen]


# --- modes; `eval --check-fast` counts what differs between two samples of one document --------------------------------


def fast(work, step, value):
    """An evaluation that ended in fast mode."""
    paths = leave(work, step, value)
    held = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    suite = held.suite.model_copy(update={"mode": "fast", "token_budget": 8192})
    paths.evaluation.write_text(held.model_copy(update={"suite": suite}).model_dump_json())
    paths.results.write_text(json.dumps(results(value, evalspan={"mode": "fast"})))


def test_a_series_refuses_to_mix_modes_unless_it_is_asked_to(tmp_path):
    """`report`, `export` and the API alike; mixed, the curve breaks where the mode changes."""
    leave(tmp_path, 10, 0.9)
    fast(tmp_path, 20, 0.1)
    with pytest.raises(OperatorError, match=r"1 in mode exact and 1 in mode fast.*--mixed"):
        find_series(tmp_path, "/runs/a")
    command = ["--series", "/runs/a", "--work-dir", str(tmp_path)]
    for words in (["report", *command, "--csv"], ["export", *command, "--to", "csv"]):
        assert "--mixed" in str(typed(*words, code=1).exception)
        assert ",mode," in typed(*words, "--mixed").stdout
    (curve, _) = make_series(find_series(tmp_path, "/runs/a", mixed=True)).curves
    assert [p.differs for p in curve.points] == ["", "mode"]
    fast(tmp_path, 30, 0.1)
    assert [p.mode for p in find_series(tmp_path, "/runs/a/step-[23]0")] == ["fast", "fast"]


def test_both_modes_of_one_checkpoint_stay_where_they_are_mixed():
    """The later evaluation does not stand for the one in the other mode; a tracker has a curve for each."""
    series = make_series([point(10, 0.2), point(10, 0.3, mode="fast", evaluation_id="x")])
    assert (len(series.points), series.superseded) == (2, 0)
    assert [p.label for p in series.curves[0].points] == ["10 exact", "10 fast"]
    exact, quick = ({name.partition("/")[0] for name in values_of(p)} for p in series.points)
    assert ("mini" in exact, "mini-fast" in quick, "mini" in quick) == (True, True, False)


def test_a_report_names_the_mode_the_budget_and_what_is_not_the_suite_s(tmp_path):
    suite = {"mode": "fast", "token_budget": 8192}
    world = World(1, Faults(too_large=1.0), record(3, suite=suite))
    world.fits = 4096
    world.run_to_scores()
    report = make_report(world.state, world.journal, (), world.now)
    assert (report.mode, report.token_budget) == ("fast", 8192)
    assert report.cuts == {"t0": "fast-4096-8", "t2": "fast-4096-8"}  # the other one generates
    assert mode_lines(report) == [
        "mode fast, 8192 tokens a forward pass: not to be compared with scores in mode exact",
        "batch size 8 and token budget 4096: t0, t2",
    ]
    plain = World(1, Faults())
    plain.run_to_scores()
    report = make_report(plain.state, plain.journal, (), plain.now)
    assert (report.mode, report.token_budget, report.cuts, mode_lines(report)) == ("exact", None, {}, [])


LIKELIHOODS = st.lists(st.floats(-100, 0), min_size=2, max_size=5)


def sample(document, values, acc=1.0):
    """As lm-eval writes it: numbers as text."""
    resps = [[[str(value), "False"]] for value in values]
    return {"doc_id": document, "resps": resps, "metrics": ["acc"], "acc": acc}


@given(st.lists(st.tuples(LIKELIHOODS, st.floats(-1, 1)), min_size=1, max_size=8))
def test_differences_are_those_of_each_request(documents):
    """A shift of all choices alike shows in worst and mean, and changes no argmax."""
    pairs = [
        (sample(n, values), sample(n, [v + shift for v in values]))
        for n, (values, shift) in enumerate(documents)
    ]
    made = task_check("t", "multiple_choice", pairs)
    assert made.documents == len(documents)
    assert made.worst == pytest.approx(max(abs(shift) for _, shift in documents), abs=1e-9)
    assert made.mean <= (made.worst or 0.0)
    assert made.metrics == 0
    assert made.answers is None


def test_flips_are_documents_by_what_the_task_has():
    """A metric may flip without an argmax; rolling likelihoods have no argmax, and generation has answers alone."""

    def texts(*answers):
        return [{"doc_id": n, "resps": [[text]]} for n, text in enumerate(answers)]

    before = [sample(n, [-1.0, -2.0]) for n in range(3)]
    after = [sample(0, [-2.0, -1.0], acc=0.0), sample(1, [-1.0, -2.0], acc=0.5), sample(2, [-1.25, -2.0])]
    for kind, exact, fast, found in (
        ("multiple_choice", before, after, (3, 1.0, 1, 2, None)),
        ("loglikelihood_rolling", texts("-10.5"), texts("-10.0"), (1, 0.5, None, 0, None)),
        ("generate_until", texts("42", "42", "42"), texts("4", "2", "42"), (3, None, None, 0, 2)),
    ):
        made = task_check("t", kind, list(zip(exact, fast, strict=True)))
        assert (made.documents, made.worst, made.argmax, made.metrics, made.answers) == found


def test_a_score_that_is_not_finite_is_null_in_json_and_nan_where_it_is_read():
    """Strict JSON has no NaN; a metric of a task may still be 0/0."""
    results = {
        "results": {"t": {"alias": "t", "brier,none": math.nan, "acc,none": 0.5, "rows": [math.inf, (1,)]}}
    }
    text = json.dumps(replace_non_finite(results), allow_nan=False)
    assert json.loads(text)["results"]["t"] == {
        "alias": "t",
        "brier,none": None,
        "acc,none": 0.5,
        "rows": [None, [1]],
    }
    brier, acc = scores_of(json.loads(text))
    assert math.isnan(brier.value)
    assert acc.value == 0.5
