"""Laws of the listing of evaluations: it is in order, counts what it leaves out, and names the daemon's job. What it prints is
in tests/golden/test_screens.py.
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coordinator.cli.screen import sight as sights
from coordinator.cli.screen.listing import Surroundings, show_left_out
from coordinator.cli.screen.sight import Sight
from coordinator.cli.screen.slurm_answers import wrapped_daemon
from coordinator.cli.screen.standing import Choice, failed
from coordinator.cluster import JobState
from coordinator.cluster.slurm_parse import FIELD_END, QUEUE_FORMAT, RECORD_END
from coordinator.config.schema import ClusterConfig, Config
from coordinator.intake.inbox import Notice, leave
from coordinator.runtime.summary import Parked, Summary, Task
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths

NOW = 1_700_000_000.0


def printed(*parts: object) -> str:
    out = io.StringIO()
    for part in parts:
        Console(file=out, width=200, color_system=None).print(part)
    return out.getvalue()


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
    said = printed(*show_left_out(left, len(shown), "evalspan status"))
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
    assert "the daemon's job 125 is queued" in printed(*sight.around.lines(NOW))
    lock = WorkLock(WorkPaths(config.work_dir).lock)
    lock.acquire(DAEMON)
    sight.views(time.time() + 60)
    lock.release()
    assert not sight.around.queued
