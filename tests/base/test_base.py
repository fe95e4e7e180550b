"""Helpers of every room: commands end with their children, what is repeated is due in time, clocks jump, folders are listed."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
from dev_cluster.testing import wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.simulated.parts import Faults
from support.simulated.world import World

from coordinator.base import clock, process_identity
from coordinator.base.clock import Throttle
from coordinator.base.listing import ANYWAY_SECONDS, SETTLED_SECONDS, Listing
from coordinator.base.run_command import CommandError, run_command
from coordinator.base.signals import cancelled_by_slurm, shows_cancelled

# --- commands and processes ------------------------------------------------------------------------------------------


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    """Also a child that holds the command's pipes: a wrapper script cannot keep its caller waiting."""
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(CommandError, match=r"^timed out after 0\.5 s$") as raised:
        run_command(["sh", "-c", f"sleep 1000 > {held} & sleep 1000"], seconds=0.5)
    assert (raised.value.timed_out, raised.value.code) == (True, None)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "end of file once the last writer is dead"
    os.close(reader)


@pytest.mark.parametrize(
    ("argv", "says", "code", "stderr"),
    [
        (["sh", "-c", "echo first >&2; echo second >&2; exit 3"], "second", 3, "first\nsecond\n"),
        (["sh", "-c", "exit 4"], "exit status 4", 4, ""),
        (["/none"], "cannot be run: No such file or directory", None, ""),
    ],
)
def test_a_command_that_fails_says_why_in_one_line(argv, says, code, stderr):
    """Its last line, or its exit status where it is silent, or why it was not started. Output that is no text is no error:
    standard input goes in, and bytes that are no UTF-8 come out replaced.
    """
    with pytest.raises(CommandError, match=f"^{says}$") as raised:
        run_command(argv, seconds=60)
    assert (raised.value.code, raised.value.stderr) == (code, stderr)
    assert run_command(["sh", "-c", r"cat; printf '\377'"], seconds=60, stdin="in ") == "in \ufffd"


# Its first thread ends; another one lives until it is killed.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=ctypes.CDLL(None).sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_has_ended_with_the_last_of_its_threads():
    """The kernel calls it a zombie before: a server that was killed holds its port until then."""
    process = subprocess.Popen([sys.executable, "-c", HEADLESS])

    def headless():
        seen = process_identity.read_stat(process.pid)
        return seen is not None and seen.state == "Z"

    try:
        wait_until(headless)
        assert process.poll() is None
        known = process_identity.identify_process(process.pid)
        assert process_identity.is_alive(known)
        process.kill()
        wait_until(lambda: not process_identity.is_alive(known))
    finally:
        process.kill()
        process.wait()


# what SIGTERM means within a job, read from `scontrol --oneliner show job` as Slurm 22.05 printed it at that moment
JOB = "JobId=1 JobName=x JobState={} Reason={} Dependency=(null) Requeue=1 Restarts={} BatchFlag=1 PreemptTime={}"


@pytest.mark.parametrize(
    ("text", "before", "cancelled"),
    [
        (JOB.format("COMPLETING", "None", 0, None), 0, True),
        (JOB.format("CANCELLED", "None", 2, None), 2, True),
        (JOB.format("COMPLETING", "None", 1, None), 0, False),  # requeued, by hand or by preemption
        (JOB.format("COMPLETING", "TimeLimit", 0, None), 0, False),
        (
            JOB.format("RUNNING", "None", 0, None),
            0,
            False,
        ),  # a signal alone, or the warning before preemption
        (JOB.format("COMPLETING", "None", 0, "2026-11-23T06:58:01"), 0, False),  # PreemptMode=CANCEL
        ("", 0, False),
        ("slurm_load_jobs error: Unable to contact slurm controller", 0, False),
    ],
)
def test_only_a_cancelled_job_is_taken_for_one(text, before, cancelled):
    """One that Slurm requeues, preempts, ends at its limit or only signals leaves its evaluation to the next run. So does one
    of which Slurm says nothing, also where the command is not there or there is no job.
    """
    assert shows_cancelled(text, before) == cancelled
    assert not cancelled_by_slurm({})


# --- time ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=30), st.integers(0, 10))
def test_a_repeated_action_is_due_once_an_interval(asked, every):
    """The first time it is due; then never sooner than the interval, and at the first question after it."""
    throttle, last, now = Throttle(), {}, 0
    for action, passed in asked:
        now += passed
        due = action not in last or now - last[action] >= every
        assert throttle.due(action, every, now) == due
        if due:
            last[action] = now


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_set_clock_makes_nothing_due_sooner_or_later(monkeypatch, jump):
    """What is done every ten seconds is neither done at once nor in an hour; what follows a journal is not before its last
    event. An evaluation that is restarted in mid-inference with another time of day waits for no hour to pass.
    """
    throttle, wall = Throttle(), time.time
    assert throttle.due("jobs", 10.0, clock.now())
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + jump)
        assert not throttle.due("jobs", 10.0, clock.now())
        assert throttle.due("jobs", 10.0, clock.now() + 10.0)
        patch.setattr(clock, "_start", clock._start)
        later = clock.now() + 3600.0
        clock.not_before(later)
        assert later <= clock.now() < later + 60.0
        clock.not_before(later - 7200.0)
        assert clock.now() >= later
    world = World(5, Faults(submit_timeout=0.3, vanish=0.3))
    while not world.claims:
        world.tick()
    world.now += jump
    before = world.now
    world.restart()
    world.run_to_scores()
    assert world.now - before < 1800


# --- listings --------------------------------------------------------------------------------------------------------

STAMP = 1_700_000_000


def names(listing, now):
    with listing.news(now) as entries:
        return None if entries is None else sorted(e.name for e in entries)


def test_a_folder_that_stands_still_is_not_listed_again(tmp_path):
    """Once its stamp has stood for longer than the coarsest stamps of file systems; now and then it is listed anyway. A listing
    that was cut short is none.
    """
    (tmp_path / "a").touch()
    listing, cut_short = Listing(tmp_path), Listing(tmp_path)
    assert names(listing, 0.0) == ["a"]
    assert names(listing, SETTLED_SECONDS / 2) == ["a"]
    assert names(listing, SETTLED_SECONDS) == ["a"]
    assert names(listing, SETTLED_SECONDS + 1) is None
    assert names(listing, SETTLED_SECONDS + ANYWAY_SECONDS) == ["a"]
    for now in (0.0, 9.0):
        with contextlib.suppress(ConnectionError), cut_short.news(now) as entries:
            assert entries is not None
            raise ConnectionError
    assert names(cut_short, 10.0) == ["a"]


@some(8)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), min_size=1, max_size=8))
def test_a_new_entry_is_found_however_coarse_the_stamps_are(tmp_path_factory, steps):
    """Stamps in whole SETTLED_SECONDS: at the latest look after that time, all that is there is known."""
    folder = tmp_path_factory.mktemp("f")
    listing, now, known = Listing(folder), 0.0, []
    for number, (seconds, makes) in enumerate(steps):
        now += seconds
        if makes:
            (folder / str(number)).touch()
        coarse = STAMP + now // SETTLED_SECONDS * SETTLED_SECONDS
        os.utime(folder, (coarse, coarse))
        known = names(listing, now) or known
    known = names(listing, now + SETTLED_SECONDS) or known
    assert known == sorted(e.name for e in folder.iterdir())
