"""Metric jobs without an evaluation: sets of small programs, their responses as a trial leaves them, and their specs.

Rule: request sets, response records and specs are made by the code that makes them in earnest; only the answers are
ours. Every program is another one, so a verdict is of one job and no other.
It does not know: queues, workers, what is done to them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lib.site import TASKS, toy_model
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
PER_JOB = 3  # of an execute job
ROWS = """
import datasets

KINDS = ("f(1) >= 1", "f(1) == -1", "f('') == 0", "f(1) >= 1", "f(None) or True")


def load(*, number, documents, **_metadata):
    made = []
    for document in range(documents):
        place = number * documents + document
        body = f"    import time; time.sleep({place % 6 / 10})\\n    return x + {place % 9}\\n"
        if place % 40 == 5:
            body = "    while x: pass\\n"
        name = f"f{number}_{document}"
        made.append({
            "prompt": f"def {name}(x):\\n{body}# ",
            "test": f"def check(f):\\n    assert {KINDS[place % len(KINDS)]}\\n",
            "entry_point": name,
        })
    return {"test": datasets.Dataset.from_list(made)}
"""
TASK = """
task: chaos_{number}
custom_dataset: !function rows.load
unsafe_code: true
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{test}}}}\\ncheck({{{{entry_point}}}})"
generation_kwargs: {{until: ["\\ndef"], do_sample: false, max_gen_toks: 8}}
metric_list:
  - {{metric: !function metrics.pass_at_k, aggregation: mean, higher_is_better: true, k: [1]}}
filter_list:
  - name: create_test
    filter: [{{function: custom, filter_fn: !function metrics.with_prompt}}]
metadata: {{version: 1.0, number: {number}, documents: {documents}}}
"""


@dataclass(slots=True)
class Work:
    """Sets of one folder, which several evaluations may score."""

    folder: Path
    model: Path = field(init=False)
    tasks: Path = field(init=False)
    _sets: dict[int, str] = field(default_factory=dict)  # number -> request set's folder

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        root = Path(__file__).resolve().parents[2]
        self.model = toy_model(self.folder)
        self.tasks = self.folder / "tasks"
        self.tasks.mkdir()
        (self.tasks / "rows.py").write_text(ROWS)
        shutil.copyfile(root / TASKS / "metrics.py", self.tasks / "metrics.py")

    def _suite(self, number: int) -> SuiteSpec:
        return SuiteSpec(
            name="chaos",
            include_path=(str(self.tasks / f"{number}"),),
            batch_size=4,
            tasks=(TaskEntry(name=f"chaos_{number}"),),
        )

    def set(self, number: int) -> Set:
        """Set `number`, built where it is not there yet."""
        place = self.tasks / f"{number}"  # a folder each: reading a task reads its whole folder's names
        if not place.exists():
            place.mkdir()
            for file in ("rows.py", "metrics.py"):
                shutil.copyfile(self.tasks / file, place / file)
            (place / "task.yaml").write_text(TASK.format(number=number, documents=DOCUMENTS))
            self._build(number)
            self._sets[number] = self._build(number)
        return Set(model=self.model, number=number, suite=self._suite(number), request_set=self._sets[number])

    def _build(self, number: int) -> str:
        built = build.build(
            BuildSpec(
                name=f"build-{number}",
                evaluation_dir=str(self.folder),
                suite=self._suite(number),
                entry=0,
                batch_size=4,
                model_dir=str(self.model),
                model=ModelOptions(device="cpu", threads=1),
                out_dir=str(self.folder / "sets" / str(number)),
            )
        )
        return built.sets[f"chaos_{number}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A task and its request set."""

    model: Path
    number: int
    suite: SuiteSpec
    request_set: str

    @property
    def task(self) -> str:
        return f"chaos_{self.number}"

    def dump(self, paths: EvaluationPaths) -> FrameRef:
        """All responses, as one shard's record."""
        key = read_record(request_set_manifest(self.request_set), RequestSetManifest).key
        shard = ShardResponses(
            task=self.task,
            key=key,
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
                suite=self.suite,
                entry=0,
                task=self.task,
                request_set=self.request_set,
                documents=tuple(range(first, min(first + per_job, DOCUMENTS))),
                frames=(frame,),
                model_dir=str(self.model),
                model=ModelOptions(device="cpu", threads=1),
            )

    def score(self, paths: EvaluationPaths, frame: FrameRef, attempt: int) -> ScoreSpec:
        return ScoreSpec(
            name=f"score-{self.task}-{attempt}",
            evaluation_dir=str(paths.root),
            suite=self.suite,
            entry=0,
            request_sets={self.task: self.request_set},
            frames={self.task: (frame,)},
            model_dir=str(self.model),
            model=ModelOptions(device="cpu", threads=1),
            bootstrap_iters=100,
        )
