"""Laws of `coordinator.api`: in any thread, quiet, and interruptible; a submission is waited for until its end."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from dev_cluster import procs
from dev_cluster.testing import wait_until
from support.commands import typed
from support.daemons import SUITE, daemon, small, taken
from support.toys import TASKS, config_text
from support.trainings import leave

import evalspan
from coordinator.api import submitting
from coordinator.decide.evaluation.events import Accepted
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.intake import inbox
from coordinator.runtime.journal import Journal
from coordinator.runtime.registry import MOST_TRIES
from coordinator.runtime.work_lock import DAEMON, WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.staging.segments import process_family

COLUMNS = {
    "evaluation_id", "suite", "step", "checkpoint", "status", "task", "filter", "metric", "value", "stderr",
    "documents", "n_shot", "version", "higher_is_better", "makespan_seconds", "paused_seconds",
    "gpu_seconds", "mode",
}  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    return tmp_path / "evalspan.toml"


@pytest.fixture
def waits(monkeypatch):
    """`waits(sent)`: `wait` of it does not end."""
    monkeypatch.setattr(submitting, "POLL_SECONDS", 0.01)

    def waits(sent, match="has not ended after 0 s", seconds=0.0):
        with pytest.raises(TimeoutError, match=match):
            evalspan.wait(sent, timeout=seconds)

    return waits


# --- evaluate --------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_script_evaluates_in_a_thread_and_prints_nothing(toy_model, settings, capfd, warm, monkeypatch):
    """As in a notebook: no terminal, not the main thread. The results are what files, `results` and `series` say; the
    second call runs nothing, and says so, also beside a daemon that holds the work folder. However many follow, the process holds no more descriptors.
    """
    monkeypatch.setenv("EVALSPAN_TRIAL_PROLOGUE", warm)
    seen, found = [], []

    def again(**more):
        """The same evaluation, asked for in other words."""
        given = {"tasks": "toy_choice", "include_path": [TASKS], "batch_size": "8", "config": settings}
        return evalspan.evaluate(toy_model, **given | more)

    def work():
        found.append(again(tasks=["toy_choice"], include_path=TASKS, batch_size=8, progress=seen.append))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (made,) = found
    assert capfd.readouterr() == ("", "")
    assert (made.status, made.complete, made.failed, made.note) == ("done", True, {}, "")
    assert seen[-1].scored == seen[-1].tasks == 1
    assert seen[-1].shards_done == seen[-1].shards > 0
    assert made.raw == json.loads((made.folder / "results.json").read_text())
    acc = next(s for s in made.scores if s.metric == "acc")
    assert repr(made).startswith(f"<Results {made.evaluation_id}: done; toy_choice/acc {acc.value:.4f}, ")
    assert len(repr(made)) < 200
    assert acc.value == made.raw["results"]["toy_choice"]["acc,none"]
    second = again()
    assert (second.evaluation_id, second.scores) == (made.evaluation_id, made.scores)
    assert "from the same inputs; nothing was run" in second.note
    lock = WorkLock(WorkPaths(made.folder.parent).lock)
    lock.acquire(DAEMON)
    beside = again()
    lock.release()
    assert (beside.note, beside.rows()) == (second.note, second.rows())
    held = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):  # as in a notebook of a day
        again()
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
    assert process.stdout.readline() == "progress\n", process.communicate()[1]
    if not fails:
        process.send_signal(signal.SIGINT)
    assert "interrupted True\n" in iter(process.stdout.readline, "")
    try:
        wait_until(
            lambda: not any(map(procs.identify, process_family(process.pid)[1:])), "jobs and Redis end", 20.0
        )
    finally:
        process.communicate("\n")
    reports = [json.loads(f.read_text()) for f in (tmp_path / "work").glob("*/report.json")]
    assert [made["status"] for made in reports] == ([] if fails else ["cancelled"])


@pytest.mark.model
def test_an_awaited_evaluation_leaves_the_loop_free_and_ends_with_its_task(
    toy_model, settings, warm, monkeypatch
):
    """Of three at once, one runs to its scores, one is cancelled before its turn, and one while it runs: it ends as cancelled."""
    monkeypatch.setenv("EVALSPAN_TRIAL_PROLOGUE", warm)
    given = {"tasks": "toy_choice", "include_path": TASKS, "config": settings}

    async def all_three():
        loop, beats = asyncio.get_running_loop(), []

        def stop(_progress):
            loop.call_soon_threadsafe(third.cancel)

        first = asyncio.create_task(evalspan.evaluate_async(toy_model, limit=4, **given))
        second = asyncio.create_task(evalspan.evaluate_async(toy_model, limit=5, **given))
        await asyncio.sleep(0)
        second.cancel()
        third = asyncio.create_task(evalspan.evaluate_async(toy_model, limit=6, progress=stop, **given))
        while not (first.done() and second.done() and third.done()):
            await asyncio.wait([first, second, third], timeout=0.1, return_when=asyncio.ALL_COMPLETED)
            beats.append(1)
        awaited = await evalspan.wait_async(first.result().evaluation_id, timeout=60, config=settings)
        return first.result(), second.cancelled(), third.cancelled(), awaited, len(beats)

    made, *cancelled, awaited, beats = asyncio.run(all_three())
    assert (made.status, cancelled, awaited.rows()) == ("done", [True, True], made.rows())
    assert beats > 1
    found = [json.loads(f.read_text())["status"] for f in (settings.parent / "work").glob("*/report.json")]
    assert sorted(found) == ["cancelled", "done"]
    pandas = pytest.importorskip("pandas")
    frame = evalspan.dataframe(made)
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("records")[0]["task"] == "toy_choice"
    assert len(evalspan.dataframe(made.rows(), "pandas")) == len(made.rows())


def test_a_dataframe_without_its_library_says_what_to_install(monkeypatch):
    """Polars where pandas is not there; else an ImportError that names both."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with_polars = SimpleNamespace(DataFrame=tuple)
    monkeypatch.setitem(sys.modules, "polars", with_polars)
    assert evalspan.dataframe([{"task": "a"}]) == ({"task": "a"},)
    monkeypatch.setitem(sys.modules, "polars", None)
    for library, said in ((None, "pandas or polars"), ("polars", "need polars: pip install polars")):
        with pytest.raises(ImportError, match=said):
            evalspan.dataframe([], library)


