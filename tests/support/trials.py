"""Trials of a small request set, as the cluster runs them: own processes on a real Redis."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import batch_index_file
from evaljobs.contract.specs import (
    BatchIndex,
    BuildSpec,
    LaneSpec,
    ModelOptions,
    SuiteSpec,
    TaskEntry,
    TrialSpec,
)
from evaljobs.contract.storage import read_frames, read_record, write_record
from evaljobs.queue.redis_client import Link
from evaljobs.queue.work_queue import QueuedShard, WorkQueue
from evaljobs.requests import build as requests

TASKS = Path(__file__).resolve().parent / "exactness" / "tasks"
TASK = "toy_sums"
OPTIONS = ModelOptions(device="cpu", threads=1)
DEADLINE = 200.0


def on_a_small_gpu(tokens, env=os.environ):
    """Variables of a trial whose model has memory for so many tokens of a forward pass."""
    path = [str(Path(__file__).parent / "small_gpu"), *filter(None, [env.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "SMALL_GPU_TOKENS": str(tokens)}


def built(task, model, evaluation, out, options=OPTIONS, **suite):
    """The request sets of six documents of a toy task, in batches of 2."""
    tasks = (TaskEntry(name=task, limit=6),)
    spec = BuildSpec(
        name="build",
        evaluation_dir=str(evaluation),
        suite=SuiteSpec(name="s", include_path=(str(TASKS),), tasks=tasks, **suite),
        entry=0,
        batch_size=2,
        model_dir=str(model),
        model=options,
        out_dir=str(out),
    )
    return requests.build_request_sets(spec).sets


class Evaluation:
    """A request set in one-batch shards, its queue, and trials on it."""

    def __init__(self, work, model, name, task=TASK, **suite):
        self.work, self.model, self.name = work, model, name
        self.paths = work.evaluation(name)
        self.queue = WorkQueue(Link(work.redis_address), name)
        asked = zlib.crc32(repr((task, str(model), suite)).encode())  # tests of the same requests share them
        self.sets = built(task, model, self.paths.root, work.request_sets / f"{asked:x}", **suite)
        index = read_record(batch_index_file(self.sets[task], 2), BatchIndex)
        self.shards = [str(ShardId(task, n, n + 1)) for n in range(len(index.requests))]

    def fill(self, lanes=1):
        # no prediction: no shard counts as late or is copied, however slow this machine is
        queued = [QueuedShard(shard=s, rank=0.0, seconds=0.0) for s in self.shards]
        self.queue.fill({f"lane{i}": queued[i::lanes] for i in range(lanes)}, "epoch")

    def spec(self, **changes):
        fields = {
            "name": "trial",
            "evaluation_dir": str(self.paths.root),
            "evaluation_id": self.name,
            "node": "here",
            "model_path": str(self.model),
            "model": OPTIONS,
            "batch_size": 2,
            "request_sets": self.sets,
            "redis_file": str(self.work.redis_address),
            "lanes": tuple(LaneSpec(lane=f"lane{i}", trial=f"trial.{i}") for i in range(2)),
        }
        return TrialSpec.model_validate(fields | changes)

    def start(self, member=0, *, environment=None, **changes):
        place = self.paths.spec(f"trial{member}")
        write_record(place, self.spec(**changes))
        return subprocess.Popen(
            [sys.executable, "-m", "evaljobs", "trial", str(place)],
            env={**os.environ, "EVALSPAN_INDEX": str(member), **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def dumped(self):
        files = sorted(self.paths.responses.glob("*.frames"))
        return [head.shard for file in files for _, head in read_frames(file)]


def finish(process):
    """The trial's log; fails if the trial does not end in time."""
    try:
        return process.communicate(timeout=DEADLINE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
