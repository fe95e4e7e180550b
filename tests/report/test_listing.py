"""Laws of the listing of evaluations: it fits, its ids can be copied, and what went wrong is in it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.standing import failed_jobs, show_pending, show_status
from coordinator.intake import pending
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths

ID = "step-1000-of-a-training-with-a-long-name-core-1a2b3c4d"


def row(**more: Any) -> dict[str, Any]:
    known = {
        "evaluation_id": ID, "stage": "building requests", "shards_done": 3, "shards": 17, "trials": 2, "scored": 1,
        "entries": 4, "age_seconds": 75.0, "stragglers": {}, "waits_seconds": None, "errors": {}, "nodes_aside": {}, "held_jobs": {}, "failed_jobs": {}, "trackers": {}, "fault": None,
    }  # fmt: skip
    return {**known, **more}


def drawn(width: int, *rows: dict[str, Any], terminal: bool = False) -> str:
    out = io.StringIO()
    show_status(Console(file=out, width=width, force_terminal=terminal, color_system=None), rows)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_ids_and_figures_are_whole_at_any_width(width):
    """No id is cut or folded; nothing but ids and messages is wider than the terminal."""
    text = drawn(width, row(), row(evaluation_id="b-core-00000000", trials=0, shards=0))
    words = text.split()
    for part in (ID, "b-core-00000000", "3/17", "1/4", "building"):
        assert any(part in word for word in words), (part, text)
    for line in text.splitlines():
        assert len(line) <= width or line.strip() == ID, line


def test_what_went_wrong_is_below_with_its_name():
    """A task, a node, a trial and a tracker, each in a line of its own, also in brackets that rich would eat."""
    text = drawn(
        80,
        row(
            errors={"hellaswag": "no data [set]"},
            nodes_aside={"n1": "three trials died"},
            waits_seconds=61.0,
            held_jobs={"es-1-build-a0": "a limit on jobs keeps it out (MaxSubmitJobs)"},
            stragglers={"es-1-trial-n2-a0.3": "takes 3.1 times as long as the others"},
            failed_jobs={"es-1-trial-n1-a0": "CUDA out of memory"},
            trackers={"wandb": "no answer"},
        ),
    )
    for line in (
        f"{ID}: hellaswag: no data [set]",
        f"{ID}: n1: three trials died",
        f"{ID}: all nodes are in back-off: it waits for 61.0 s more",
        f"{ID}: es-1-build-a0: a limit on jobs keeps it out (MaxSubmitJobs)",
        f"{ID}: es-1-trial-n2-a0.3 takes 3.1 times as long as the others",
        f"{ID}: es-1-trial-n1-a0: CUDA out of memory",
        f"{ID}: not in wandb: no answer (`evalspan export --left` tries again)",
    ):
        assert line in text.splitlines(), text


def test_failed_jobs_are_read_from_their_outcomes(tmp_path: Path):
    """Each with its line; another version's file is passed over; no folder is no failure."""
    paths = EvaluationPaths(tmp_path)
    assert failed_jobs(paths) == {}
    paths.outcomes.mkdir()
    told = Failed(name="es-1-trial-n1-a0.0", job="trial", blame="retry", error="CUDA out of memory")
    paths.outcome("failed", told.name).write_text(told.model_dump_json())
    (paths.outcomes / "other.failed.json").write_text(json.dumps({"kind": "unheard-of"}))
    assert failed_jobs(paths) == {told.name: "CUDA out of memory"}


def test_what_waits_at_the_gate_and_what_was_refused_is_told_with_its_reason():
    """In a line each, names in brackets that rich would eat included."""
    shown = pending.PendingFile(
        waiting=(
            pending.Waiting(checkpoint="/run/[step]-1", suite="core", since=100.0, why="no config.json"),
        ),
        refused=(pending.Refused(checkpoint="/run/step-2", suite="croe", at=40.0, why="no suite"),),
    )
    out = io.StringIO()
    show_pending(Console(file=out, width=40), shown, 160.0)
    assert out.getvalue().splitlines() == [
        "/run/[step]-1 (suite core): waits, 60.0 s by now: no config.json",
        "/run/step-2 (suite croe): refused 2:00 min ago: no suite",
    ]