CHOICE = {"suite": SUITE}
REFUSED = [  # the call and its arguments
    ("evaluate", {"suite": "quikstart"}),
    ("evaluate", {**CHOICE, "limitt": 3}),
    ("evaluate", {**CHOICE, "slots": "2"}),
    ("evaluate", {**CHOICE, "checkpoint": "none"}),
    ("submit", {}),
    ("submit", {**CHOICE, "settings": {"trial.model_args": {"dtype": "float32"}, "watch.suite": SUITE}}),
]


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize(("call", "arguments"), REFUSED)
def test_an_error_is_raised_before_anything_is_started(tmp_path, call, arguments):
    """As on the command line: one line, no evaluation and no notice, also of settings that the daemon does not see."""
    with pytest.raises(evalspan.EvalspanError) as refused:
        getattr(evalspan, call)(**{"checkpoint": small(tmp_path / "step-1"), **arguments})
    assert isinstance(refused.value, evalspan.OperatorError)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "work").glob("*/journal.jsonl"))
    assert not (tmp_path / "work" / "inbox").exists()


# --- submit and wait -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_settings")
def test_a_notice_holds_the_suite_of_tasks(tmp_path):
    """The daemon makes of it the evaluation that `submit` named; `[watch] suite` counts where nothing is named. A setting that
    has no value is none.
    """
    place = small(tmp_path / "step-7")
    sent = evalspan.submit(place, tasks="quickstart_mmlu,quickstart_gsm8k", limit=4)
    other = evalspan.submit(place, tasks="quickstart_mmlu,quickstart_gsm8k", limit=4, batch_size=2)
    assert sent.suite == other.suite == "quickstart_mmlu-quickstart_gsm8k-limit4"
    named = evalspan.submit(place, settings={"watch.suite": SUITE, "trial.device": None})
    assert (named.suite, named.what) == (SUITE, "new")
    ears = daemon(tmp_path / "work", Config())
    ears.tick()
    assert set(ears.coordinator.evaluations.running) == {
        sent.evaluation_id,
        other.evaluation_id,
        named.evaluation_id,
    }
    assert evalspan.submit(place, tasks=["quickstart_mmlu", "quickstart_gsm8k"], limit=4).what == "known"
    refused = typed("submit", place, "--suite", SUITE, "--model_args", "dtype=float32", code=1)
    assert "cannot change trial.model_args.dtype" in str(refused.exception)


