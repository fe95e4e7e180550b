"""How long a restarted coordinator takes to have its state again from a journal."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from coordinator import machine
from coordinator import messages as m
from coordinator.records import EvaluationRecord, RunOptions
from coordinator.specs import Site
from coordinator.store import Journal, read_events
from evaljobs.contract import CheckpointFile, CheckpointSpec, FrameRef, ModelOptions, SuiteSpec, TaskEntry
from evaljobs.paths import shard_id

TASKS = 60


def _journal(events: int) -> list[m.AnyEvent]:
    """An evaluation in mid-run: planned into one shard an event, each dumped and told by an event of its own."""
    weights = CheckpointFile(name="model.safetensors", size=1 << 30, mtime_ns=1)
    record = EvaluationRecord(
        evaluation_id="bench-suite-00000000",
        checkpoint=CheckpointSpec(source="/c", digest="d", files=(weights,)),
        suite=SuiteSpec(
            name="suite", batch_size=8, tasks=tuple(TaskEntry(name=f"task{i}") for i in range(TASKS))
        ),
        model=ModelOptions(),
        options=RunOptions(),
        accepted_at=0.0,
    )
    each = max(1, events // TASKS)
    folders = {i: f"/sets/{i}" for i in range(TASKS)}
    sets = {i: {f"task{i}": f"/sets/{i}/task{i}"} for i in range(TASKS)}
    shards = {i: tuple(shard_id(f"task{i}", n, n + 1) for n in range(each)) for i in range(TASKS)}

    def leaf(i: int) -> m.PlannedLeaf:
        name = f"task{i}"
        known = {
            "key": "k",
            "folder": sets[i][name],
            "executes": False,
            "sampled": False,
            "documents": 8 * each,
        }
        return m.PlannedLeaf(task=name, entry=i, shards=shards[i], **known)

    planned = tuple((s, 0.0, 1.0) for i in shards for s in shards[i])
    spans = {"predicted_makespan_seconds": 1.0, "lower_bound_seconds": 1.0, "gpu_seconds": 1.0}
    found: list[m.AnyEvent] = [
        m.Accepted(at=0.0, record=record),
        m.RequestSetsFound(at=0.0, sets=sets, folders=folders, batch_size=8),
        m.NodesOffered(at=0.0, offers=(m.Offer(node="n1", gpus=8, memory_mb=64_000),)),
        m.Planned(
            at=0.0,
            batch_size=8,
            leaves=tuple(map(leaf, range(TASKS))),
            lanes=(m.PlannedLane(lane="n1/0", node="n1", shards=planned),),
            **spans,
        ),
    ]
    # the last shard of each task is still to come, so that the evaluation is in the midst of its run
    for i in range(TASKS):
        for number, shard in enumerate(shards[i][:-1]):
            frame = FrameRef(file=f"t{i}.frames", offset=number, length=1)
            found.append(m.ShardsDumped(at=1.0, shards=((shard, frame),)))
    return found


def replay(events: int) -> dict[str, Any]:
    """Write a journal of about `events` events, read it back as a restarted coordinator does."""
    folders = Site(work_dir="/w", trial_command=("python",), worker_command=("python",))
    with tempfile.TemporaryDirectory() as place_:
        path = Path(place_) / "journal.jsonl"
        journal = Journal(path)
        journal.append(_journal(events))
        journal.close()
        started, cpu = time.perf_counter(), time.process_time()
        state = None
        count = 0
        for event in read_events(path):
            count += 1
            if isinstance(event, m.Accepted):
                state, _ = machine.start(event)
            elif state is not None:
                machine.step(state, folders, event)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        size = path.stat().st_size
    assert state is not None
    assert state.todo == TASKS
    return {"events": count, "journal_mb": round(size / 1e6, 1), "seconds": seconds, "cpu_seconds": cpu}
