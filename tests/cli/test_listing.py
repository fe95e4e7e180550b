"""Laws of the listing of evaluations: it fits, its ids can be copied, it is in order, and what waits or went wrong is in it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.screens import LONG_ID, NOW, ended, listed, printed, running

from coordinator.base.words import clock_time
from coordinator.cli.screen import sight as sights
from coordinator.cli.screen.listing import Surroundings, show_left_out, show_pending
from coordinator.cli.screen.sight import Sight
from coordinator.cli.screen.slurm_answers import wrapped_daemon
from coordinator.cli.screen.standing import Choice, Shown, failed
from coordinator.cluster import JobState
from coordinator.cluster.slurm_limits import RULES, in_words, never_starts
from coordinator.cluster.slurm_parse import FIELD_END, QUEUE_FORMAT, RECORD_END
from coordinator.config.schema import ClusterConfig, Config
from coordinator.intake import pending
from coordinator.intake.inbox import Notice, Refused, leave
from coordinator.runtime.summary import Halt, Node, Parked, Summary, Task, Timed
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths

BACK_OFF = Node(name="n1", status="back-off", why="three trials died", times=1)
TROUBLES = {  # fields of a summary, and what is said of them
    "hellaswag: no data [set]": {"tasks": (Task(name="hellaswag", state="failed", error="no data [set]"),)},
    "n1: in back-off (time 1): three trials died": {"nodes": (BACK_OFF,)},
    "all nodes are in back-off: it waits for 61.0 s more": {"waits_until": NOW + 61},
    "2 trials are pending: Priority": {"waits": (Timed(what="2 trials are pending", why="Priority"),)},
    "es-1-build-a0: Slurm does not take it yet (MaxSubmitJobs)": {"held": (Timed(what="es-1-build-a0", why="MaxSubmitJobs"),)},
    "es-1-trial-n2-a0.3 takes 3.1 times as long": {"stragglers": {"es-1-trial-n2-a0.3": "takes 3.1 times as long"}},
    "es-1-trial-n1-a0, es-1-trial-n1-a1 failed: out of memory": {"failed_jobs": {f"es-1-trial-n1-a{i}": "out of memory" for i in (0, 1)}},
    "disk full": {"fault": "disk full"},
    "not in wandb: no answer (`evalspan export --left` tries again)": {},
}  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_listing_has_each_evaluation_and_what_went_wrong_at_any_width(width):
    """Ids, figures and scores are whole, and what waits or failed is named with its evaluation. In a pipe each
    evaluation and each note is one line that begins with the id.
    """
    troubled = {field: value for fields in TROUBLES.values() for field, value in fields.items()}
    rows = [Shown(running(LONG_ID, **troubled), trackers={"wandb": "no answer"}), Shown(ended())]
    text = listed(width, *rows)
    wide = {line.strip() for line in text.splitlines() if len(line) > width}
    assert wide <= {LONG_ID, f"{LONG_ID}:"}
    whole = " ".join(text.split())
    figures = (
        "5/12",
        "1/2",
        "4/4",
        "60.0 s",
        "61.5 s",
        "about 41 s",
        "mmlu acc 0.2500",
        "step-900-core-00000000",
    )
    for part in (*figures, *(f"{LONG_ID}: {said}" for said in TROUBLES)):
        assert part in whole, text
    lines = listed(10_000, *rows).splitlines()
    assert [line.split()[0].strip(":") for line in lines[2:4]] == [LONG_ID, "step-900-core-00000000"]
    assert [line.partition(": ")[0] for line in lines[4:]] == [LONG_ID] * len(TROUBLES)


def test_a_row_of_many_scores_counts_those_that_it_leaves_out():
    assert "and 6 more" in listed(120, Shown(ended(scores=3 * ended().scores)))


def test_the_time_of_an_ended_evaluation_stands_still():
    """Its makespan and when it ended, today, earlier or in another year."""
    assert listed(120, Shown(ended())) == listed(120, Shown(ended()), now=NOW + 60)
    later = listed(120, Shown(ended()), now=NOW + 5 * 86400)
    assert time.strftime("ended %d %b %H:%M", time.localtime(NOW - 3600)) in later
    assert "ended 2023-11-14" in listed(120, Shown(ended()), now=NOW + 400 * 86400)
    assert "61.5 s" in later


def test_a_mended_failure_is_shown_only_where_its_evaluation_is_asked_for():
    """While it runs, too; in a list of ended evaluations it would stand for ever."""
    failure = {"failed_jobs": {"es-1-trial-n1-a0": "CUDA out of memory"}}
    assert "CUDA" not in listed(120, Shown(ended(**failure)))
    assert "a0 failed and was made up for: CUDA" in listed(120, Shown(ended(**failure)), whole=True)
    assert "a0 failed: CUDA" in listed(120, Shown(running(**failure)))


def test_an_evaluation_that_no_process_runs_is_called_stopped():
    """Whatever stage its journal ends in; what it waited for then does not count, jobs that still run do."""
    one = running(waits=(Timed(what="no GPU is free"),))
    text = listed(120, Shown(one, Halt("stopped", NOW - 45, ""), jobs_left=4))
    assert f"stopped since {clock_time(NOW - 45, NOW)}" in text
    assert "no process goes on with it" in text
    assert "4 of its jobs still run" in text
    assert not {"inference", "GPU", "left"} & {*text.split()}


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
    said = printed(200, *show_left_out(left, len(shown), "evalspan status"))
    assert (f"--last {asked}" in said) == bool(left)


def test_on_slurm_the_daemon_is_started_as_a_job_and_its_last_log_is_named(tmp_path: Path, monkeypatch):
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


@pytest.mark.parametrize(
    ("holder", "says"),
    [
        ("evalspan daemon, pid 7 on n1", "daemon: running since {}, pid 7 on n1"),
        ("evalspan eval, pid 7 on n1", "daemon: not running; evalspan eval, pid 7 on n1, has the work folder since {}"),
        ("", "daemon: not running; to start it: `evalspan daemon --work-dir w`"),
    ],
)  # fmt: skip
def test_the_daemons_state_names_host_and_time_or_what_to_type(holder, says):
    said = Surroundings(
        holder=holder, since=NOW if holder else None, daemon_command="evalspan daemon --work-dir w"
    ).daemon_line(NOW + 60)
    assert str(said).startswith(says.format(time.strftime("%H:%M", time.localtime(NOW))))


def test_pending_and_refused_checkpoints_stand_below_their_reason():
    """Each on a line; names in brackets that rich would eat; a reason that many share is said once, and the rest counted."""
    wait = "no config.json"
    shown = pending.Checkpoints(
        waiting=tuple(
            pending.Waiting(checkpoint=f"/run/[step]-{i}", suite="/s/core.toml", since=NOW - 60, why=wait)
            for i in range(7)
        ),
        refused=(Refused(checkpoint="/run/step-2", suite="croe", at=NOW, why="no suite"),),
    )
    lines = [line.split() for line in printed(80, *show_pending(shown, NOW)).splitlines()]
    assert [words[0] for words in lines if words[0].startswith("/")] == [
        *(f"/run/[step]-{i}" for i in range(5)),
        "/run/step-2",
    ]
    assert lines[1] == ["/run/[step]-0", "suite", "core", "for", "60.0", "s"]
    assert "and 2 more" in " ".join(lines[6])
    assert len(lines) == 9


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
    for rule in (rule for rule in RULES if rule.reason):
        assert never_starts(rule.reason) == (rule.ends != "time")
        assert rule.ends == "time" or re.search(r"\[(cluster|trial)\] \w+", rule.means), rule
    others = "uid_1001_not_in_group_permitted_to_use_this_partition_(gpu)"  # 25.11, of AllowGroups
    assert never_starts(others)
    assert "[cluster] partition" in in_words(others)


def test_a_daemon_whose_job_is_queued_is_not_started_again():
    """Its job is named, with Slurm's guess of its start and the reason."""
    job = JobState(
        job_id="125",
        name="evalspan-daemon",
        index=0,
        phase="pending",
        state="PENDING",
        reason="BeginTime",
        started_at=NOW,
    )
    line = str(Surroundings(queued=[job]).daemon_line(NOW))
    at = time.strftime("%H:%M", time.localtime(NOW))
    assert line == (
        f"daemon: not running; the daemon's job 125 is queued (starts {at}; its start is delayed, as after a requeue (BeginTime))"
    )
    never = str(Surroundings(queued=[replace(job, reason="PartitionTimeLimit")]).daemon_line(NOW))
    assert "it never starts: `scancel 125`, then `sbatch -t TIME ...`" in never
    assert "extra_args" not in never  # of jobs that evalspan submits


def test_a_notice_waits_for_the_daemons_job_where_that_is_queued(tmp_path, monkeypatch):
    paths = WorkPaths(tmp_path)
    leave(paths, Notice(checkpoint="/c", suite="core"))
    job = JobState(job_id="125", name="evalspan-daemon", index=0, phase="pending", state="PENDING")
    config = Config(work_dir=tmp_path)
    (none,) = Sight(config, "evalspan daemon").around.checkpoints.waiting
    monkeypatch.setattr(sights, "queued_daemons", lambda _: [job])
    queued = Sight(config, "evalspan daemon").around
    assert [w.why for w in queued.checkpoints.waiting] == ["the daemon's job 125 is queued"]
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
    assert "the daemon's job 125 is queued" in printed(200, *sight.around.lines(NOW))
    lock = WorkLock(WorkPaths(config.work_dir).lock)
    lock.acquire(DAEMON)
    sight.views(time.time() + 60)
    lock.release()
    assert not sight.around.queued
