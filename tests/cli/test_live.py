"""Laws of the live screen on low terminals, and of the lines that it prints without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from support.screens import NOW, drawn, ended, running

from coordinator.cli.screen import live_screen
from coordinator.cli.screen.live_screen import ALIVE_SECONDS, Watcher
from coordinator.cli.screen.standing import Shown
from coordinator.runtime import drive
from coordinator.runtime.summary import Node, Summary, Task


@pytest.mark.parametrize("height", [12, 24, 40])
def test_a_low_terminal_keeps_every_evaluation_and_what_stands_below(height: int) -> None:
    """Lanes and scores make room first; what cannot be shown is announced."""
    many = [Shown(running(f"step-{i}-mini-0000000{i}")) for i in range(1, 9)]
    lines = drawn(120, *many, below=["daemon: running"], height=height).splitlines()
    assert len(lines) <= height
    assert lines[-1] == "daemon: running"
    text = "\n".join(lines)
    assert all(one.summary.evaluation_id in text for one in many) or "`evalspan status` lists all" in text
    assert ("n1/1" in drawn(120, many[0], height=height)) == (height > 12)


def lines_of(*summaries: Summary, **console: Any) -> list[str]:
    """What a pipe gets of an evaluation that is shown again and again."""
    out = io.StringIO()
    with Watcher(Console(file=out, color_system=None, **console)) as watcher:
        for summary in summaries:
            watcher.show([Shown(summary)], "")
        watcher.show([], "", [Shown(ended(summaries[0].evaluation_id))])
    return out.getvalue().splitlines()


@pytest.mark.parametrize("dumb", [False, True])
def test_in_a_pipe_each_change_and_each_score_is_a_line(dumb: bool) -> None:
    """At a terminal that cannot move its cursor, too: whole lines that name the evaluation; a score once, with its error."""
    one = running(nodes=(Node(name="n1", status="back-off", why="3 trials died"),), waits_until=NOW + 9)
    lines = lines_of(one, one, width=40, force_terminal=dumb, _environ={"TERM": "dumb"})
    assert all(one.evaluation_id in line for line in lines)
    assert [line.partition(f"{one.evaluation_id}: ")[2] for line in lines] == [
        "add: exact_match 0.2500 ± 0.0100",
        "inference, 5/12 shards, 1/2 scored: n1: in back-off: 3 trials died",
        "ended, 4/4 scored: hellaswag acc 0.2500, arc_challenge acc 0.2500, winogrande acc 0.2500, mmlu acc 0.2500",
    ]


def test_what_ended_sixty_tasks_is_told_once() -> None:
    """In the screen and in a pipe: the first names, how many more, and the reason, in one line."""
    why = "cancelled: stale: step-3 is newer"
    tasks = tuple(Task(name=f"task{i}", state="failed", error=why if i else "no data") for i in range(60))
    one = running(tasks=tasks)
    for text in ("\n".join(lines_of(one, one, width=200)), drawn(200, Shown(one))):
        assert text.count(f"task1, task2, task3 and 56 more: {why}") == 1, text
        assert text.count("task0: no data") == 1
        assert text.count("cancelled") == 1


def test_in_a_pipe_a_long_stage_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same line again once ALIVE_SECONDS have passed, and not before."""
    out, now = io.StringIO(), [NOW]
    monkeypatch.setattr(live_screen.time, "time", lambda: now[0])
    with Watcher(Console(file=out, width=200, color_system=None)) as watcher:
        for seconds in (0.0, ALIVE_SECONDS - 1, ALIVE_SECONDS, ALIVE_SECONDS + 1):
            now[0] = NOW + seconds
            watcher.show([Shown(running())], "")
    assert out.getvalue().count("inference, 5/12 shards, 1/2 scored") == 2


def test_progress_of_a_call_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `evalspan.evaluate(progress=…)`: what has changed at once, what has not after drive.ALIVE_SECONDS."""
    seen, now = [], [1000.0]
    monkeypatch.setattr(drive.time, "monotonic", lambda: now[0])
    caller = drive.Caller(seen.append)
    for now[0] in (1000.0, 999.0 + drive.ALIVE_SECONDS, 1000.0 + drive.ALIVE_SECONDS):
        caller._show(running(), "")
    caller._show(running(), "Redis is away")
    assert [progress.trouble for progress in seen] == ["", "", "Redis is away"]
