"""Attacks of a suite file, or of tasks beside it, in a folder that others write to.

Who names such a file in a command or in the settings runs its code, by design: a notice cannot (tests/intake/test_admission.py).
Here: what the file may not do besides, to those who only look at it, and to other folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.trainings import leave, results
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.errors import OperatorError
from coordinator.evaluation.records import id_stem
from coordinator.intake import pending
from coordinator.intake.inbox import Refused
from coordinator.intake.suites import load_suite
from coordinator.report.measurements import Report
from coordinator.trackers import lm_eval_files
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug
from evaljobs.contract.storage import write_record

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x9b31m\x08\r"
PATHS = ["../../../evil", "/tmp/evil", "a/../../evil", "..", "evaluation.json", "journal.jsonl"]


def toml(folder: Path, suite: str, task: str) -> Path:
    file = folder / "suite.toml"
    file.write_text(f"name = {json.dumps(suite)}\n[[task]]\nname = {json.dumps(task)}\n")
    return file


def commands(text: str) -> list[str]:
    """The control characters in what a terminal is sent, but for line ends and tabs."""
    return [c for c in text if c not in "\n\t" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0)]


@pytest.mark.parametrize(
    ("suite", "task"), [(f"x{ESCAPES}", "t"), ("x", f"t{ESCAPES}"), ("x\n", "t"), ("x" * 10**6, "t")]
)
def test_a_name_that_commands_a_terminal_is_no_suites_and_no_tasks(
    suite: str, task: str, tmp_path: Path
) -> None:
    with pytest.raises(OperatorError) as refused:
        load_suite(toml(tmp_path, suite, task))
    assert not commands(str(refused.value))
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize("name", PATHS)
def test_no_name_of_a_suite_or_task_leads_out_of_its_evaluations_folder(name: str, tmp_path: Path) -> None:
    """Nor onto a file that the coordinator writes: specs, outcomes, samples and scores have names of their own kind."""
    suite = load_suite(toml(tmp_path, name, name))
    stem = id_stem(name, suite.name)
    work = WorkPaths(tmp_path / "work")
    root = work.evaluation(stem).root
    assert root.parent == work.root
    assert root.name not in ("", ".", "..")
    paths = EvaluationPaths(root)
    kept = {paths.evaluation, paths.journal, paths.results, paths.report, paths.status, paths.request_sets}
    for made in (paths.spec(name), paths.log(name), paths.outcome("failed", name), paths.response_file(name)):
        assert made.resolve().parent.parent == root
        assert made not in kept


@pytest.mark.parametrize("task", ["../../../evil", "/evil", "a/../../../../evil", "..", "x\0y"])
def test_an_export_writes_below_its_folder_alone(task: str, tmp_path: Path) -> None:
    """Samples are written under their tasks' names, as lm_eval does it: a name may be a path."""
    paths = leave(tmp_path / "work", 10, 0.5)
    found = results(0.5) | {"configs": {task: {"task": task}}}
    paths.results.write_text(json.dumps(found))
    paths.samples.mkdir(exist_ok=True)
    (paths.samples / f"samples_{slug(task)}_000.jsonl").write_text(
        json.dumps({"doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}) + "\n"
    )
    before = set(tmp_path.rglob("*"))
    written = lm_eval_files.write(paths.root, tmp_path / "out" / "a" / "b")
    made = {p for p in tmp_path.rglob("*") if p.is_file()} - before
    assert made == set(written)
    assert len(written) == 2
    assert all(p.resolve().is_relative_to((tmp_path / "out" / "a" / "b").resolve()) for p in written)


@pytest.mark.parametrize("kind", ["giant", "pipe", "device", "folder", "deep", "not text"])
def test_a_suite_file_that_is_none_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    """In little memory, and without waiting for a writer."""
    file = tmp_path / "suite.toml"
    match kind:
        case "giant":
            file.touch()
            os.truncate(file, 1 << 40)
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "deep":
            file.write_text("name = " + "[" * 100_000)
        case _:
            file.write_bytes(b"name = \xff\xfe\x00")
    with pytest.raises(OperatorError) as refused:
        load_suite(file)
    assert "\n" not in str(refused.value)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(11)
)
YAMLS = {
    "a bomb of aliases": f"task: evil\n{BOMB}",
    "a circle of includes": "include: evil.yaml\ntask: evil\n",
    "an alias of itself": "task: evil\nmetadata: &m\n  again: *m\n",
    "python's own tags": "task: evil\nx: !!python/object/apply:os.system ['touch ran']\n",
    "a deep list": "task: evil\nx: " + "[" * 20_000 + "\n",
    "a name with escapes": 'task: "evil\\e[2J\\e[1A"\ndataset_path: json\n',
    "a list of names": "task: [evil, evil]\n",
    "a number": "5\n",
}

LOOK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from evaljobs.lmeval import source_files, task_index
from evaljobs.contract.paths import WorkPaths
from evaljobs.errors import OperatorError
try:
    print(source_files.files_of((sys.argv[1],), "evil", lambda name: None))
except OperatorError as error:
    print(error)
"""


@pytest.mark.parametrize("what", YAMLS)
def test_no_yaml_beside_a_suite_takes_the_memory_or_the_time_of_who_looks_at_it(
    what: str, tmp_path: Path
) -> None:
    """The coordinator looks at all YAMLs of a suite's folders for each submission, and runs nothing of them."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "evil.yaml").write_text(YAMLS[what])
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tasks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "ran").exists()


def test_nothing_that_others_wrote_commands_the_terminal_that_shows_it(
    tmp_path: Path, own_settings: None
) -> None:
    """What stands in records already: of checkpoints, suites, errors of jobs, reasons; by `status`, `report` and `logs`."""
    work = WorkPaths(tmp_path / "work")
    work.root.mkdir(mode=0o700)
    paths = leave(work.root, 10, 0.5, parent=f"/runs/{ESCAPES}")
    report = Report.model_validate_json(paths.report.read_bytes())
    worded = report.model_copy(
        update={"warnings": (f"warns {ESCAPES}",), "errors": {f"task{ESCAPES}": f"fails {ESCAPES}"}}
    )
    write_record(paths.report, worded)
    found = results(0.5)
    found["results"] = {f"{name}{ESCAPES}": value for name, value in found["results"].items()}
    paths.results.write_text(json.dumps(found))
    entry = Refused(checkpoint=f"/c{ESCAPES}", suite=f"s{ESCAPES}", at=2e9, why=f"why {ESCAPES}")
    waits = pending.Waiting(checkpoint=f"/w{ESCAPES}", suite="s", since=1.0, why=ESCAPES)
    write_record(work.pending, pending.Checkpoints(waiting=(waits,)))
    write_record(work.inbox / "refused" / "1.reason", entry)
    for arguments in (["status"], ["report", "--series", f"/runs/{ESCAPES}"]):
        done = CliRunner().invoke(app, arguments)
        assert done.stdout
        assert not commands(done.stdout), arguments
