"""Helpers of every room: commands end with their children, repeated actions are due in time, steps end no loop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.run_command import CommandError, run_command
from coordinator.base.throttle import Throttle


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    """Also a child that holds the command's pipes: a wrapper script cannot keep its caller waiting."""
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(CommandError, match=r"^timed out after 0\.5 s$") as raised:
        run_command(["sh", "-c", f"sleep 1000 > {held} & sleep 1000"], seconds=0.5)
    assert raised.value.timed_out
    assert raised.value.code is None
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "end of file once the last writer is dead"
    os.close(reader)


def test_a_command_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    """Its last line, or its exit status where it is silent, or why it was not started."""
    with pytest.raises(CommandError, match=r"^second$") as raised:
        run_command(["sh", "-c", "echo first >&2; echo second >&2; exit 3"], seconds=60)
    assert (raised.value.code, raised.value.stderr) == (3, "first\nsecond\n")
    with pytest.raises(CommandError, match=r"^exit status 4$"):
        run_command(["sh", "-c", "exit 4"], seconds=60)
    with pytest.raises(CommandError, match=r"^cannot be run: No such file or directory$") as missing:
        run_command([str(tmp_path / "none")], seconds=60)
    assert missing.value.code is None


def test_output_that_is_no_text_is_no_error() -> None:
    """Standard input goes in, and bytes that are no UTF-8 come out replaced."""
    assert run_command(["sh", "-c", r"cat; printf '\377'"], seconds=60, stdin="in ") == "in \ufffd"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=30), st.integers(0, 10))
def test_a_repeated_action_is_due_once_an_interval(asked: list[tuple[str, int]], every: int) -> None:
    """The first time it is due; then never sooner than the interval, and at the first question after it."""
    throttle = Throttle()
    last: dict[str, int] = {}
    now = 0
    for action, passed in asked:
        now += passed
        due = action not in last or now - last[action] >= every
        assert throttle.due(action, every, now) == due
        if due:
            last[action] = now
