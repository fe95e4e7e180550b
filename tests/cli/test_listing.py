"""Laws of listings: of evaluations in order, with what is left out counted and the job of the daemon named; of `ls` and `validate`, of
which nothing is cut. What is printed is in tests/golden/test_screens.py.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.toys import TASKS, config_text, suite_text

from coordinator.intake.inbox import Notice, leave_notice
from coordinator.interface.cli.screen.evaluation_views import choose_shown, has_failed
from coordinator.interface.cli.screen.listing import Surroundings, show_left_out
from coordinator.interface.cli.screen.work_folder_view import WorkFolderView, wrapped_daemon
from coordinator.runtime.known_evaluations import ids_of
from coordinator.runtime.summary import Parked, Summary, Task
from coordinator.runtime.work_lock import DAEMON, WorkLock
from coordinator.site.cluster.slurm_parse import FIELD_END, QUEUE_FORMAT, RECORD_END
from coordinator.site.config.schema import ClusterConfig, Config
from evaljobs.contract.paths import WorkPaths

NOW = 1_700_000_000.0


def printed(*parts):
    out = io.StringIO()
    for part in parts:
        Console(file=out, width=200, color_system=None).print(part)
    return out.getvalue()


summaries = st.builds(
    Summary,
    schema_version=st.just(3),
    written_at=st.just(0.0),
    evaluation_id=st.uuids().map(str),
    accepted_at=st.floats(0, NOW),
    ended_at=st.sampled_from([None, NOW]),
    cancelled=st.sampled_from(["", "on request"]),
    tasks=st.sampled_from([(), (Task(name="task", state="failed", error="no data"),)]),
    parked=st.sampled_from([None, Parked(at=0.0, error="disk full")]),
)


@given(
    st.lists(summaries, max_size=30), st.booleans(), st.booleans(), st.one_of(st.none(), st.integers(1, 10))
)
def test_a_choice_of_rows_is_complete_in_order_and_counts_what_it_leaves_out(found, open_, failed_, last):
    """What is not over comes first, then the newest; every row that is asked for is shown or counted."""
    shown, left = choose_shown(found, only=None, only_open=open_, only_failed=failed_, last=last)
    over = [s.ended_at is not None for s in shown]
    assert over == sorted(over)
    for group in (True, False):
        times = [s.accepted_at for s, is_over in zip(shown, over, strict=True) if is_over is group]
        assert times == sorted(times, reverse=True)
    assert not (open_ and any(over))
    assert not failed_ or all(has_failed(s) for s in shown)
    asked = sum((not open_ or s.ended_at is None) and (not failed_ or has_failed(s)) for s in found)
    assert len(shown) + left == asked
    assert last is None or len(shown) <= last
    said = printed(*show_left_out(left, len(shown), "evalspan status"))
    assert (f"--last {asked}" in said) == bool(left)


def test_a_name_means_its_whole_words_before_the_beginning_of_longer_ones():
    """A step is not the beginning of a larger one; the digest at the end is enough."""
    ids = ["step-100-a-1f", "step-1000-a-2f", "step-1000-b-3f"]
    for name, found in (
        ("step-100", ids[:1]),
        ("step-1000", ids[1:]),
        ("step-10", ids),
        ("2f", ids[1:2]),
        ("", ids),
    ):
        assert ids_of(name, ids) == found


def test_on_slurm_the_daemon_is_started_as_a_job_and_its_last_log_is_named(tmp_path, monkeypatch):
    """A job that ended at once by a wrong setting left its reason there."""
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"cluster": {"kind": "slurm", "cpu_partition": "cpu"}})
    line = wrapped_daemon(config, " --work-dir w")
    assert re.fullmatch(r"sbatch -p cpu -t 1-00:00:00 -J evalspan-daemon-\w+ (\S+) --work-dir w", line)
    assert Path(line.split()[-3]).is_file()
    assert wrapped_daemon(Config(), "") == ""
    before = str(Surroundings(wrapped=line).daemon_line(NOW))
    (tmp_path / "evalspan-daemon.log").write_text("evalspan: ...")
    after = str(Surroundings(wrapped=line).daemon_line(NOW))
    assert f"`{line}`" in before
    assert after == f"{before}; evalspan-daemon.log says how its last job ended"


def test_the_daemons_queued_job_is_named_and_notices_wait_for_it(tmp_path, monkeypatch):
    """By `status` and `watch`, which asks Slurm while no process has the folder."""
    said = tmp_path / "said"
    fields = ("125", "N/A", "PENDING", "N/A", "N/A", "", "Priority", "", "evalspan-daemon")
    said.write_text(QUEUE_FORMAT + "".join(("\n", FIELD_END.join(fields), RECORD_END)))
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\ncat "{said}"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = Config(work_dir=tmp_path / "work", cluster=ClusterConfig(kind="slurm"))
    sight = WorkFolderView(config, "evalspan daemon", None)
    assert [job.job_id for job in sight.around.queued] == ["125"]
    assert "the daemon's job 125 is queued" in printed(*sight.around.lines(NOW))
    config.work_dir.mkdir(mode=0o700)
    leave_notice(WorkPaths(config.work_dir), Notice(checkpoint="/c", suite="core"))
    (waits,) = WorkFolderView(config, "evalspan daemon").around.checkpoints.waiting
    assert waits.why == "the daemon's job 125 is queued"
    lock = WorkLock(WorkPaths(config.work_dir).lock)
    lock.acquire(DAEMON)
    sight.views(time.time() + 60)
    lock.release()
    assert not sight.around.queued


def test_what_keeps_the_holder_from_going_on_is_shown(tmp_path):
    """As its log has it, in `status`, `watch` and JSON, until it is over; the time since which it has the folder stays."""
    config = Config(work_dir=tmp_path)
    lock, trouble = (
        WorkLock(WorkPaths(tmp_path).lock),
        "the disk of /work is full (0.0 MB free)\x1b[2J" + "x" * 2000,
    )
    lock.acquire(DAEMON)
    os.utime(lock.path, (NOW, NOW))
    for text in (trouble, "no news of jobs: slurmctld", ""):
        lock.show_trouble(text)
        around = WorkFolderView(config, "evalspan daemon").around
        assert (around.as_json()["trouble"] or "") == text.replace("\x1b", "?")[: len(around.trouble)]
        assert (f"! {around.trouble[:30]}" in printed(*around.lines(NOW))) == bool(text)
        assert (around.daemon, around.since, "\x1b" in around.trouble) == (True, NOW, False)
    lock.release()
    assert WorkFolderView(config, "evalspan daemon").around.trouble == ""


# --- `ls` and `validate` -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ls")
    (made / "evalspan.toml").write_text(config_text())
    (made / "toys.toml").write_text(suite_text("toys", {"toy_choice": {"limit": 5}, "toy_sums": {}}))
    return made


def typed(folder, *arguments, width=None):
    """`width`: of a terminal; None: in a pipe."""
    program = str(Path(sys.executable).parent / "evalspan")
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(width or 80), "HF_HOME": str(folder / "hf")}
    env |= {"FORCE_COLOR": "1"} if width else {}
    return subprocess.run(
        [program, *arguments, "--work-dir", str(folder / "work")],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip


def test_suites_tasks_and_groups_are_listed_with_what_they_hold(folder):
    """Each count is stated, at each width, and in a pipe on one line; the second call reads the list of the first."""
    for width in (80, 200, None):
        done = typed(folder, "ls", "-s", "toys.toml", width=width)
        assert done.returncode == 0, done.stderr
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        lines = plain.splitlines()
        assert max(map(len, lines)) <= (width or 1000)
        assert width or [line for line in lines if line != line.rstrip()] == []
        text = " ".join(plain.replace(",", "").replace(";", "").split())
        assert "quickstart_hellaswag 0-shot ≤ 32 documents multiple choice acc acc_norm local data" in text
        assert "to fetch: Rowan/hellaswag" in text
        assert "toy_choice 0-shot" in text
        assert "7 of 7 suites" in done.stderr
    (cached,) = (folder / "work" / "cache").glob("*-catalogue.json")
    before = cached.stat()
    done = typed(folder, "ls", "tasks", "arc_*")
    assert cached.stat() == before
    lines = done.stdout.splitlines()
    assert any(line.split() == ["arc_easy", "multiple", "choice", "acc,", "acc_norm;", "allenai/ai2_arc", "ARC-Easy"] for line in lines)  # fmt: skip
    assert f"{len(lines)} of 13,1" in done.stderr
    groups = json.loads(typed(folder, "ls", "groups", "glue", "--json").stdout)["groups"]
    assert next(g for g in groups if g["name"] == "glue")["members"][:2] == ["cola", "mnli"]


def test_validate_says_what_eval_would_say(folder, toy_model, tmp_path):
    """With what a suite or tasks hold, by eval's options, in lm_eval's spelling, too; of a checkpoint the request sets that are
    built, also of one that `eval` would convert. Nothing is built, no service is started. What cannot run is in the table of
    refusals."""

    def valid(*words):
        done = typed(folder, "validate", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = valid("--suite", "toys.toml")
    assert "toy_choice" in said
    assert "toys is valid; not checked: whether the cluster accepts its jobs, the checkpoint" in said
    words = ("--tasks", "toy_choice", "--include_path", str(TASKS), "--limit", "4")
    assert "toy_choice-limit4 is valid" in valid(*words)
    assert "toy_choice-limit4-fast is valid" in valid(*words, "--mode", "fast")
    (tmp_path / "model.pt").write_bytes(b"weights")
    convert = '[checkpoint]\nconvert = "python c.py {src} {dst}"\n'
    (tmp_path / "raw.toml").write_text(f"{config_text()}\n{convert}")
    raw = ("--tokenizer", str(tmp_path), "--config", str(tmp_path / "raw.toml"))
    assert "the checkpoint" not in valid("--suite", "toys.toml", *raw)
    built = valid("--suite", "toys.toml", "--tokenizer", str(toy_model))
    assert "request sets: 0 of 2 tasks are built" in built
    assert {p.name for p in (folder / "work").iterdir()} <= {"cache"}


def test_prepare_without_internet_names_the_data_set(folder, toy_model, monkeypatch):
    """In one line without a class of the program's."""
    (folder / "hub").mkdir()
    (folder / "hub" / "a.yaml").write_text("task: a\ndataset_path: lab/rows\ntest_split: test\n")
    (folder / "hub.toml").write_text(suite_text("hub", {"a": {}}, "hub"))
    for name, value in (("ENDPOINT", "http://127.0.0.1:9"), ("HUB_OFFLINE", "0"), ("DATASETS_OFFLINE", "0")):
        monkeypatch.setenv(f"HF_{name}", value)
    done = typed(folder, "prepare", "--suite", "hub.toml", "--tokenizer", str(toy_model))
    assert done.returncode == 2
    assert "(http://127.0.0.1:9 does not answer: Connection refused)" in " ".join(done.stderr.split())
    assert "evalspan: a could not be built: the data set of task a could not be fetched (" in done.stderr
    assert done.stderr.rstrip().endswith("run the same command on a machine with internet")
