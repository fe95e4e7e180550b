"""Laws of `coordinator.api`: in any thread, quiet, and interruptible; a submission is waited for until its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import wait_until
from support.daemons import SUITE, daemon, small, taken
from support.toys import TASKS, config_text, suite_text
from support.trainings import leave
from typer.testing import CliRunner

import evalspan
from coordinator import api
from coordinator.cli import app
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import Accepted
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake import inbox
from coordinator.runtime.journal import Journal
from coordinator.runtime.registry import MOST_TRIES
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

COLUMNS = {
    "evaluation_id", "suite", "step", "checkpoint", "status", "task", "filter", "metric", "value", "stderr",
    "documents", "n_shot", "version", "higher_is_better", "makespan_seconds", "paused_seconds",
    "gpu_seconds", "mode",
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    return tmp_path / "evalspan.toml"


@pytest.mark.model
def test_a_script_evaluates_in_a_thread_and_prints_nothing(toy_model, settings, capfd):
    """As in a notebook: no terminal, not the main thread. The results are what files, `results` and `series` say; the
    second call runs nothing, and says so, also beside a daemon that holds the work folder. However many follow, the process holds no more descriptors.
    """
    seen: list[api.Progress] = []
    found: list[api.Results] = []

    def work() -> None:
        found.append(
            evalspan.evaluate(
                toy_model,
                tasks=["toy_choice"],
                include_path=TASKS,
                batch_size=8,
                config=settings,
                progress=seen.append,
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (made,) = found
    assert capfd.readouterr() == ("", "")
    assert (made.status, made.complete, made.failed, made.note) == ("done", True, {}, "")
    assert seen[-1].scored == seen[-1].tasks == 1
    assert seen[-1].shards_done == seen[-1].shards > 0
    raw = json.loads((made.folder / "results.json").read_text())
    assert made.raw == raw
    acc = next(s for s in made.scores if s.metric == "acc")
    assert repr(made).startswith(f"<Results {made.evaluation_id}: done; toy_choice/acc {acc.value:.4f}, ")
    assert len(repr(made)) < 200
    assert acc.value == raw["results"]["toy_choice"]["acc,none"]
    again = evalspan.evaluate(
        toy_model, tasks="toy_choice", include_path=[TASKS], batch_size="8", config=settings
    )
    assert again.evaluation_id == made.evaluation_id
    assert "from the same inputs; nothing was run" in again.note
    assert again.scores == made.scores
    daemon = WorkLock(WorkPaths(made.folder.parent).lock)
    daemon.acquire(DAEMON)
    beside = evalspan.evaluate(
        toy_model, tasks="toy_choice", include_path=[TASKS], batch_size="8", config=settings
    )
    daemon.release()
    assert (beside.note, beside.rows()) == (again.note, again.rows())
    held = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):  # as in a notebook of a day
        evalspan.evaluate(
            toy_model, tasks="toy_choice", include_path=[TASKS], batch_size="8", config=settings
        )
    assert len(list(Path("/proc/self/fd").iterdir())) == held
    by_id = evalspan.results(made.evaluation_id[:20], config=settings)
    assert by_id.rows() == made.rows() == evalspan.series(toy_model.parent, config=settings)
    assert by_id.rows()[0].keys() == COLUMNS
    assert evalspan.wait(made.evaluation_id, timeout=0, config=settings).rows() == made.rows()
    (made.folder / "results.json").write_text("{")  # damaged: the tasks' own files have the scores
    damaged = evalspan.results(made.evaluation_id, config=settings)
    assert damaged.rows() == made.rows()
    assert "results.json cannot be read" in damaged.report.warnings[-1]


INTERRUPTED = """
import json, signal, sys, threading
import evalspan
place, tasks, config, fails = sys.argv[1:]
def progress(seen):
    print("progress", flush=True)
    if fails:
        raise KeyboardInterrupt
try:
    evalspan.evaluate(place, tasks="endless", include_path=tasks, config=config, progress=progress)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    input()
