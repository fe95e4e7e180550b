"""Metric jobs without an evaluation: sets of small programs, their responses as a trial leaves them, and their specs.

Rule: the product's own code makes request sets, response records and specs; only the answers are made up here. No two
programs are alike, so a verdict belongs to one job alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.toys import TASKS

from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import EvaluationPaths, request_set_manifest
from evaljobs.contract.specs import (
    BuildSpec,
    ExecuteSpec,
    FrameRef,
    ModelOptions,
    RequestSetManifest,
    ScoreSpec,
    SuiteSpec,
    TaskEntry,
)
from evaljobs.contract.storage import FrameWriter, read_record
from evaljobs.requests import build

DOCUMENTS = 12  # of a set
PER_JOB = 3  # documents of an execute job
TASK = Path(__file__).with_name("programs.yaml")
ROWS = Path(__file__).with_name("programs.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A task and its request set. `common`: fields of all its jobs' specs."""

    number: int
    task: str
    request_set: str
    common: dict[str, Any]

    def dump(self, paths: EvaluationPaths) -> FrameRef:
        """All responses, as one shard's record."""
        shard = ShardResponses(
            task=self.task,
            key=read_record(request_set_manifest(self.request_set), RequestSetManifest).key,
            shard=f"{self.task}|0|{DOCUMENTS // 4}",
            trial="chaos",
            started_at=0.0,
            seconds=1.0,
            responses=tuple((index, f"answer {self.number}-{index}") for index in range(DOCUMENTS)),
        )
        with FrameWriter(paths.response_file(f"trial-{self.number}")) as writer:
            return writer.append(shard)

    def executes(
        self, paths: EvaluationPaths, frame: FrameRef, per_job: int = PER_JOB
    ) -> Iterator[ExecuteSpec]:
        for first in range(0, DOCUMENTS, per_job):
            yield ExecuteSpec(
                name=f"execute-{self.task}-{first}",
                evaluation_dir=str(paths.root),
                task=self.task,
                request_set=self.request_set,
                documents=tuple(range(first, min(first + per_job, DOCUMENTS))),
                frames=(frame,),
                **self.common,
            )

    def score(self, paths: EvaluationPaths, frame: FrameRef, attempt: int) -> ScoreSpec:
        return ScoreSpec(
            name=f"score-{self.task}-{attempt}",
            evaluation_dir=str(paths.root),
            request_sets={self.task: self.request_set},
            frames={self.task: (frame,)},
            bootstrap_iters=100,
            **self.common,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Sets of one folder, which several evaluations may score."""

    folder: Path
    model: Path
    sets: dict[int, Set] = field(default_factory=dict)

    def set(self, number: int) -> Set:
        """Set `number`, built where it is not there yet."""
        if number not in self.sets:
            # each in a folder of its own: reading a task lists the whole folder
            place = self.folder / "tasks" / f"{number}"
            place.mkdir(parents=True)
            shutil.copyfile(ROWS, place / "rows.py")
            shutil.copyfile(TASKS / "metrics.py", place / "metrics.py")
            text = TASK.read_text().replace("NUMBER", f"{number}").replace("DOCUMENTS", f"{DOCUMENTS}")
            (place / "task.yaml").write_text(text)
            task = f"chaos_{number}"
            tasks = (TaskEntry(name=task),)
            common = {
                "suite": SuiteSpec(name="chaos", include_path=(str(place),), batch_size=4, tasks=tasks),
                "entry": 0,
                "model_dir": str(self.model),
                "model": ModelOptions(device="cpu", threads=1),
            }
            places = {"evaluation_dir": str(self.folder), "out_dir": str(self.folder / "sets" / str(number))}
            built = build.build(BuildSpec(name=f"build-{number}", batch_size=4, **places, **common))
            self.sets[number] = Set(number=number, task=task, request_set=built.sets[task], common=common)
        return self.sets[number]
