"""Laws of the live screen: it fits any terminal, uses a wide one, shows lanes, metrics and scores, and says what is left."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.text import Text
from support.trainings import leave, results

from coordinator.cli.screen import live_screen
from coordinator.cli.screen.lanes import apart
from coordinator.cli.screen.live_screen import ALIVE_SECONDS, Shown, Watcher, screen
from coordinator.cluster import Job, JobState
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import EntryState, JobInfo, NodeUse, Phase, ShardState, State, Trial
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.render import by_reason
from coordinator.runtime import drive
from coordinator.runtime.summarise import summary_of
from coordinator.runtime.summary import groups_or_tasks, read_json
from evaljobs.contract.specs import FrameRef
from evaljobs.queue.work_queue import Progress, QueueSnapshot

DONE = FrameRef(file="a.frames", offset=0, length=1)


class Run(NamedTuple):
    """An evaluation under way, and what its coordinator sees of it."""

    state: State
    snapshot: QueueSnapshot
    listed: tuple[JobState, ...] = ()

    def shown(self, after: float = 60.0) -> Shown:
        """`after`: seconds since its acceptance."""
        now = self.state.record.accepted_at + after
        return Shown(summary_of(self.state, now, self.snapshot, self.listed, values))


def values(entry: EntryState) -> tuple[ScoreValue, ...]:
    return groups_or_tasks(read_json(Path(entry.result_file)))


def running(folder: Path, *, shards: int = 12, done: int = 5, lanes: int = 3) -> Run:
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
    job = JobInfo(job=Job(name="es-1-trial-n1-a0", argv=(), log="", count=lanes), phase="submitted")
    job.members = dict.fromkeys(range(lanes), "running")
    job.changed_at = record.accepted_at + 10
    state.jobs.by_name[job.job.name] = job
    names = [f"es-1-trial-n1-a0.{i}" for i in range(lanes)]
    for i, name in enumerate(names):
        trial = Trial(name=name, job="es-1-trial-n1-a0", member=i, lane=f"n{1 + i // 8}/{i % 8}")
        state.trials.by_name[name] = state.trials.live[name] = trial
    state.index.running.update(names[1:])
    progress = Progress(phase="infer", shard="hellaswag|0|12", batches_done=3, batches=9)
    snapshot = QueueSnapshot(
        epoch="plan-1", unclaimed=1, claims={}, claimed_at={}, trials=dict.fromkeys(names[1:], progress)
    )
    return Run(state, snapshot)


def drawn(*runs: Run, width: int, height: int | None = None, below: tuple[Text, ...] = ()) -> str:
    out = io.StringIO()
    now = runs[0].state.record.accepted_at + 60
    shown = screen([r.shown() for r in runs], "no news of jobs", width, now=now, below=below, height=height)
    Console(file=out, width=width).print(shown)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_screen_fits_and_says_all(tmp_path, width):
    """Step, checkpoint, suite and id; lanes with task and batch, one pending; shards, time left; the score of the scored task."""
    text = drawn(running(tmp_path), width=width)
    words = " ".join(text.split())
    for part in (
        "step 1000 a/step-1000 suite mini",
        "step-1000-mini-00001000",
        "5/12 shards 3 trials",
        "inference 60.0 s so far, about",
        "pending",
        "inferring",
        "hellaswag",
        "3 of 9",
        "1/2 tasks scored",
        "add exact_match 0.2500 ± 0.0100",
        "to infer: a_task_with_a_rather_long_name",
        "no news of jobs",
    ):
        assert part in words, text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_wide_terminal_shows_lanes_abreast(tmp_path, width):
    """One row holds as many lanes as fit, below a heading for each; every lane is there once."""
    lines = drawn(running(tmp_path, lanes=8), width=width).splitlines()
    heads = next(line for line in lines if line.split()[:2] == ["node", "lane"])
    abreast = heads.count("node")
    assert abreast == {80: 1, 120: 2, 200: 4}[width]
    rows = [line for line in lines if line.strip().startswith("n1 ")]
    assert len(rows) == -(-8 // abreast)
    assert sum(row.count("n1 ") for row in rows) == 8


def test_many_lanes_are_counted_by_node(tmp_path):
    """A line a node, in the order of their numbers, with how many of its trials do what."""
    lines = [line.strip() for line in drawn(running(tmp_path, lanes=96), width=80).splitlines()]
    nodes = [line for line in lines if line.endswith(("inferring", "pending"))]
    assert nodes[0].split() == ["n1", "7", "inferring,", "1", "pending"]
    assert [line.split()[0] for line in nodes] == [f"n{i}" for i in range(1, 13)]


@pytest.mark.parametrize("height", [12, 24, 40])
def test_a_low_terminal_keeps_every_evaluation_and_what_stands_below(tmp_path, height):
    """Lanes and scores make room first; what cannot be shown is announced."""
    many = [running(tmp_path / str(i), lanes=3) for i in range(4)]
    lines = drawn(*many, width=80, height=height, below=(Text("daemon: running"),)).splitlines()
    assert len(lines) <= height
    assert lines[-1] == "daemon: running"
    headings = sum(line.startswith("step 1000") for line in lines)
    assert headings == 4 or "evalspan status" in "".join(lines)


def test_the_clusters_reason_for_a_pending_job_is_on_the_screen(tmp_path):
    """A trial of three is pending; the reason of a job of another evaluation is not shown."""
    one = running(tmp_path)
    (job,) = one.state.jobs.by_name.values()
    job.members[0] = "pending"
    one.state.jobs.live.add(job.job.name)
    listed = tuple(
        JobState(job_id="7", name=name, index=0, phase="pending", state="PENDING", reason=reason)
        for name, reason in ((job.job.name, "Resources"), ("es-2-trial-n1-a0", "Priority"))
    )
    text = " ".join(drawn(one._replace(listed=listed), width=80).split())
    assert (
        "a trial is pending for 50.0 s: no node has enough free GPUs, CPUs or memory yet (Resources)" in text
    )
    assert "Priority" not in text


@pytest.mark.parametrize("dumb", [False, True])
def test_in_a_pipe_each_change_and_each_score_is_a_line(tmp_path, dumb):
    """At a terminal that cannot move its cursor, too: whole lines without colour that name the evaluation; the score once, with its error; nothing repeated."""
    out = io.StringIO()
    one = running(tmp_path)
    console = Console(file=out, width=40, force_terminal=dumb, color_system=None, _environ={"TERM": "dumb"})
    with Watcher(console) as watcher:
        watcher.show([one.shown()], "")
        watcher.show([one.shown()], "")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, lines
    assert all("step-1000-mini-00001000" in line for line in lines)
    assert "exact_match 0.2500 ± 0.0100" in lines[0]
    assert lines[1].endswith("inference, 5/12 shards, 1/2 scored")


def test_in_a_pipe_a_long_stage_gives_a_sign_of_life(tmp_path, monkeypatch):
    """The same line again once ALIVE_SECONDS have passed, and not before."""
    out, now = io.StringIO(), [1000.0]
    one = running(tmp_path)
    monkeypatch.setattr(live_screen.time, "time", lambda: now[0])
    with Watcher(Console(file=out, width=200, color_system=None)) as watcher:
        for now[0] in (1000.0, 1000.0 + ALIVE_SECONDS - 1, 1000.0 + ALIVE_SECONDS, 1001.0 + ALIVE_SECONDS):
            watcher.show([one.shown()], "")
    assert out.getvalue().count("inference, 5/12 shards, 1/2 scored") == 2


def test_progress_of_a_call_gives_a_sign_of_life(tmp_path, monkeypatch):
    """Of `evalspan.evaluate(progress=…)`: what has changed at once, what has not after drive.ALIVE_SECONDS."""
    seen, now = [], [1000.0]
    one = running(tmp_path)
    monkeypatch.setattr(drive.time, "monotonic", lambda: now[0])
    caller = drive.Caller(seen.append)
    for now[0] in (1000.0, 999.0 + drive.ALIVE_SECONDS, 1000.0 + drive.ALIVE_SECONDS):
        caller._show(one.shown().summary, "")
    caller._show(one.shown().summary, "Redis is away")
    assert [progress.trouble for progress in seen] == ["", "", "Redis is away"]


def test_in_a_pipe_a_back_off_has_its_reason(tmp_path):
    out = io.StringIO()
    one = running(tmp_path)
    one.state.nodes.by_name = {
        "n1": NodeUse(name="n1", lanes=1, status="back-off", why="3 trials died", back_off_until=2.0)
    }
    with Watcher(Console(file=out, width=200, color_system=None)) as watcher:
        watcher.show([one.shown()], "")
    assert "1/2 scored: n1: in back-off: 3 trials died" in out.getvalue()


def test_after_the_end_the_time_is_whole(tmp_path):
    """The last frame shows the makespan, whenever it is drawn, and not a time that runs on."""
    one = running(tmp_path)
    one.state.ending.phase = Phase.ENDED
    one.state.ending.ended_at = one.state.record.accepted_at + 79.1
    text = drawn(one, width=80)
    assert "ended  79.1 s" in text
    assert "so far" not in text


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
        watcher.show([one.shown()], "")
        watcher.show([one.shown()], "")
    errors = {e.name: e.error for e in one.state.entries}
    for text in (out.getvalue(), drawn(one, width=200)):
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
