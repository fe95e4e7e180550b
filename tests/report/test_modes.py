"""Scores of different modes are never silently on one curve, in one comparison, or without their mode."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave, point, results
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.comparisons import comparison, show_comparison
from coordinator.report.learning_curves import make_series
from coordinator.report.load_series import find_series
from coordinator.report.measurements import make_report
from coordinator.report.render import mode_lines
from coordinator.trackers import values_of


def in_mode(mode: str, value: float) -> dict[str, object]:
    return results(value, evalspan={"mode": mode})


def fast(work: Path, step: int, value: float) -> None:
    """An evaluation that ended in fast mode."""
    paths = leave(work, step, value)
    held = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    suite = held.suite.model_copy(update={"mode": "fast", "token_budget": 8192})
    paths.evaluation.write_text(held.model_copy(update={"suite": suite}).model_dump_json())
    paths.results.write_text(json.dumps(in_mode("fast", value)))


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


def test_a_comparison_of_modes_warns_and_marks_no_drop() -> None:
    """Results of versions without modes are exact."""
    rows = comparison([results(0.9), in_mode("exact", 0.8), in_mode("fast", 0.1)])
    assert rows[0]["differs"] == ["", "", "mode"]
    assert not rows[0]["regressed"]
    out = io.StringIO()
    show_comparison(Console(file=out, width=120), ["a", "b", "c"], ["a", "b", "c"], rows)
    assert "~ c is not comparable with a: computed in another mode: add, pages" in out.getvalue()


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
