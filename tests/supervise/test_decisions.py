"""Laws of what is decided after an attempt, of losses that spike, and of checkpoints that are whole."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import OperatorError
from coordinator.operations.supervise.attempts import sbatch_words
from coordinator.operations.supervise.decisions import (
    MOST_PAUSE,
    SPIKE_LENGTH,
    End,
    Losses,
    decide_restart,
    restart_pause,
)
from coordinator.site.diagnosis.diagnose import diagnose_state, diagnose_text
from coordinator.site.diagnosis.rules import rule_table

UNKNOWN = diagnose_text("", state="FAILED")
RULES = {
    rule.reason: diagnose_text(rule.example, state="FAILED") for rule in rule_table().rules if rule.reason
}


@pytest.mark.parametrize("reason", RULES)
def test_what_a_restart_cannot_help_is_not_restarted(reason: str) -> None:
    """Of each reason of the table: restarted where it can help and a restart is left. Nodes are checked where they may be the
    cause, and after a hang."""
    cause = RULES[reason]
    end = End(code=1, cause=cause, progress=True)
    made = decide_restart(end, 1, unknown_before=True)
    assert made.restart == cause.recoverable
    assert made.check == (cause.recoverable and cause.owner in ("node", "gpu", "network"))
    assert str(cause.reason) in made.why
    assert made.restart or cause.advice in made.why
    assert not decide_restart(end, 0, unknown_before=False).restart
    hung = decide_restart(End(code=137, cause=cause, progress=True, hung=True), 1, unknown_before=False)
    assert (hung.restart, hung.check) == (cause.recoverable, cause.recoverable)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=30), st.integers(0, 9))
def test_restarts_are_bounded(ends: list[tuple[bool, bool, bool]], most: int) -> None:
    """Whatever comes: at most `most` restarts; an unknown end, twice in a row without a checkpoint, is the last; and a
    training that has ended is not restarted."""
    left, before, idle = most, False, 0
    for known, progress, ended in ends:
        cause = RULES["NCCLRemoteError"] if known else UNKNOWN
        end = End(code=0 if ended else 1, cause=cause, progress=progress)
        made = decide_restart(end, left, before)
        unknown = not known and not progress
        assert made.restart == (not ended and left > 0 and not (unknown and before))
        if not made.restart:
            return
        left, before, idle = left - 1, unknown, 0 if progress else idle + 1
        assert 0 < restart_pause(1.0, idle) <= MOST_PAUSE
    assert left >= 0


@given(st.integers(0, 2**32))
def test_a_spike_is_told_once(seed: int) -> None:
    """Noise and a falling loss are usual; several large losses in a row, or one that is no number, are told once."""
    rng, losses = random.Random(seed), Losses()

    def usual(step: int) -> float:
        return 2.0 + 8.0 * math.exp(-step / 50) + rng.gauss(0, 0.05)

    assert not any(losses.add(usual(step)) for step in range(300))
    assert not losses.add(9.0), "one batch is no spike"
    losses.add(usual(300))
    told = [losses.add(9.0) for _ in range(2 * SPIKE_LENGTH)]
    assert [bool(one) for one in told] == [n == SPIKE_LENGTH - 1 for n in range(2 * SPIKE_LENGTH)]
    losses.add(usual(301))
    assert [bool(losses.add(math.nan)) for _ in range(3)] == [True, False, False]


def test_sbatch_gets_the_options_of_a_supervision() -> None:
    """Nodes that its own --exclude names stay; options of the job's script, and what follows, are not read."""
    job = ["a.sbatch", "runs", "core", "--", "train", "-x", "--array"]
    added = ["--parsable", "--no-requeue", "--comment=t"]
    cases = {
        (): ["--exclude=n1,n2", *job],
        ("--exclude=n3", "-N4"): ["--exclude=n1,n2,n3", "-N4", *job],
        ("--exclude", "n[3-4]"): ["--exclude=n1,n2,n[3-4]", *job],
        ("-x", "n3", "-N4"): ["--exclude=n1,n2,n3", "-N4", *job],
        ("-xn3",): ["--exclude=n1,n2,n3", *job],
    }
    for own, words in cases.items():
        assert sbatch_words(["sbatch", *own, *job], "t", ["n1", "n2"]) == ["sbatch", *added, *words]
    assert sbatch_words(["sbatch", "-xn3", *job], "t", []) == ["sbatch", *added, "-xn3", *job]
    for refused in ("--array=1-2", "-a1-2", "--wait", "--comment=mine", "--requeue"):
        with pytest.raises(OperatorError, match=refused.split("=")[0]):
            sbatch_words(["sbatch", refused, *job], "t", [])


def test_a_kill_from_outside_is_no_failure_of_the_program() -> None:
    """Also behind an error that the program survived. What the scheduler says of the kill, and an exit code above 192, count."""
    survived = diagnose_text("ValueError: bad sample 3, it is left out", state="FAILED")
    assert not decide_restart(End(code=1, cause=survived, progress=True), 1, unknown_before=False).restart
    for code in (137, 143):
        made = decide_restart(End(code=code, cause=survived, progress=False), 1, unknown_before=True)
        assert (made.restart, made.why) == (True, f"killed from outside, ended by signal {code - 128}")
        by_log = diagnose_text(
            "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-28T10:00:00 ***", state="FAILED"
        )
        for cause in (diagnose_state("CANCELLED"), by_log):
            assert not decide_restart(
                End(code=code, cause=cause, progress=True), 1, unknown_before=False
            ).restart
    assert (
        "exit code 255"
        in decide_restart(End(code=255, cause=UNKNOWN, progress=True), 1, unknown_before=False).why
    )


def test_slurms_word_decides_where_it_ended_the_job() -> None:
    """A preemption and a time limit are gone on from; a job that a person cancelled is not."""
    for state, restarts in {
        "PREEMPTED": True,
        "TIMEOUT": True,
        "NODE_FAIL": True,
        "CANCELLED": False,
        "OUT_OF_MEMORY": False,
    }.items():
        end = End(code=1, cause=diagnose_state(state), progress=False)
        assert decide_restart(end, 1, unknown_before=False).restart == restarts, state