@pytest.mark.usefixtures("own_settings")
def test_wait_follows_a_submission_from_the_notice_to_a_refusal_or_the_timeout(tmp_path, waits, caplog):
    """A checkpoint that no daemon has taken yet is no error, and that none runs is said at once, and once; one that the daemon
    refused is an error, or a typing error in its id.
    """
    place, paths = small(tmp_path / "step-300"), WorkPaths(tmp_path / "work")
    sent = evalspan.submit(place, SUITE)
    assert (sent.what, sent.daemon) == ("new", False)
    for wrong in ("step-2-quickstart-00000000", sent.evaluation_id.replace("-quick", "-quack"), "step"):
        with pytest.raises(OperatorError, match="no evaluation"):
            evalspan.wait(wrong, timeout=0)
    assert "`evalspan daemon`" in sent.waits
    waits(sent, r"after 0[.]1 s: no daemon runs for this work folder", seconds=0.1)
    (warned,) = caplog.messages
    assert sent.waits in warned
    waits(sent.evaluation_id)
    ears = daemon(paths.root, Config())
    ears.tick()
    assert taken(ears) == ["step-300"]
    waits(sent)
    assert evalspan.submit(place, SUITE).what == "known"
    none = inbox.Notice(checkpoint="/none", suite=SUITE)
    # sent again, it waits once more, whatever the clocks of the hosts say
    for notice in (none, none.model_copy(update={"noticed_at": 1.0}), none):
        file = str(inbox.leave_notice(paths, notice))
        update = {"evaluation_id": "bad-0", "checkpoint": "/none", "sent": (file,), "what": "new"}
        bad = sent.model_copy(update=update)
        waits(bad)
        ears.tick()
        with pytest.raises(OperatorError, match="/none was refused: "):
            evalspan.wait(bad, timeout=0)
    file = str(inbox.leave_notice(paths, inbox.Notice(command="rescore", evaluation_id="again-0")))
    again = bad.model_copy(update={"evaluation_id": "again-0", "checkpoint": "", "sent": (file,)})
    waits(again)
    ears.tick()
    with pytest.raises(OperatorError, match="again-0 was refused: it contains no record"):
        evalspan.wait(again, timeout=0)


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("by", ["settings", "files"])
def test_wait_names_the_evaluation_that_the_daemon_made_in_place_of_the_submitted_one(tmp_path, waits, by):
    """Of other settings, or of a checkpoint that was still being written. What is waited for never comes."""
    place = small(tmp_path / "step-1")
    ears = daemon(tmp_path / "work", Config())
    if by == "settings":
        (tmp_path / "own.toml").write_text('[trial]\nmodel_args = { dtype = "float32" }\n')
        sent = evalspan.submit(place, SUITE, config=tmp_path / "own.toml")
    else:
        sent = evalspan.submit(place, SUITE)
        shutil.copytree(small(tmp_path / "whole", seed=1), place, dirs_exist_ok=True)
    waits(sent)
    waits(sent.evaluation_id)
    ears.tick()
    (made,) = ears.coordinator.evaluations.running
    assert made != sent.evaluation_id
    with pytest.raises(OperatorError, match=f"did not begin {sent.evaluation_id}: .*evaluation is {made}$"):
        evalspan.wait(sent, timeout=0)


@pytest.mark.usefixtures("own_settings")
def test_wait_ends_with_an_evaluation_that_was_given_up_before(tmp_path, waits):
    """Nothing was sent for it, so nothing brings it back. A raised priority does, once the daemon has read it."""
    place, paths = small(tmp_path / "step-1"), WorkPaths(tmp_path / "work")
    ears = daemon(tmp_path / "work", Config())
    name = evalspan.submit(place, SUITE).evaluation_id
    ears.tick()
    journal = paths.evaluation(name).journal
    whole = journal.read_bytes()
    journal.write_bytes(whole + b"nothing\n")
    ears = daemon(tmp_path / "work", Config())
    ears.coordinator.evaluations.resume_all()
    for _ in range(1, MOST_TRIES):
        ears.coordinator.evaluations.parked[name].until = 0.0
        ears.coordinator.tick()
    journal.write_bytes(whole)
    known = evalspan.submit(place, SUITE)
    assert known.what == "known"
    with pytest.raises(OperatorError, match=f"{name} was given up: "):
        evalspan.wait(known, timeout=0)
    raised = evalspan.submit(place, SUITE, priority=3)
    for _ in range(2):
        waits(raised)
        ears.tick()


# --- results ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_series_are_flat_and_in_order(tmp_path, monkeypatch, waits):
    """One for each score; an evaluation without a score has one row, so that no checkpoint is lost. After a retry the old
    results are still there, and `wait` finds that it has not ended without a replay of up to a million lines.
    """
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(tmp_path))
    for step, value in ((20, 0.6), (10, 0.2), (30, None)):
        leave(tmp_path, step, value)
    rows = evalspan.series("/runs/a")
    assert [r["step"] for r in rows] == [10, 10, 20, 20, 30]
    assert all(r.keys() == COLUMNS for r in rows)
    assert (rows[0]["task"], rows[0]["value"], rows[0]["documents"]) == ("add", 0.2, 100)
    assert (rows[-1]["status"], rows[-1]["value"]) == ("open", None)
    assert evalspan.series("/runs/a", "mini") == rows
    with pytest.raises(
        OperatorError, match=r"none of these evaluations is of suite 'other' \(there are: mini\)"
    ):
        evalspan.series("/runs/a", "other")
    with pytest.raises(OperatorError, match="no evaluation"):
        evalspan.results("none")
    paths = EvaluationPaths(tmp_path / "step-10-mini-00000010")
    record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    journal = Journal(paths.journal)
    journal.append([Accepted(at=1.0, record=record)])
    journal.close()
    monkeypatch.setattr("coordinator.runtime.journal._whole_lines", lambda _: pytest.fail("it is replayed"))
    waits(record.evaluation_id, "has not ended after 0.1 s", seconds=0.1)
