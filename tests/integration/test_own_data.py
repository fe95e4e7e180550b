"""A suite of one's own with local data: lm-eval's own scores from any folder, here and on a real Slurm as an ordinary user."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.exactness.pipeline import Case, lm_eval_run

pytestmark = pytest.mark.model

DOCS = Path(__file__).parents[2] / "docs" / "evaluating" / "own-tasks.md"
EXAMPLE = re.compile(r"""^```\w+ title="mine/([\w./]+)"\n(.*?)^```$""", re.MULTILINE | re.DOTALL)
TASK, BATCH_SIZE = "capitals", 4


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """The example of docs/evaluating/own-tasks.md, in a folder with a space and an umlaut."""
    folder = tmp_path / "meine Süite"
    files = dict(EXAMPLE.findall(DOCS.read_text()))
    assert files.keys() >= {"mine.toml", "tasks/capitals.yaml", "tasks/prompts.py", "tasks/data/test.jsonl"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "mine.toml"


@pytest.fixture
def own(suite: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """lm-eval's own results, from the folder in which its rule finds the data."""
    monkeypatch.chdir(suite.parent / "tasks")
    case = Case(task=TASK, include_path=str(suite.parent / "tasks"))
    return dict(lm_eval_run(toy_model, case, BATCH_SIZE).results["results"])


def evaluated(site: Any, suite: str, folder: Path, work: Path) -> dict[str, Any]:
    command = site.argv(
        ["eval", str(site.model), "--suite", suite, "--json", *site.options, "--work-dir", str(work)]
    )
    done = subprocess.run(
        command, cwd=folder, env=site.env, capture_output=True, text=True, timeout=400, check=False
    )
    logs = "\n".join(f"== {p}\n{p.read_text()[-1500:]}" for p in work.glob("*/logs/*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    return dict(json.loads(done.stdout)["results"])


def test_scores_are_the_same_from_another_folder(local_site: Any, suite: Path, own: dict[str, Any]) -> None:
    """Another folder's data of the same name are not read."""
    decoy = local_site.folder / "elsewhere" / "data"
    decoy.mkdir(parents=True)
    (decoy / "test.jsonl").write_text('{"question": "no", "choices": ["a", "b", "c"], "answer": 0}\n')
    work = local_site.folder / "Läufe 7b"
    assert evaluated(local_site, "../meine Süite/mine.toml", decoy.parent, work) == own


def test_slurm_scores_are_the_same_as_an_ordinary_user(
    slurm_site: Any, suite: Path, own: dict[str, Any]
) -> None:
    """The suite lies in the user's folder, the command is typed elsewhere, and jobs start in the work folder."""
    site, cluster = slurm_site, slurm_site.cluster
    place = site.folder / suite.parent.name
    for file in [p for p in suite.parent.rglob("*") if p.is_file() and p.suffix != ".pyc"]:
        target = place / file.relative_to(suite.parent)
        cluster.run_as_user(["mkdir", "-p", str(target.parent)], check=True)
        cluster.run_as_user(["tee", str(target)], input=file.read_text(), check=True)
    assert evaluated(site, str(place / "mine.toml"), Path("/"), site.work) == own
