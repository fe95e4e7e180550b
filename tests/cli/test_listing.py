"""Laws of the listing of evaluations: it fits, its ids can be copied, it is in order, and what waits or went wrong is in it."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coordinator.base.words import clock_time
from coordinator.cli.screen.layout import fitted, wrapped
from coordinator.cli.screen.listing import show_daemon, show_left_out, show_pending, show_rows
from coordinator.cli.screen.slurm_answers import wrapped_daemon
from coordinator.cli.screen.standing import Choice, failed
from coordinator.cli.screen.surroundings import read_surroundings
from coordinator.cli.screen.watching import Sight
from coordinator.cluster import JobState
from coordinator.cluster.slurm_parse import FIELD_END, QUEUE_FORMAT, RECORD_END
from coordinator.cluster.slurm_reasons import NEVER, WAITS, in_words, never_starts
from coordinator.config.schema import ClusterConfig, Config
from coordinator.intake import pending, sources
from coordinator.runtime.summary import Parked, Summary, Task
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths

ID = "step-1000-of-a-training-with-a-long-name-core-1a2b3c4d"


NOW = 1_700_000_000.0


def row(**more: Any) -> dict[str, Any]:
    known = {
        "evaluation_id": ID, "step": 1000, "checkpoint": "/runs/a/step-1000-of-a-training", "suite": "core",
        "stage": "building requests", "shards_done": 3, "shards": 17, "trials": 2, "scored": 1, "entries": 4,
        "accepted_at": NOW - 75, "ended_at": None, "age_seconds": 75.0, "makespan_seconds": None, "eta_seconds": None,
        "stopped": False, "stragglers": {}, "waits_seconds": None, "waits_for": [], "errors": {}, "nodes_aside": {},
        "held_jobs": {}, "failed_jobs": {}, "trackers": {}, "fault": None, "scores": [],
    }  # fmt: skip
    return {**known, **more}


def ended(**more: Any) -> dict[str, Any]:
    score = {"metric": "acc", "filter": "none", "value": 0.25, "stderr": 0.01, "higher_is_better": True}
    known = {
        "evaluation_id": "step-900-core-00000000", "step": 900, "stage": "ended", "scored": 4, "trials": 0, "shards_done": 17,
        "accepted_at": NOW - 7200, "ended_at": NOW - 3600, "age_seconds": 3600.0, "makespan_seconds": 61.5,
        "scores": [{"task": task, **score} for task in ("hellaswag", "arc_challenge", "winogrande", "mmlu")],
    }  # fmt: skip
    return row(**{**known, **more})


def drawn(width: int, *rows: dict[str, Any], whole: bool = False, now: float = NOW) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    for line in show_rows(rows, width, now, whole=whole):
        console.print(line, soft_wrap=True)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_ids_figures_and_scores_are_whole_at_any_width(width):
    """No id is cut or folded; nothing but an id is wider than the terminal; scores that do not fit are counted."""
    text = drawn(
        width, row(eta_seconds=40.2), ended(), row(evaluation_id="b-core-00000000", step=None, shards=0)
    )
    words = text.split()
    for part in (ID, "step-900-core-00000000", "b-core-00000000", "3/17", "1/4", "4/4", "61.5"):
        assert any(part in word for word in words), (part, text)
    assert "about 41 s left" in text
    shown = text.count(" acc 0.2500")
    assert shown == 4 or f"and {4 - shown} more" in text
    for line in text.splitlines():
        assert len(line) <= width or line.strip() == ID, line


@given(st.integers(20, 240), st.lists(st.integers(1, 60), max_size=12))
def test_every_score_is_shown_or_counted(width, lengths):
    """`fitted` never loses a part without saying so, and never is wider than asked unless nothing fits."""
    parts = ["x" * length for length in lengths]
    line = fitted(parts, width)
    found = re.findall(r"x+", line)
    left = re.search(r"(\d+) (?:more|scores)$", line)
    assert len(found) + (int(left[1]) if left else 0) == len(parts)
    assert len(line) <= max(width, len("12 scores"))


@given(st.integers(20, 200), st.lists(st.from_regex(r"[a-z/]{1,30}|`[a-z]{1,8} [a-z]{1,8}`", fullmatch=True)))
def test_a_folded_message_keeps_words_and_commands_whole(width, words):
    text = " ".join(words)
    lines = wrapped(text, width, first="    ", rest="      ")
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    for command in re.findall(r"`[^`]*`", text):
        assert any(command in line for line in lines)
    assert all(len(line) <= width or len(line.split("`")) > 1 or len(line.split()) == 1 for line in lines)


def test_the_time_of_an_ended_evaluation_stands_still():
    """Its makespan and when it ended, today, earlier or in another year."""
    assert drawn(120, ended()) == drawn(120, ended(), now=NOW + 60)
    later = drawn(120, ended(), now=NOW + 5 * 86400)
    assert time.strftime("ended %d %b %H:%M", time.localtime(NOW - 3600)) in later
    assert "ended 2023-11-14" in drawn(120, ended(), now=NOW + 400 * 86400)
    assert "61.5 s" in later


summaries = st.builds(
    Summary,
    schema_version=st.just(2),
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
    shown, left = Choice(open=open_, failed=failed_, last=last).of(found)
    over = [s.ended_at is not None for s in shown]
    assert over == sorted(over)
    for group in (True, False):
        times = [s.accepted_at for s, is_over in zip(shown, over, strict=True) if is_over is group]
        assert times == sorted(times, reverse=True)
    assert not (open_ and any(over))
    assert not failed_ or all(failed(s) for s in shown)
    asked = sum((not open_ or s.ended_at is None) and (not failed_ or failed(s)) for s in found)
    assert len(shown) + left == asked
    assert last is None or len(shown) <= last
    said = " ".join(line.plain for line in show_left_out(left, len(shown), 200, "evalspan status"))
    assert (f"--last {asked}" in said) == bool(left)


def test_what_went_wrong_is_below_its_row_with_its_name():
    """A task, a node, a trial and a tracker, also in brackets that rich would eat."""
    text = drawn(
        200,
        row(
            errors={"hellaswag": "no data [set]"},
            nodes_aside={"n1": "three trials died"},
            waits_seconds=61.0,
            waits_for=["2 trials are pending for 3:10 min: jobs of higher priority go first (Priority)"],
            held_jobs={"es-1-build-a0": "Slurm does not take it yet (MaxSubmitJobs)"},
            stragglers={"es-1-trial-n2-a0.3": "takes 3.1 times as long as the others"},
            failed_jobs={"es-1-trial-n1-a0": "CUDA out of memory", "es-1-trial-n1-a1": "CUDA out of memory"},
            trackers={"wandb": "no answer"},
        ),
    )
    for line in (
        "hellaswag: no data [set]",
        "n1: three trials died",
        "all nodes are in back-off: it waits for 61.0 s more",
        "2 trials are pending for 3:10 min: jobs of higher priority go first (Priority)",
        "es-1-build-a0: Slurm does not take it yet (MaxSubmitJobs)",
        "es-1-trial-n2-a0.3 takes 3.1 times as long as the others",
        "es-1-trial-n1-a0, es-1-trial-n1-a1 failed: CUDA out of memory",
        "not in wandb: no answer (`evalspan export --left` tries again)",
    ):
        assert f"    {line}" in text.splitlines(), text


def test_a_mended_failure_is_shown_only_where_its_evaluation_is_asked_for():
    """While it runs, too; in a list of ended evaluations it would stand for ever."""
    failure = {"failed_jobs": {"es-1-trial-n1-a0": "CUDA out of memory"}}
    assert "CUDA" not in drawn(120, ended(**failure))
    assert "es-1-trial-n1-a0 failed and was made up for: CUDA" in drawn(120, ended(**failure), whole=True)
    assert "es-1-trial-n1-a0 failed: CUDA" in drawn(120, row(**failure))


def test_an_evaluation_that_no_process_runs_is_called_stopped():
    """Whatever stage its journal ends in; what it waited for then does not count."""
    text = drawn(120, row(stage="inference", stopped=True, waits_for=["no GPU is free"], age_seconds=15.0))
    assert f"stopped since {clock_time(NOW - 60, NOW)}" in text
    assert (
        "no process goes on with it: type the same `evalspan eval …` again, or start `evalspan daemon`"
        in text
    )
    assert "inference" not in text
    assert "no GPU" not in text


@pytest.mark.parametrize(
    ("holder", "says"),
    [
        ("evalspan daemon, pid 7 on n1", "daemon: running since {}, pid 7 on n1"),
        (
            "evalspan eval, pid 7 on n1",
            "daemon: not running; evalspan eval, pid 7 on n1, has the work folder since {}",
        ),
        ("", "daemon: not running; to start it: `evalspan daemon --work-dir w`"),
    ],
)
def test_the_daemons_state_names_host_and_time_or_what_to_type(holder, says):
    lines = show_daemon(holder, NOW if holder else None, 200, NOW + 60, "evalspan daemon --work-dir w")
    said = " ".join(line.plain for line in lines)
    assert said.startswith(says.format(time.strftime("%H:%M", time.localtime(NOW))))


def test_on_slurm_the_daemon_is_started_as_a_job_and_its_last_log_is_named(tmp_path: Path, monkeypatch):
    """A job that ended at once by a wrong setting left its reason there."""
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"cluster": {"kind": "slurm", "cpu_partition": "cpu"}})
    line = wrapped_daemon(config, " --work-dir w")
    assert re.fullmatch(r"sbatch -p cpu -t 1-00:00:00 -J evalspan-daemon-\w+ (\S+) --work-dir w", line)
    assert Path(line.split()[-3]).is_file()
    assert wrapped_daemon(Config(), "") == ""
    (before,) = show_daemon("", None, 400, NOW, "evalspan daemon", wrapper=line)
    (tmp_path / "evalspan-daemon.log").write_text("evalspan: ...")
    (after,) = show_daemon("", None, 400, NOW, "evalspan daemon", wrapper=line)
    assert f"`{line}`" in before.plain
    assert after.plain == f"{before.plain}; evalspan-daemon.log says how its last job ended"


def test_pending_and_refused_checkpoints_stand_below_their_reason():
    """Each on a line; names in brackets that rich would eat; a reason that many share is said once, and the rest counted."""
    wait = "no config.json"
    shown = pending.PendingFile(
        waiting=tuple(
            pending.Waiting(checkpoint=f"/run/[step]-{i}", suite="/s/core.toml", since=NOW - 60, why=wait)
            for i in range(7)
        ),
        refused=(pending.Refused(checkpoint="/run/step-2", suite="croe", at=NOW, why="no suite"),),
    )
    lines = [line.plain for line in show_pending(shown, 80, NOW)]
    assert lines[0] == "7 checkpoints wait: no config.json"
    assert lines[1].split() == ["/run/[step]-0", "suite", "core", "for", "60.0", "s"]
    assert lines[6].strip() == "and 2 more: `evalspan status --json` has all"
    assert lines[7] == "a checkpoint was refused: no suite"
    assert lines[8].split()[:3] == ["/run/step-2", "suite", "croe"]


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Priority", "jobs of higher priority go first (Priority)"),
        ("QOSMaxJobsPerUserLimit", "a limit of the QOS is reached: it starts as other jobs end; [borrow] max_nodes and max_gpus keep evalspan's fewer (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRES", "a limit of the account or user is reached: it starts as other jobs end; [borrow] max_nodes and max_gpus keep evalspan's fewer (AssocGrpGRES)"),
        ("AssocGrpCPURunMinutesLimit", "the budget of the account or user is used up: ask the site, or set another [cluster] account (AssocGrpCPURunMinutesLimit)"),
        ("QOSMaxGRESPerJob", "the job asks for more GPUs than the QOS allows: lower [trial] gpus_per_trial, or set another [cluster] qos (QOSMaxGRESPerJob)"),
        ("ReqNodeNotAvail, Reserved for maintenance", "its node is reserved for maintenance: `scontrol show reservation` says until when (ReqNodeNotAvail, Reserved for maintenance)"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "its node is down, drained or reserved, or its GPUs are used by another job (ReqNodeNotAvail, UnavailableNodes:n1)"),
        ("NewInSlurm27", "NewInSlurm27"),
        ("None", ""),
    ],
)  # fmt: skip
def test_a_reason_of_slurm_is_put_in_words_and_keeps_its_own(reason, says):
    assert in_words(reason) == says


@pytest.mark.parametrize("whose", ["QOS", "Assoc"])
@pytest.mark.parametrize("limit", ["MaxWallDurationPerJobLimit", "MaxCpuPerJobLimit", "MaxMemPerJob", "MaxGRESPerNode", "MinGRES"])  # fmt: skip
def test_a_limit_on_one_job_alone_is_one_that_no_wait_mends(whose, limit):
    """And the words say which setting does. A limit on all jobs of a user or group is met again as they end."""
    assert never_starts(whose + limit)
    assert re.search(r"(lower|raise|set).*\[cluster\] (qos|account)", in_words(whose + limit))
    for waits in ("GrpCpuLimit", "MaxJobsPerUserLimit", "MaxGRESPerUser", "GrpSubmitJobsLimit"):
        assert not never_starts(whose + waits)


def test_every_reason_that_no_wait_mends_says_what_to_do():
    for reason, words in NEVER.items():
        assert never_starts(reason)
        assert re.search(r"\[(cluster|trial)\] \w+", words), reason
    assert not any(never_starts(reason) for reason in WAITS)
    others = "uid_1001_not_in_group_permitted_to_use_this_partition_(gpu)"  # 25.11, of AllowGroups
    assert never_starts(others)
    assert "[cluster] partition" in in_words(others)


def test_a_daemon_whose_job_is_queued_is_not_started_again():
    """Its job is named, with Slurm's guess of its start and the reason; jobs of a stopped evaluation are counted."""
    job = JobState(
        job_id="125",
        name="evalspan-daemon",
        index=0,
        phase="pending",
        state="PENDING",
        reason="BeginTime",
        started_at=NOW,
    )
    (line,) = show_daemon("", None, 200, NOW, "evalspan daemon", [job])
    at = time.strftime("%H:%M", time.localtime(NOW))
    assert line.plain == (
        f"daemon: not running; the daemon's job 125 is queued (starts {at}; its start is delayed, as after a requeue (BeginTime))"
    )
    (never,) = show_daemon("", None, 400, NOW, "evalspan daemon", [replace(job, reason="PartitionTimeLimit")])
    assert "it never starts: `scancel 125`, then `sbatch -t TIME ...`" in never.plain
    assert "extra_args" not in never.plain  # of jobs that evalspan submits
    assert "4 of its jobs still run" in drawn(200, row(stopped=True, jobs_left=4))
    assert "still run" not in drawn(200, row(stopped=True, jobs_left=0))


