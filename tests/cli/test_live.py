"""Laws of the live screen: it fits any terminal, shows lanes, metrics and scores, and its ETA moves from prior to measure."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.trainings import leave, results

from coordinator.cli.live_screen import Scores, Watcher, apart, eta_seconds, screen
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import EntryState, NodeUse, ShardState, State, Trial
from coordinator.report.render import by_reason
from evaljobs.contract.specs import FrameRef
from evaljobs.queue.work_queue import Progress, QueueSnapshot

DONE = FrameRef(file="a.frames", offset=0, length=1)


def running(folder: Path, *, shards: int = 12, done: int = 5, lanes: int = 3) -> Any:
    """An evaluation in the middle: one task scored, one to infer, `lanes` trials at work on two nodes."""
    paths = leave(folder / "work", 1000, None)
    record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    file = folder / "scores.json"
    file.write_text(json.dumps(results(0.25)))
    state = State(
        record=record,
        entries=[
            EntryState(index=0, name="add", status="scored", result_file=str(file)),
            EntryState(index=1, name="a_task_with_a_rather_long_name", status="built"),
        ],
        batch_size=8,
    )
    state.plan.made_at, state.plan.predicted_makespan_seconds = record.accepted_at + 10, 100.0
    for i in range(shards):
        state.shards.by_name[f"t|0|{i}"] = ShardState(
            rank=i, seconds=10.0, lane="n1/0", frame=DONE if i < done else None
        )
    state.shards.todo = shards - done
    state.nodes.by_name = {"n1": NodeUse(name="n1", lanes=lanes, status="ready")}
    names = [f"es-1-trial-n1-a0.{i}" for i in range(lanes)]
    for i, name in enumerate(names):
        trial = Trial(name=name, job="es-1-trial-n1-a0", member=i, lane=f"n{1 + i // 8}/{i % 8}")
        state.trials.by_name[name] = state.trials.live[name] = trial
    progress = Progress(phase="infer", shard="hellaswag|0|12", batches_done=3, batches=9)
    snapshot = QueueSnapshot(
        epoch="plan-1", unclaimed=1, claims={}, claimed_at={}, trials=dict.fromkeys(names[1:], progress)
    )
    return SimpleNamespace(state=state, snapshot=snapshot)


def drawn(one: Any, width: int) -> str:
    out = io.StringIO()
    now = one.state.record.accepted_at + 60
    Console(file=out, width=width).print(screen([one], "no news of jobs", width, now=now, scores=Scores()))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screen_fits_and_tells_all(tmp_path, width):
    """Lanes with their shard and batches, one pending; shards, trials, ETA; the score of the task that is scored."""
    text = drawn(running(tmp_path), width)
    for part in (
        "5/12 shards",
        "3/3 trials",
        "ETA",
        "n1/0 pending",
        "hellaswag 0 12 3/9",
        "1/2 tasks scored",
    ):
        assert part in text, text
    assert "add exact_match 0.2500 ± 0.0100" in text, "whole, if need be on a line of its own"
    assert "no news of jobs" in text
    assert max(map(len, text.splitlines())) <= width


def test_many_lanes_are_told_by_node(tmp_path):
    """A line a node, in the order of their numbers, with how many of its trials do what."""
    lines = [line.strip() for line in drawn(running(tmp_path, lanes=96), 80).splitlines()]
    nodes = [line for line in lines if line.endswith(("infer", "pending"))]
    assert nodes[0] == "n1  7 infer, 1 pending"
    assert [line.split()[0] for line in nodes] == [f"n{i}" for i in range(1, 13)]


@given(st.integers(0, 12), st.floats(0, 1000))
def test_the_eta_is_never_negative_and_ends_with_the_last_shard(tmp_path_factory, done, elapsed):
    """Nothing before there is a plan and after the last shard; with nothing done it is the prior's word."""
    state = running(tmp_path_factory.mktemp("eta"), done=done).state
    now = state.plan.made_at + elapsed
    eta = eta_seconds(state, now)
    if done == 12:
        assert eta is None
    else:
        assert eta is not None
        assert eta >= 0
        if done == 0:
            assert eta == pytest.approx(max(0.0, 100.0 - elapsed), abs=1e-3)
    state.plan.made_at = None
    assert eta_seconds(state, now) is None


@pytest.mark.parametrize("dumb", [False, True])
def test_in_a_pipe_each_change_and_each_score_is_a_line(tmp_path, dumb):
    """At a terminal that cannot move its cursor, too: whole lines without colour that name the evaluation; the score once, with its error; nothing repeated."""
    out = io.StringIO()
    one = running(tmp_path)
    console = Console(file=out, width=40, force_terminal=dumb, color_system=None, _environ={"TERM": "dumb"})
    with Watcher(console) as watcher:
        watcher.show([one], "")
        watcher.show([one], "")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, lines
    assert all("step-1000-mini-00001000" in line for line in lines)
    assert "exact_match 0.2500 ± 0.0100" in lines[0]
    assert lines[1].endswith("inference, 5/12 shards, 1/2 scored")


def test_what_ended_sixty_tasks_is_told_once(tmp_path):
    """In the screen, in a pipe and in a listing: the first names, how many more, and the reason, in one line."""
    one = running(tmp_path)
    why = "cancelled: stale: step-3 is newer"
    one.state.entries = [
        EntryState(index=i, name=f"task{i}", status="failed", error=why if i else "no data")
        for i in range(60)
    ]
    told = [f"task1, task2, task3 and 56 more: {why}", "task0: no data"]
    out = io.StringIO()
    with Watcher(Console(file=out, width=200, color_system=None)) as watcher:
        watcher.show([one], "")
        watcher.show([one], "")
    errors = {e.name: e.error for e in one.state.entries}
    for text in (out.getvalue(), drawn(one, 200)):
        for line in told:
            assert text.count(line) == 1, text
        assert text.count("cancelled") == 1
    assert by_reason(errors) == dict(line.split(": ", 1) for line in told)


def test_lanes_of_long_names_are_shown_where_they_differ() -> None:
    """What all nodes share at their beginning goes, so that a narrow terminal cuts no part that tells them apart."""
    long = [f"gpu-node-of-the-very-long-named-cluster-in-building-{i:04d}/{i}" for i in (1, 2, 3)]
    assert list(apart(long).values()) == ["...-0001/1", "...-0002/2", "...-0003/3"]
    assert apart(["n1/0", "n2/1"]) == {"n1/0": "n1/0", "n2/1": "n2/1"}
    assert apart([]) == {}
