"""Frozen values that the coordinator keeps: requests, and the plans made from them.

Rule: a record is data and arithmetic on itself; ids are pure functions of content, so identical requests coincide. Knows
nothing of files, clusters, queues or time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from coordinator.site.config.schema import MetricConfig, PlanConfig, StageConfig, TrialConfig
from evaljobs.contract.names import ADAPTERS, Cut
from evaljobs.contract.paths import slug
from evaljobs.contract.specs import (
    CheckpointSpec,
    JudgeConfig,
    ModelOptions,
    Record,
    Sources,
    SuiteSpec,
)

JOURNAL_FORMAT: Literal[10] = 10
"""Raised whenever a field of an event changes, with a function in `runtime.upcasts` for journals of the previous number."""


class RunOptions(Record):
    """How to run an evaluation: sections of the settings at acceptance, and what the site adds. Nothing here affects a score."""

    trial: TrialConfig = TrialConfig()  # without `env`, whose values are never recorded
    metric: MetricConfig = MetricConfig()
    stage: StageConfig = StageConfig()
    plan: PlanConfig = PlanConfig()
    gpu_memory_gb: Mapping[str, float] = Field(
        default_factory=dict
    )  # (part of) a GPU type -> GB, for types whose name does not tell
    max_trials: int | None = None  # limit on concurrent trials, in GPUs
    max_nodes: int | None = None
    shards_per_task: int | None = None  # None: the planning policy decides
    build_jobs: int = 2
    early_trials: bool = False  # load trials while few documents are built: their slots are not GPUs
    engine_memory_mb: int = 0  # of a trial's engine, on top of its memory_mb
    convert_memory_mb: int | None = None  # None: twice the checkpoint's bytes and 4 GB
    workers: int = 2  # maximum
    execute_documents: int = 50  # documents per `execute` job
    stage_memory_mb: int = 0  # minimum for a precursor; larger checkpoints request more
    array_size: int | None = None  # largest job array that the site accepts; 1: no arrays
    host_why: str = ""  # property of the site that requires hosted trials; empty if the settings do


class Inputs(Record):
    """Inputs of an evaluation at submission, beside its checkpoint and settings. The complete list:

    | input | id | name of a request set | request digest | score key |
    |---|---|---|---|---|
    | `lm_eval`, `entries`, `env`, `command`, `fresh` | yes | yes | by what is built | by what is scored |
    | `model`: a tokenizer, a template | yes | yes | its content | no |
    | `model`: an adapter | yes | no | no: answers are reused under equal weights only | no |
    | what a build used: files, packages, revisions | by `shown` | compared: built again | by what is built | no |
    | what a score used | by `shown` | no | no | compared: scored again |
    | versions of engines | by `shown` | compared: built again | yes | no |
    | `parent` | yes | no | no: only its answers count | no: scored again |
    """

    lm_eval: str = ""
    entries: tuple[Sources, ...] = ()  # the source key of each task of the suite
    model: str = (
        ""  # JSON: (argument, digest) of each file, folder or model of the Hub that model arguments name
    )
    env: Mapping[str, str] = Field(
        default_factory=dict
    )  # variable of [trial] env -> digest of its value; without secrets and locations
    command: str = ""  # digest of [trial] prologue, container and python; "": none is set
    # digest of what earlier evaluations of these inputs recorded, if it has changed since; "": unchanged
    shown: str = ""
    fresh: str = ""  # time of `--fresh`; "": existing answers may be reused
    parent: str = ""  # evaluation whose answers are scored again without a model; "": none
    single: tuple[str, ...] = ()  # entries known to be one leaf task; not part of any key

    def named(self, *, adapters: bool) -> dict[str, str]:
        """Return model argument -> digest of what it names: of adapters only, or of all others."""
        named: dict[str, str] = dict(json.loads(self.model or "[]"))
        return {key: digest for key, digest in named.items() if (key in ADAPTERS) == adapters}


class Screening(Record):
    """What a screen evaluation is held against, as found when it was accepted."""

    reference: str  # id of a full evaluation
    order: str  # digest of the order in which its documents are asked


class ScreenScore(Record):
    """The score of a task in a screen evaluation: an estimate from the documents that were asked. It is in no list of scores."""

    kind: Literal["screen"] = "screen"
    task: str
    verdict: Literal["worse", "not worse", "open"]  # open: the documents do not tell
    metric: str  # with its filter: "acc,none"
    higher_is_better: bool = True
    asked: int  # documents
    documents: int  # of the whole set
    reference: float  # the reference's score over the whole set
    estimate: float  # of the score over the whole set
    low: float  # 95 % interval of the estimate, over all looks
    high: float

    @property
    def words(self) -> str:
        """Such as "0.4120 ± 0.0090 (screen, 1,420 of 14,042)"."""
        reach = max(self.high - self.estimate, self.estimate - self.low)
        return f"{self.estimate:.4f} ± {reach:.4f} (screen, {self.asked:,} of {self.documents:,})"


class EvaluationRecord(Record):
    """One checkpoint x one suite, as accepted. Stored in `evaluation.json`, which is written once.

    The state's copy is updated later: with a converted checkpoint, another priority, more memory for trials.
    """

    schema_version: int = 1
    evaluation_id: str
    checkpoint: CheckpointSpec
    suite: SuiteSpec
    model: ModelOptions
    options: RunOptions
    inputs: Inputs = Inputs()
    convert: str | None = None  # command that first converts the checkpoint to a Hugging Face folder
    judge: JudgeConfig | None = None  # if the suite has tasks that a judge scores
    not_asked: tuple[
        str, ...
    ] = ()  # tasks of the suite whose turn it is not at this checkpoint (`TaskEntry.every`)
    screening: Screening | None = None  # in screen mode
    priority: int = 0
    accepted_at: float  # unix seconds

    @property
    def order(self) -> str:
        """Of its documents in screen mode; "" in other modes."""
        return "" if self.screening is None else self.screening.order

    @property
    def rescores(self) -> str:
        """Id of the evaluation whose answers this one scores again; "" if a model answers."""
        return self.inputs.parent


_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+/?$")  # in the Hugging Face cache


def checkpoint_name(source: str) -> str:
    """Return a checkpoint folder's name; for a snapshot in the Hugging Face cache, the model's name on the Hub."""
    snapshot = _SNAPSHOT.search(source)
    return snapshot.group(1) if snapshot else source.rstrip("/").rsplit("/", 1)[-1]


def is_snapshot(source: str) -> bool:
    """Return whether the folder is a snapshot in the Hugging Face cache, named by a commit hash."""
    return _SNAPSHOT.search(source) is not None


# keys of a suite that decide when its tasks are asked, and change no answer
CADENCE: Any = {"tasks": {"__all__": {"every"}}, "all_at": True}


def evaluation_id(
    checkpoint: CheckpointSpec,
    suite: SuiteSpec,
    model: ModelOptions,
    judge: JudgeConfig | None,
    inputs: Inputs,
) -> str:
    """Return a deterministic id: readable names and a digest of everything that decides a score."""
    folder = checkpoint_name(checkpoint.announced)
    # including the folder: jobs are named by the digest alone, and a checkpoint may be copied with its mtimes
    what: list[object] = [
        folder,
        checkpoint.digest,
        suite.model_dump(mode="json", exclude=CADENCE if suite.screen else {**CADENCE, "screen": True}),
        model.model_dump(mode="json"),
    ]
    # without the number, so that a training keeps its ids if it is edited
    if any(task.every != 1 for task in suite.tasks):
        what.append("every")
    if judge is not None:
        what.append([judge.url, judge.model, judge.temperature, judge.max_tokens])
    what.append(inputs.model_dump(mode="json", exclude={"single"}))
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    return f"{id_stem(folder, suite.name, suite.mode)}-{digest}"


def id_stem(folder: str, suite: str, mode: str | None = None) -> str:
    """Return an evaluation's id without its digest: names of the checkpoint, the suite, and any mode other than exact."""
    stem = f"{slug(folder)[:40]}-{slug(suite)[:24]}"
    return stem if mode in (None, "exact") or stem.endswith(f"-{mode}") else f"{stem}-{mode}"