"""


@pytest.mark.model
@pytest.mark.parametrize("fails", ["", "in progress"])
def test_an_interrupt_cancels_the_evaluation_and_then_raises(toy_model, settings, tmp_path, fails):
    """The process lives on, with its own handler, and neither a job nor Redis is left beside it. An error of `progress`
    cancels nothing: the same call resumes the evaluation.
    """
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    text = (TASKS / "choice.yaml").read_text().replace("rows.", "endless.").replace("toy_choice", "endless")
    (tasks / "endless.yaml").write_text(text)
    (tasks / "endless.py").write_text(
        "import time\ndef choice(**_metadata):\n    while True:\n        time.sleep(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, toy_model, tasks, settings, fails],
        env={**os.environ, "PYTHONPATH": str(Path(evalspan.__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "progress\n", process.communicate()[1]
    if not fails:
        process.send_signal(signal.SIGINT)
    lines = iter(process.stdout.readline, "")
    assert "interrupted True\n" in lines
    try:
        wait_until(lambda: descendants(process.pid) == {process.pid}, "jobs and Redis end", 20.0)
    finally:
        process.communicate("\n")
    reports = [json.loads(f.read_text()) for f in (tmp_path / "work").glob("*/report.json")]
    assert [made["status"] for made in reports] == ([] if fails else ["cancelled"])


def descendants(pid: int) -> set[int]:
    """Processes that `pid` started, at any depth, and `pid`."""
    found = {pid}
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(place.name)] = int(fields[1])
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_an_error_is_raised_before_anything_is_started(tmp_path, settings):
    """As on the command line: one line, no evaluation."""
    with pytest.raises(evalspan.OperatorError, match="no suite named 'quikstart'"):
        evalspan.evaluate(small(tmp_path / "step-1"), "quikstart", config=settings)
    with pytest.raises(evalspan.OperatorError, match=r"no argument 'limitt'; did you mean 'limit'"):
        evalspan.evaluate(small(tmp_path / "mistyped"), "quickstart", limitt=3, config=settings)
    with pytest.raises(evalspan.OperatorError, match=r"--work-dir.*is not UTF-8"):
        evalspan.evaluate(small(tmp_path / "unnamed"), "quickstart", work_dir="bad\udcff")
    with pytest.raises(evalspan.EvalspanError, match="no such folder"):
        evalspan.evaluate(tmp_path / "none", SUITE, config=settings)
    for wrong in ({"slots": 0}, {"slots": "2"}, {"shards_per_task": 0}, {"slots": True}):
        with pytest.raises(
            evalspan.OperatorError, match=f"{next(iter(wrong))}: a whole number from 1 on, not"
        ):
            evalspan.evaluate(small(tmp_path / f"of-{wrong}"), SUITE, config=settings, **wrong)
    with pytest.raises(evalspan.OperatorError, match="gen_kwargs"):
        evalspan.evaluate(small(tmp_path / "step-2"), tasks="a", gen_kwargs="x", config=settings)
    with pytest.raises(evalspan.OperatorError, match="no evaluation"):
        evalspan.results("none", config=settings)
    assert not list((tmp_path / "work").glob("*/journal.jsonl"))


@pytest.mark.usefixtures("own_settings")
def test_wait_follows_a_submission_from_the_notice_to_a_refusal_or_the_timeout(tmp_path):
    """A checkpoint that no daemon has taken yet is no error; one that the daemon refused is, or a typing error in its id."""
    place = small(tmp_path / "step-300")
    sent = evalspan.submit(place, SUITE)
    assert (sent.what, sent.daemon) == ("new", False)
    for wrong in ("step-2-quickstart-00000000", sent.evaluation_id.replace("-quick", "-quack"), "step"):
        with pytest.raises(OperatorError, match="no evaluation"):
            evalspan.wait(wrong, timeout=0)
    assert "`evalspan daemon`" in sent.waits
    for waited in (sent, sent.evaluation_id):
        with pytest.raises(TimeoutError, match="has not ended after 0 s"):
            evalspan.wait(waited, timeout=0)
    ears = daemon(tmp_path / "work", Config())
    ears.tick()
    assert taken(ears) == ["step-300"]
    with pytest.raises(TimeoutError):
        evalspan.wait(sent, timeout=0)
    assert evalspan.submit(place, SUITE).what == "known"
    file = inbox.leave(WorkPaths(tmp_path / "work"), inbox.Notice(checkpoint="/none", suite=SUITE))
    bad = sent.model_copy(
        update={"evaluation_id": "bad-0", "checkpoint": "/none", "sent": (str(file),), "what": "new"}
    )
    with pytest.raises(TimeoutError):
        evalspan.wait(bad, timeout=0)
    ears.tick()
    for _ in range(2):
        with pytest.raises(OperatorError, match="/none was refused: "):
            evalspan.wait(bad, timeout=0)
        # sent again, it waits once more, whatever the clocks of the hosts say
        file = inbox.leave(
            WorkPaths(tmp_path / "work"), inbox.Notice(checkpoint="/none", suite=SUITE, noticed_at=1.0)
        )
        bad = bad.model_copy(update={"sent": (str(file),)})
        with pytest.raises(TimeoutError):
            evalspan.wait(bad, timeout=0)
        ears.tick()


@pytest.mark.usefixtures("own_settings")
def test_wait_says_at_once_and_in_its_error_that_no_daemon_runs(tmp_path, monkeypatch, caplog):
    """Once, however often it looks; the reason is that of the submission."""
    sent = evalspan.submit(small(tmp_path / "step-1"), SUITE)
    monkeypatch.setattr(api, "POLL_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"after 0[.]1 s: no daemon runs for this work folder"):
        evalspan.wait(sent, timeout=0.1)
    (warned,) = caplog.messages
    assert sent.waits in warned


@pytest.mark.usefixtures("own_settings")
def test_a_submission_takes_no_settings_that_change_its_evaluation(tmp_path):
    """The daemon has its own: refused before a notice is left, and named by the key."""
    place = small(tmp_path / "step-1")
    for key, value in (("trial.model_args", {"dtype": "float32"}), ("cluster.kind", "slurm")):
        with pytest.raises(OperatorError, match=f"cannot change {key}.*the daemon's evalspan.toml"):
            evalspan.submit(place, SUITE, settings={key: value, "watch.suite": SUITE})
    assert not (tmp_path / "work" / "inbox").exists()
    done = CliRunner().invoke(app, ["submit", str(place), "--suite", SUITE, "--model_args", "dtype=float32"])
    assert "cannot change trial.model_args.dtype" in str(done.exception)
    assert evalspan.submit(place, SUITE, settings={"trial.device": None}).what == "new"


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("by", ["settings", "files"])
def test_wait_names_the_evaluation_that_the_daemon_made_in_place_of_the_submitted_one(tmp_path, by):
    """Of other settings, or of a checkpoint that was still being written. What is waited for never comes."""
    place = small(tmp_path / "step-1")
    ears = daemon(tmp_path / "work", Config())
    if by == "settings":
        (tmp_path / "own.toml").write_text('[trial]\nmodel_args = { dtype = "float32" }\n')
        sent = evalspan.submit(place, SUITE, config=tmp_path / "own.toml")
    else:
        sent = evalspan.submit(place, SUITE)
        shutil.copytree(small(tmp_path / "whole", seed=1), place, dirs_exist_ok=True)
    for waited in (sent, sent.evaluation_id):
        with pytest.raises(TimeoutError):
            evalspan.wait(waited, timeout=0)
    ears.tick()
    (made,) = ears.coordinator.running
    assert made != sent.evaluation_id
    with pytest.raises(OperatorError, match=f"did not begin {sent.evaluation_id}: .*evaluation is {made}$"):
        evalspan.wait(sent, timeout=0)


@pytest.mark.usefixtures("own_settings")
def test_wait_ends_with_an_evaluation_that_was_given_up_before(tmp_path):
    """Nothing was sent for it, so nothing brings it back. A raised priority does, once the daemon has read it."""
    place, paths = small(tmp_path / "step-1"), WorkPaths(tmp_path / "work")
    ears = daemon(tmp_path / "work", Config())
    name = evalspan.submit(place, SUITE).evaluation_id
    ears.tick()
    folder = paths.evaluation(name)
    journal = folder.journal.read_bytes()
    folder.journal.write_bytes(journal + b"nothing\n")
    ears = daemon(tmp_path / "work", Config())
    ears.coordinator.resume_all()
    for _ in range(1, MOST_TRIES):
        ears.coordinator.parked[name].until = 0.0
        ears.coordinator.tick()
    folder.journal.write_bytes(journal)
    known = evalspan.submit(place, SUITE)
    assert known.what == "known"
    with pytest.raises(OperatorError, match=f"{name} was given up: "):
        evalspan.wait(known, timeout=0)
    raised = evalspan.submit(place, SUITE, priority=3)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            evalspan.wait(raised, timeout=0)
        ears.tick()


@pytest.mark.usefixtures("own_settings")
def test_tasks_are_submitted_as_a_suite_file_below_the_work_folder(tmp_path):
    """The daemon makes of it the evaluation that `submit` named; `[watch] suite` counts where nothing is named."""
    place = small(tmp_path / "step-7")
    with pytest.raises(OperatorError, match="say --suite NAME or --tasks"):
        evalspan.submit(place)
    sent = evalspan.submit(place, tasks="quickstart_mmlu,quickstart_gsm8k", limit=4)
    file = Path(sent.suite)
    assert file.parent == tmp_path / "work" / "inbox" / "suites"
    assert file.parent.stat().st_mode & 0o077 == 0
    named = evalspan.submit(place, settings={"watch.suite": SUITE})
    assert named.suite == SUITE
    ears = daemon(tmp_path / "work", Config())
    ears.tick()
    assert set(ears.coordinator.running) == {sent.evaluation_id, named.evaluation_id}
    assert evalspan.submit(place, tasks=["quickstart_mmlu", "quickstart_gsm8k"], limit=4).what == "known"


@pytest.mark.model
@pytest.mark.usefixtures("own_settings")
def test_a_submission_after_an_edit_is_a_new_evaluation_and_names_what_changed(tmp_path, toy_model, caplog):
    """By the source keys of the tasks; the daemon's log says it, too."""
    caplog.set_level("INFO")
    shutil.copytree(TASKS, tmp_path / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "s.toml"
    file.write_text(suite_text("s", {"toy_choice": {}, "toy_pages": {}}, tmp_path / "tasks"))
    ears = daemon(tmp_path / "work", Config())
    first = evalspan.submit(toy_model, file)
    assert (first.what, first.note) == ("new", "")
    ears.tick()
    yaml = tmp_path / "tasks" / "choice.yaml"
    yaml.write_text(yaml.read_text() + "target_delimiter: '  '\n")
    second = evalspan.submit(toy_model, file)
    assert (second.what, second.evaluation_id == first.evaluation_id) == ("new", False)
    assert f"files or data of toy_choice changed since {first.evaluation_id}: this is a new" in second.note
    ears.tick()
    assert set(ears.coordinator.running) == {first.evaluation_id, second.evaluation_id}
    assert second.note in caplog.text


def test_rows_of_a_series_are_flat_and_in_order(tmp_path, monkeypatch):
    """One for each score; an evaluation without a score has one row, so that no checkpoint is lost."""
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(tmp_path))
    for step, value in ((20, 0.6), (10, 0.2), (30, None)):
        leave(tmp_path, step, value)
    rows: list[dict[str, Any]] = evalspan.series("/runs/a")
    assert [r["step"] for r in rows] == [10, 10, 20, 20, 30]
    assert all(r.keys() == COLUMNS for r in rows)
    assert (rows[0]["task"], rows[0]["value"], rows[0]["documents"]) == ("add", 0.2, 100)
    assert (rows[-1]["status"], rows[-1]["value"]) == ("open", None)
    assert evalspan.series("/runs/a", "mini") == rows
    with pytest.raises(OperatorError, match=r"no evaluation there is of suite 'other' \(there are: mini\)"):
        evalspan.series("/runs/a", "other")


def test_wait_replays_no_journal(tmp_path, monkeypatch):
    """After a retry the old results are still there, and a journal has up to a million lines."""
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(tmp_path))
    leave(tmp_path, 10, 0.5)
    (paths,) = (EvaluationPaths(file.parent) for file in tmp_path.glob("*/evaluation.json"))
    record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    journal = Journal(paths.journal)
    journal.append([Accepted(at=1.0, record=record)])
    journal.close()
    monkeypatch.setattr("coordinator.runtime.journal._whole_lines", lambda _: pytest.fail("it is replayed"))
    monkeypatch.setattr(api, "POLL_SECONDS", 0.01)
    with pytest.raises(TimeoutError):
        evalspan.wait(record.evaluation_id, timeout=0.2)
