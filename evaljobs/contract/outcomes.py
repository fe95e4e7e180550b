"""Outcomes that jobs write for the coordinator, and the responses of a shard.

Rule: a job writes its outcome last and atomically, so a killed job leaves a complete outcome or none. Written by jobs, read
by the coordinator's runtime.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from evaljobs.contract.specs import DEFERRED_BUILD, SCHEMA_VERSION, Record


class Built(Record):
    """The request sets of a suite entry are on disk. `sets` maps each leaf task to its folder."""

    kind: Literal["built"] = "built"
    name: str  # of the job
    entry: int  # of the suite
    batch_size: int | Literal["auto"]  # of the batches; "auto": requests only
    cut: str = ""  # as in BuildSpec
    sets: dict[str, str]  # leaf task -> folder
    seconds: float


class Converted(Record):
    """The conversion wrote a Hugging Face folder to `path`; the coordinator still has to check it."""

    kind: Literal["converted"] = "converted"
    name: str  # of the job
    path: str  # the Hugging Face folder
    seconds: float


class Staged(Record):
    """The weights are in this node's memory (rung "shm", "disk") or read in place ("storage")."""

    kind: Literal["staged"] = "staged"
    name: str  # of the job
    node: str
    path: str  # folder that trials load from
    rung: str  # "shm", "disk", or "storage": read in place
    bytes: int  # of the weights
    storage_bytes: int  # read from shared storage: 0 if the copy existed already
    seconds: float
    why: str = ""  # why a higher rung was not used
    gpu_name: str = ""  # of the node's GPUs, e.g. "NVIDIA A100-SXM4-80GB"; "": unknown
    content: str | None = None  # of the copy (`fingerprint.content_of`); None: read in place, or unknown
    environment_bytes: int = 0  # of the trials' libraries that were read into the page cache
    environment_seconds: float = 0.0  # that this took, after the weights


class Cleared(Record):
    """The precursor gave its lease back: the memory is free, or another evaluation's precursor still holds it."""

    kind: Literal["cleared"] = "cleared"
    name: str  # of the job
    node: str
    freed_bytes: int  # 0 if another precursor holds the copy
    reason: str


class TrialEnded(Record):
    """How a trial ended, and its seconds by cause.

    `reason` is "drained", "terminated", "queue-lost", or "outdated": the trial claimed a shard of a
    task that was planned after it had started.
    """

    kind: Literal["trial-ended"] = "trial-ended"
    name: str  # the trial (a member of the array), not the job
    node: str
    reason: str  # "drained", "terminated", "queue-lost" or "outdated"
    shards: int  # number of finished shards
    started_at: float  # unix seconds
    ended_at: float  # unix seconds
    wait_seconds: float  # waiting for the weights, request sets or the queue
    import_seconds: float  # importing torch and the engine
    load_seconds: float  # loading the weights
    warm_seconds: float = 0.0  # the first forward pass, which loads kernels and libraries
    infer_seconds: float  # answering shards
    tokenise_seconds: float = 0.0  # part of infer_seconds: conversion between text and tokens
    generated_tokens: int | None = None  # padding included; None: the engine did not report it
    dump_seconds: float  # writing responses
    devices: str  # e.g. "NVIDIA A100-SXM4-80GB" or "cpu"
    gpus: int  # held by the trial
    fast: str = ""  # fast mode: why likelihoods were computed lm-eval's way; "": they were not
    weights: str = (
        ""  # weights that could not be compared with training's; "": none, or training recorded no values
    )


class Probed(Record):
    """The first trial has found the batch size and the token budget for "auto"."""

    kind: Literal["probed"] = "probed"
    name: str  # of the trial
    batch_size: int
    token_budget: int | None = None  # None: of versions without fast mode


class TooLarge(Record):
    """A batch does not fit the GPU's memory. The trial has dropped its shard and continues with others.

    `fits` of its `of` rows fit at once, found by bisecting that very batch; 0: not even one. One row may answer several
    requests.
    """

    kind: Literal["too-large"] = "too-large"
    name: str  # of the trial, with a number
    trial: str
    node: str
    shard: str  # shard that was dropped
    what: Literal["likelihoods", "unit", "generation"]  # of the batch's requests; a unit is one of fast mode
    fits: int = Field(ge=0)  # rows that fit at once
    of: int = Field(ge=1)  # rows of the batch
    devices: str  # e.g. "NVIDIA A100-SXM4-80GB"
    error: str  # of torch, in one line


class Executed(Record):
    """The verdicts of these documents are on disk. `failed` maps an item to the reason."""

    kind: Literal["executed"] = "executed"
    name: str  # of the job
    task: str  # leaf task
    documents: int  # whose verdicts are on disk
    programs: int
    seconds: float
    failed: dict[str, str] = Field(default_factory=dict)  # item -> why it has no verdict
    asked: int = 0  # requests sent to the judge by this job


class Scored(Record):
    """A suite entry is scored; the result file has lm-eval's own shape."""

    kind: Literal["scored"] = "scored"
    name: str  # of the job
    entry: int  # of the suite
    result_file: str  # in lm-eval's shape
    seconds: float
    programs_run: int = 0  # by this job
    asked: int = 0  # requests sent to the judge by this job
    # "task document" of each item left out of all means, with the reason
    unscored: dict[str, str] = Field(default_factory=dict)


class Failed(Record):
    """A job's error. `blame`: operator (fix it, then retry), retry (try again), bug."""

    kind: Literal["failed"] = "failed"
    name: str  # of the job, or of the trial
    job: Literal["build", "convert", "stage", "trial", "host", "execute", "score"]
    blame: Literal[
        "operator", "retry", "bug"
    ]  # who must act: fix it, then retry; try again; a bug of evalspan
    error: str  # one line: what happened and what to do next
    detail: str = ""  # end of its traceback
    node: str | None = None
    shard: str | None = None  # the shard that a trial was running
    entry: int | None = None  # of the suite
    # set if the kernel killed a process for lack of memory: MiB that its job had
    memory_mb: int | None = None
    unfit: bool = False  # the trial sees fewer GPUs on its node than its job requested
    # the trial found no staged weights on its node: its /dev/shm is not the precursor's
    unstaged: bool = False
    broken_weights: bool = False  # a trial found that no task of its checkpoint may have a score


_AnyOutcome = (
    Built | Converted | Staged | Cleared | TrialEnded | Probed | TooLarge | Executed | Scored | Failed
)
Outcome = Annotated[_AnyOutcome, Field(discriminator="kind")]
OUTCOME: TypeAdapter[_AnyOutcome] = TypeAdapter(Outcome, config=DEFERRED_BUILD)


class ShardResponses(Record):
    """All responses of one shard, in batch order: one framed record of a response file.

    `responses` has [request index in build order, answer] pairs. An answer is the return value of lm-eval's model class:
    [logprob, is_greedy] or a string; for rolling likelihood [window index, nll], summed by the metric job; for a conversation
    a list of strings, one per turn.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str  # the request set's key; a record with another key is refused
    shard: str
    trial: str
    started_at: float
    seconds: float
    responses: tuple[tuple[int, Any], ...]
