"""Commands and later evaluations on one whose files are archived: they find what they found before."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.toys import TASKS, config_text
from typer.testing import CliRunner

import evalspan
from coordinator.cli import app
from coordinator.config.schema import RetentionConfig
from coordinator.keeping.archive import FOLDERS, archive_ended
from coordinator.keeping.inventory import read_work_folder
from coordinator.keeping.prune import prune_now
from evaljobs.contract.folded import files_in
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

pytestmark = pytest.mark.model


def shown(settings: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, "--config", str(settings)])
    assert done.exit_code == 0, done.output
    return done.output


def exported(settings: Path, name: str, out: Path) -> dict[str, bytes]:
    shown(settings, "export", name, "--to", "lm-eval", "--out", str(out))
    return {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*.json*")}


def test_what_reads_an_evaluation_finds_the_same_once_it_is_archived(
    toy_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Results, report, logs and lm-eval's files; and an evaluation of more tasks uses its responses and scores again.
    Pruned to its scores, it has the same results and report.
    """
    settings = tmp_path / "evalspan.toml"
    settings.write_text(f'work_dir = "work"\n{config_text()}')
    more = {"include_path": TASKS, "batch_size": 8, "limit": 8, "config": settings}
    first = evalspan.evaluate(toy_model, tasks="toy_choice,toy_programs", **more)
    name, paths = first.evaluation_id, EvaluationPaths(first.folder)

    def views() -> list[object]:
        found = evalspan.results(name, config=settings)
        report = json.loads(shown(settings, "report", name, "--json"))
        return [found.raw, found.rows(), found.report, report]

    before, files = views(), exported(settings, name, tmp_path / "before")
    logs = shown(settings, "logs", name)
    assert any("samples_toy_choice" in file for file in files)
    assert archive_ended(paths, most=0)
    assert not any((paths.root / name).exists() for name in FOLDERS)
    assert views() == before
    assert exported(settings, name, tmp_path / "after") == files
    assert shown(settings, "logs", name) == logs
    log = next(line.partition(":")[0] for line in logs.splitlines() if "trial" in line)
    assert f"/{log}" in shown(settings, "logs", name, log.removesuffix(".log"))
    second = evalspan.evaluate(toy_model, tasks="toy_choice,toy_programs,toy_pages", **more)
    assert second.complete
    used = second.raw["evalspan"]["responses_from"]
    assert used == {"toy_choice": name, "toy_programs": name}
    assert {k: v for k, v in second.raw["results"].items() if k in used} == first.raw["results"]
    there = [json.loads(line) for line in (second.folder / "journal.jsonl").read_text().splitlines()]
    (found,) = [event for event in there if event["kind"] == "responses-found"]
    assert len(found["scores"]) == 2, "neither is scored again"
    assert json.loads(
        next((second.folder / "samples").glob("samples_toy_choice*")).read_text().splitlines()[0]
    )
    work = WorkPaths(first.folder.parent)
    sets = {evaluation.evaluation_id: evaluation.sets for evaluation in read_work_folder(work).evaluations}
    assert sets[name] < sets[second.evaluation_id] == {folder.name for folder in work.request_sets.iterdir()}
    prune_now(work, RetentionConfig(keep="scores", older_than="0h"), time.time(), code=None)
    assert not [*files_in(paths.responses), *files_in(paths.samples), *work.request_sets.iterdir()]
    assert views() == before
    done = CliRunner().invoke(app, ["logs", name, "--config", str(settings)])
    assert "has no logs any more" in str(done.exception)
    assert not [record for record in caplog.records if "lacks the times" in record.message]
