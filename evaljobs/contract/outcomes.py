"""Outcomes that jobs write for the coordinator, and the responses of a shard.

Rule: a job writes its outcome last and atomically, so a killed job leaves the whole outcome or
none. Written by jobs, read by the coordinator's runtime.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from evaljobs.contract.specs import SCHEMA_VERSION, Record


class Built(Record):
    """The request sets of a suite entry are on disk. `sets` maps each leaf task to its folder."""

    kind: Literal["built"] = "built"
    name: str
    entry: int
    batch_size: int | Literal["auto"]
    cut: str = ""  # as in BuildSpec
    sets: dict[str, str]
    seconds: float


class Converted(Record):
    """The conversion wrote a Hugging Face folder to `path`; the coordinator still has to check it."""

    kind: Literal["converted"] = "converted"
    name: str
    path: str
    seconds: float


class Staged(Record):
    """The weights are in this node's memory (rung "shm", "disk") or read in place ("storage")."""

    kind: Literal["staged"] = "staged"
    name: str
    node: str
    path: str
    rung: str
    bytes: int
    storage_bytes: int  # bytes read from shared storage: 0 when the copy existed already
    seconds: float
    why: str = ""  # why a higher rung was not used
    gpu_name: str = ""  # of the node's GPUs, e.g. "NVIDIA A100-SXM4-80GB"; "": unknown


class Cleared(Record):
    """The precursor gave its lease back: the memory is free, or another evaluation's precursor still holds it."""

    kind: Literal["cleared"] = "cleared"
    name: str
    node: str
    freed_bytes: int
    reason: str


class TrialEnded(Record):
    """How a trial ended, and its seconds by cause.

    `reason` is "drained", "terminated", "queue-lost", or "outdated": the trial claimed a shard of a
    task that was planned after it had started.
    """

    kind: Literal["trial-ended"] = "trial-ended"
    name: str  # the trial (a member of the array), not the job
    node: str
    reason: str
    shards: int
    started_at: float  # unix seconds
    ended_at: float
    wait_seconds: float  # waiting for the staged manifest
    import_seconds: float
    load_seconds: float
    warm_seconds: float = 0.0  # the first forward pass, which loads kernels and libraries
    infer_seconds: float
    tokenise_seconds: float = 0.0  # in infer_seconds: text to tokens and back
    generated_tokens: int | None = None  # padding included; None: the engine did not say
    dump_seconds: float
    idle_seconds: float
    devices: str  # e.g. "NVIDIA A100-SXM4-80GB" or "cpu"
    gpus: int
    fast: str = ""  # fast mode: why its likelihoods were computed lm-eval's way; "": they were not


class Probed(Record):
    """The first trial has found the batch size and the token budget that "auto" stands for."""

    kind: Literal["probed"] = "probed"
    name: str
    batch_size: int
    token_budget: int | None = None  # None: of versions without fast mode


class TooLarge(Record):
    """A batch does not fit the GPU's memory. The trial has dropped its shard and goes on with others.

    `fits` of its `of` rows fit at once, found by halves on that very batch; 0: not even one. One row
    may answer several requests.
    """

    kind: Literal["too-large"] = "too-large"
    name: str  # of the trial, with a number
    trial: str
    node: str
    shard: str
    what: Literal["likelihoods", "unit", "generation"]
    fits: int = Field(ge=0)
    of: int = Field(ge=1)
    devices: str
    error: str  # of torch, in one line


class Executed(Record):
    """The verdicts of these documents are on disk. `failed` maps an item to the reason."""

    kind: Literal["executed"] = "executed"
    name: str
    task: str
    documents: int
    programs: int
    seconds: float
    failed: dict[str, str] = Field(default_factory=dict)
    asked: int = 0  # requests that this job sent to the judge


class Scored(Record):
    """A suite entry is scored; the result file holds lm-eval's own shape."""

    kind: Literal["scored"] = "scored"
    name: str
    entry: int
    result_file: str
    seconds: float
    programs_run: int = 0
    asked: int = 0
    # "task document" of each item that counts in no mean, with the reason
    unscored: dict[str, str] = Field(default_factory=dict)


class Failed(Record):
    """A job's error. `blame`: operator (mend it, then retry), retry (try again), bug."""

    kind: Literal["failed"] = "failed"
    name: str
    job: Literal["build", "convert", "stage", "trial", "host", "execute", "score"]
    blame: Literal["operator", "retry", "bug"]
    error: str  # one line: what happened and what to do next
    detail: str = ""
    node: str | None = None
    shard: str | None = None  # the shard that a trial was running
    entry: int | None = None
    # set where the kernel ended a process for lack of memory: MiB that its job had
    memory_mb: int | None = None
    unfit: bool = False  # the trial sees fewer GPUs on its node than its job asked for
    # the trial found no staged weights on its node: its /dev/shm is not the precursor's
    unstaged: bool = False


_AnyOutcome = (
    Built | Converted | Staged | Cleared | TrialEnded | Probed | TooLarge | Executed | Scored | Failed
)
Outcome = Annotated[_AnyOutcome, Field(discriminator="kind")]
OUTCOME: TypeAdapter[_AnyOutcome] = TypeAdapter(Outcome)


class ShardResponses(Record):
    """All responses of one shard, in batch order: one framed record of a response file.

    `responses` holds [request index in build order, answer] pairs. An answer is what lm-eval's
    model class returned: [logprob, is_greedy] or a string; for rolling likelihood [window index,
    nll], which the metric job adds up; for a conversation a list of strings, one per turn.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str  # the request set's key; a record with another key is refused
    shard: str
    trial: str
    started_at: float
    seconds: float
    responses: tuple[tuple[int, Any], ...]
