"""Scores of different modes are never silently on one curve or without their mode; `eval --check-fast` counts what differs
between two samples of one document, with all digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave, point, results
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.learning_curves import make_series
from coordinator.report.load_series import find_series
from coordinator.report.measurements import make_report
from coordinator.report.mode_check import task_check
from coordinator.report.render import mode_lines
from coordinator.trackers import values_of


def fast(work: Path, step: int, value: float) -> None:
    """An evaluation that ended in fast mode."""
    paths = leave(work, step, value)
    held = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    suite = held.suite.model_copy(update={"mode": "fast", "token_budget": 8192})
    paths.evaluation.write_text(held.model_copy(update={"suite": suite}).model_dump_json())
    paths.results.write_text(json.dumps(results(value, evalspan={"mode": "fast"})))


def test_a_series_refuses_to_mix_modes_unless_it_is_asked_to(tmp_path: Path) -> None:
    """`report`, `export` and the API alike; mixed, the curve breaks where the mode changes and flags no regression there."""
    leave(tmp_path, 10, 0.9)
    fast(tmp_path, 20, 0.1)
    with pytest.raises(OperatorError, match=r"1 in mode exact and 1 in mode fast.*--mixed"):
        find_series(tmp_path, "/runs/a")
    command = ["--series", "/runs/a", "--work-dir", str(tmp_path)]
    for words in (["report", *command, "--csv"], ["export", *command, "--to", "csv"]):
        assert "--mixed" in str(CliRunner().invoke(app, words).exception)
        told = CliRunner().invoke(app, [*words, "--mixed"])
        assert told.exit_code == 0, told.output
        assert ",mode," in told.stdout
    (curve, _) = make_series(find_series(tmp_path, "/runs/a", mixed=True)).curves
    assert [(p.differs, p.regressed) for p in curve.points] == [("", False), ("mode", False)]
    fast(tmp_path, 30, 0.1)
    assert [p.mode for p in find_series(tmp_path, "/runs/a/step-[23]0")] == ["fast", "fast"]


def test_both_modes_of_one_checkpoint_stay_where_they_are_mixed() -> None:
    """The later evaluation does not stand for the one in the other mode."""
    series = make_series([point(10, 0.2), point(10, 0.3, mode="fast", evaluation_id="x")])
    assert (len(series.points), series.superseded) == (2, 0)
    assert [p.label for p in series.curves[0].points] == ["10 exact", "10 fast"]


def test_a_tracker_has_a_curve_for_each_mode() -> None:
    exact, quick = values_of(point(10, 0.2)), values_of(point(10, 0.2, mode="fast"))
    assert {"mini/add/exact_match"} <= exact.keys()
    assert {"mini-fast/add/exact_match"} <= quick.keys()
    assert not any(name.startswith("mini/") for name in quick)


def test_a_report_names_the_mode_the_budget_and_what_is_not_the_suite_s(tmp_path: Path) -> None:
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


def sample(document: int, values: list[float], acc: float = 1.0) -> dict[str, Any]:
    """As lm-eval writes it: numbers as text."""
    resps = [[[str(value), "False"]] for value in values]
    return {"doc_id": document, "resps": resps, "metrics": ["acc"], "acc": acc}


@given(st.lists(st.tuples(LIKELIHOODS, st.floats(-1, 1)), min_size=1, max_size=8))
def test_differences_are_those_of_each_request(documents: list[tuple[list[float], float]]) -> None:
    """A shift of all choices alike shows in worst and mean, and changes no argmax."""
    pairs = [
        (sample(n, values), sample(n, [v + shift for v in values]))
        for n, (values, shift) in enumerate(documents)
    ]
    made = task_check("t", "multiple_choice", pairs)
    assert made.documents == len(documents)
    assert made.worst == pytest.approx(max(abs(shift) for _, shift in documents), abs=1e-9)
    assert made.mean is not None
    assert made.mean <= (made.worst or 0.0)
    assert made.metrics == 0
    assert made.answers is None


def test_flips_are_documents_by_what_the_task_has() -> None:
    """A metric may flip without an argmax; rolling likelihoods have no argmax, and generation has answers alone."""

    def texts(*answers: str) -> list[dict[str, Any]]:
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