TOKEN_BUDGET = 8192  # padded tokens per forward pass in fast mode, unless the suite sets it


def cut_of(
    suite: SuiteSpec,
    entry: int,
    batch_size: int | Literal["auto"],
    token_budget: int | Literal["auto"] | None,
    order: str = "",
) -> str:
    """Return the cut of a task's requests, as in shard names (`ShardId`): "" for batches of the evaluation's size.

    `batch_size`, `token_budget`: as settled. In fast mode also "" until both are. `order`: from `Screening`.
    """
    own = suite.tasks[entry].batch_size
    if order:
        size = own or batch_size
        return str(Cut(size, order=order)) if isinstance(size, int) else ""
    if suite.mode != "fast":
        return "" if own is None else str(Cut(own))
    size = own or batch_size
    if not isinstance(size, int) or not isinstance(token_budget, int):
        return ""
    return str(Cut(size, token_budget))


def cut_on_disk(cut: str, batch_size: int | Literal["auto"]) -> str:
    """Return the name of a cut's batch files (`names.Cut`); "" before the batch size is settled."""
    return cut or ("" if batch_size == "auto" else str(Cut(batch_size)))


@dataclass(frozen=True, slots=True)
class JobName:
    """Name of a job: readable in `squeue`, unique per attempt, the same after a restart.

    "es-<digest>-<kind>-<detail>-a<attempt>", with the digest that ends the evaluation's id.
    """

    digest: str
    kind: str
    detail: str
    attempt: int

    @classmethod
    def of(cls, evaluation: str, kind: str, detail: str, attempt: int) -> JobName:
        """Return the name of a job of this evaluation id; `detail` is shortened and made safe."""
        return cls(evaluation.rsplit("-", 1)[-1], kind, job_detail(detail), attempt)

    @classmethod
    def parse(cls, text: str) -> JobName:
        """Parse a job's name. Raise ValueError for any other text."""
        found = _JOB_NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"{text} is not a job name of evalspan")
        digest, kind, detail, attempt = found.groups()
        return cls(digest, kind, detail, int(attempt))

    def __str__(self) -> str:
        return f"es-{self.digest}-{self.kind}-{self.detail}-a{self.attempt}"


_JOB_NAME = re.compile(r"es-([^-]+)-([a-z]+)-(.+)-a(\d+)", re.ASCII)


def job_detail(detail: str) -> str:
    """Return a node's or task's part of a job name, at most 40 characters; a truncated one ends with 8 hex digits of a hash."""
    safe = slug(detail)
    return safe if len(safe) <= 40 else f"{safe[:31]}-{hashlib.sha256(detail.encode()).hexdigest()[:8]}"


def job_prefix(evaluation: str) -> str:
    """Return the common prefix of all job names of an evaluation."""
    return f"es-{evaluation.rsplit('-', 1)[-1]}-"
