"""What SIGTERM means within a Slurm job, read from `scontrol --oneliner show job` as Slurm 22.05 printed it at that moment."""

from __future__ import annotations

import pytest

from coordinator.base.signals import cancelled_by_slurm, shows_cancelled

ENDS = "JobId=1 JobName=x JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1"


def test_a_job_that_preemption_cancels_is_none_that_a_person_cancelled():
    """PreemptMode=CANCEL: the jobs of its evaluation go on, and the same command resumes it."""
    text = ENDS.format(state="COMPLETING", reason="None", restarts=0)
    assert shows_cancelled(f"{text} PreemptTime=None", 0)
    assert not shows_cancelled(f"{text} PreemptTime=2026-11-23T06:58:01", 0)


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "before", "cancelled"),
    [
        ("COMPLETING", "None", 0, 0, True),
        ("CANCELLED", "None", 2, 2, True),
        ("COMPLETING", "None", 1, 0, False),  # requeued, by hand or by preemption
        ("COMPLETING", "TimeLimit", 0, 0, False),
        ("RUNNING", "None", 0, 0, False),  # a signal alone, or the warning before preemption
    ],
)
def test_only_a_cancelled_job_is_taken_for_one(state, reason, restarts, before, cancelled):
    """One that Slurm requeues, preempts, ends at its limit or only signals leaves its evaluation to the next run."""
    assert shows_cancelled(ENDS.format(state=state, reason=reason, restarts=restarts), before) == cancelled


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Unable to contact slurm controller"])
def test_no_answer_is_no_cancellation(text, tmp_path):
    """Without Slurm's word the jobs go on, also where the command is not there or there is no job."""
    assert not shows_cancelled(text, 0)
    assert not cancelled_by_slurm({})
