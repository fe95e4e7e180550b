"""What is written at an evaluation's end, whatever is gone by then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.simulated.parts import Faults
from support.simulated.world import World

from coordinator.evaluation.state import Phase
from coordinator.report.load_series import point_of
from coordinator.runtime import finalize
from coordinator.runtime.journal import Journal
from evaljobs.contract.paths import EvaluationPaths


@pytest.fixture
def ended(tmp_path: Path) -> tuple[World, EvaluationPaths]:
    """An evaluation that has run, its journal and score files on disk, its request sets and responses nowhere."""
    world = World(3, Faults())
    world.run()
    paths = EvaluationPaths(tmp_path / "id")
    paths.scores.mkdir(parents=True)
    Journal(paths.journal).append(world.journal)
    for entry in world.state.entries:
        entry.result_file = str(paths.scores / f"{entry.index}.json")
        Path(entry.result_file).write_text(json.dumps({"results": {entry.name: {"acc,none": 0.5}}}))
    return world, paths


def test_scores_are_written_whatever_report_and_priors_find(
    ended: tuple[World, EvaluationPaths], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Request sets gone, observations that cannot be written, a journal that cannot be read: each a warning, and the scores."""
    world, paths = ended
    names = {e.name for e in world.state.entries}
    paths.responses.mkdir()
    for file in {s.frame.file for s in world.state.shards.by_name.values() if s.frame is not None}:
        (paths.responses / file).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    finalize.write_results(world.state, paths, {}, tmp_path / "folder")
    assert json.loads(paths.results.read_text())["results"].keys() == names
    paths.results.unlink()
    paths.journal.write_text('{"kind": "of-another-version"}\n')
    finalize.write_results(world.state, paths, {}, tmp_path / "observations.jsonl")
    assert json.loads(paths.results.read_text())["results"].keys() == names
    assert "there is no new report" in caplog.text


def test_an_evaluation_without_a_report_has_its_scores_and_no_costs(
    ended: tuple[World, EvaluationPaths], tmp_path: Path
) -> None:
    """As a value, in a series, and with the status of its end; a report of before a retry counts no more."""
    world, paths = ended
    paths.report.write_text("{}")
    paths.journal.write_text('{"kind": "of-another-version"}\n')
    finalize.write_results(world.state, paths, {}, tmp_path / "observations.jsonl")
    found = finalize.results_of(world.state, paths)
    costs = (found.makespan_seconds, found.paused_seconds, found.gpu_seconds)
    assert (found.status, len(found.scores), costs) == ("done", len(world.state.entries), (None, None, None))
    assert "times and costs are not known: JournalError: " in found.report.warnings[-1]
    point = point_of(paths, world.state.record)
    assert (point.status, point.scores, point.makespan_seconds) == ("done", found.scores, None)


def test_during_a_retry_results_are_those_of_now(
    ended: tuple[World, EvaluationPaths], tmp_path: Path
) -> None:
    """Not the scores and failures of the end before it, whose results.json stays until the next end."""
    world, paths = ended
    again, *others = world.state.entries
    again.status, again.error = "failed", "no such thing"
    finalize.write_results(world.state, paths, {}, tmp_path / "observations.jsonl")
    assert finalize.results_of(world.state, paths).failed == {again.name: "no such thing"}
    again.status, again.error = "built", ""
    world.state.ending.phase, world.state.ending.ended_at = Phase.RUNNING, None
    found = finalize.results_of(world.state, paths, world.journal)
    assert (found.status, found.failed) == ("stopped", {}), "no process holds its work folder"
    assert {s.task for s in found.scores} == {e.name for e in others}


def test_what_the_priors_cannot_read_is_a_warning(
    ended: tuple[World, EvaluationPaths], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards are known by their times, and the request sets that they were of have been removed."""
    world, paths = ended
    report = finalize.try_report(world.state, paths)
    assert report is not None
    spans = [
        finalize.ShardSpan(shard=name, trial="t", started_at=1.0, seconds=1.0)
        for name in world.state.shards.by_name
    ]
    finalize.teach(world.state, report.model_copy(update={"shards": tuple(spans)}), tmp_path / "o.jsonl")
    assert "the priors learn nothing of it: the request set of" in caplog.text


def test_a_score_file_that_is_gone_costs_its_entry_alone(ended: tuple[World, EvaluationPaths]) -> None:
    """It is named as failed, with the reason; the others have their scores."""
    world, _ = ended
    gone, *others = world.state.entries
    Path(gone.result_file).unlink()
    results = finalize.merged_results(world.state)
    assert results["results"].keys() == {e.name for e in others}
    assert "cannot be read (any more)" in results["failed"][gone.name]


def test_results_name_the_batch_size_of_the_inference(ended: tuple[World, EvaluationPaths]) -> None:
    """Tasks are scored by a model without batches; lm-eval's own key says what the trials used."""
    world, _ = ended
    for entry in world.state.entries:
        config = {"model": "hf", "batch_size": None, "limit": 4}
        Path(entry.result_file).write_text(json.dumps({"results": {entry.name: {}}, "config": config}))
    results = finalize.merged_results(world.state)
    assert results["config"] == {"model": "hf", "batch_size": world.state.batch_size, "limit": 4}
