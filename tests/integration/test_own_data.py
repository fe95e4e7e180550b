"""A suite of one's own with local data: lm-eval's own scores from any folder, here and on a real Slurm as an ordinary user."""

from __future__ import annotations

import json
import re
import shutil
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


@pytest.mark.parametrize(
    ("place", "named"),
    [("elsewhere", "../meine Süite/mine.toml"), ("meine Süite", "./mine.toml")],
)
def test_scores_are_the_same_from_any_folder(
    local_site: Any, suite: Path, own: dict[str, Any], place: str, named: str
) -> None:
    """Typed in another folder and in the suite's own; another folder's data of the same name are not read."""
    decoy = local_site.folder / "elsewhere" / "data"
    decoy.mkdir(parents=True)
    (decoy / "test.jsonl").write_text('{"question": "no", "choices": ["a", "b", "c"], "answer": 0}\n')
    local_site.work = local_site.folder / "Läufe 7b"
    assert evaluated(local_site, named, local_site.folder / place, local_site.work) == own


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


@pytest.mark.parametrize("command", ["eval", "submit"])
def test_nothing_is_staged_for_data_that_are_not_there(command: str, local_site: Any, suite: Path) -> None:
    """Missing files by their full path, a data set that was not fetched by the command that fetches it; exit code 2."""
    site = local_site
    arguments = [command, str(site.model), "--suite", str(suite)]
    task = suite.parent / "tasks" / f"{TASK}.yaml"
    shutil.rmtree(suite.parent / "tasks" / "data")
    done = site.run(site.command(*arguments))
    assert done.returncode == 2, done.stderr
    said = done.stderr.replace("\n", "")
    assert str(task) in said
    assert "data_files" in said
    assert str(suite.parent / "tasks" / "data" / "test.jsonl") in said
    task.write_text(task.read_text().replace("dataset_path: json", "dataset_path: lab/rows"))
    done = site.run(site.command(*arguments))
    assert done.returncode == 2, done.stderr
    said = done.stderr.replace("\n", "")
    assert "lab/rows" in said
    prepare = f"evalspan prepare --suite '{suite}' --work-dir {site.work} --tokenizer {site.model}"
    assert prepare in said
    assert not list(site.work.glob("*/journal.jsonl"))
    assert not (site.work / "inbox").exists()