def test_a_notice_waits_for_the_daemons_job_where_that_is_queued(tmp_path):
    paths = WorkPaths(tmp_path)
    sources.submit(paths, sources.Notice(checkpoint="/c", suite="core"))
    job = JobState(job_id="125", name="evalspan-daemon", index=0, phase="pending", state="PENDING")
    queued = read_surroundings(paths, "evalspan daemon", NOW, lambda: [job])
    assert [w.why for w in queued.checkpoints.waiting] == ["the daemon's job 125 is queued"]
    (none,) = read_surroundings(paths, "evalspan daemon", NOW).checkpoints.waiting
    assert "`evalspan daemon`" in none.why


def test_watch_names_the_daemons_queued_job_as_status_does(tmp_path, monkeypatch):
    """It asks Slurm while no process has the folder."""
    said = tmp_path / "said"
    fields = ("125", "N/A", "PENDING", "N/A", "N/A", "N/A", "", "Priority", "", "evalspan-daemon")
    said.write_text(QUEUE_FORMAT + "".join(("\n", FIELD_END.join(fields), RECORD_END)))
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\ncat "{said}"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = Config(work_dir=tmp_path / "work", cluster=ClusterConfig(kind="slurm"))
    sight = Sight(config, "evalspan daemon", None)
    assert [job.job_id for job in sight.around.queued] == ["125"]
    (line,) = [text.plain for text in sight.around.lines(200, NOW) if "daemon: " in text.plain]
    assert "the daemon's job 125 is queued" in line
    lock = WorkLock(WorkPaths(config.work_dir).lock)
    lock.acquire(DAEMON)
    sight.views(time.time() + 60)
    lock.release()
    assert not sight.around.queued
