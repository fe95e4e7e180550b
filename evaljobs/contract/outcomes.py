"""What jobs leave: outcomes, and the responses of a shard.

Rule: an outcome is a file, written last and atomically, so a killed job leaves either the whole outcome or none.

It does not know: Slurm, Redis, lm-eval, or what the coordinator makes of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from evaljobs.contract.specs import SCHEMA_VERSION, Record


class Built(Record):
    """A suite entry's request sets are on disk. `sets` maps each leaf task to its folder."""

    kind: Literal["built"] = "built"
    name: str
    entry: int
    batch_size: int | Literal["auto"]
    sets: dict[str, str]
    seconds: float


class Converted(Record):
    """A Hugging Face folder lies in `path`; whether it is a checkpoint has not been looked at."""

    kind: Literal["converted"] = "converted"
    name: str
    path: str
    seconds: float


class Staged(Record):
    """The weights are in this node's memory (rung: "shm", "disk") and held; or `rung="storage"`: read them in place."""

    kind: Literal["staged"] = "staged"
    name: str
    node: str
    path: str
    rung: str
    bytes: int
    storage_bytes: int  # bytes that left shared storage for it: 0 when the copy was already there
    seconds: float
    why: str = ""  # why a higher rung was not taken


class Cleared(Record):
    """The precursor gave its lease back: the memory is free, or another evaluation's precursor still holds it."""

    kind: Literal["cleared"] = "cleared"
    name: str
    node: str
    freed_bytes: int
    reason: str


class TrialEnded(Record):
    """A trial's own account of itself. reason: "drained", "terminated", "queue-lost", "outdated" (it claimed a shard of a task
    that was planned after its start). Seconds by cause.
    """

    kind: Literal["trial-ended"] = "trial-ended"
    name: str  # the trial (array member), not the job
    node: str
    reason: str
    shards: int
    started_at: float  # unix seconds
    ended_at: float
    wait_seconds: float  # waiting for the staged manifest
    import_seconds: float
    load_seconds: float
    warm_seconds: float = 0.0  # the first forward: kernels and libraries that are only loaded then
    infer_seconds: float
    dump_seconds: float
    idle_seconds: float
    devices: str  # e.g. "NVIDIA A100-SXM4-80GB" or "cpu"
    gpus: int


class Probed(Record):
    """Batch size "auto" was found out by the first trial."""

    kind: Literal["probed"] = "probed"
    name: str
    batch_size: int


class Executed(Record):
    """Verdicts of these documents are on disk. `failed` items are named with the reason."""

    kind: Literal["executed"] = "executed"
    name: str
    task: str
    documents: int
    programs: int
    seconds: float
    failed: dict[str, str] = Field(default_factory=dict)
    asked: int = 0  # of the judge, by this job


class Scored(Record):
    """A suite entry is scored; the result file holds lm-eval's own shape."""

    kind: Literal["scored"] = "scored"
    name: str
    entry: int
    result_file: str
    seconds: float
    programs_run: int = 0
    asked: int = 0
    unscored: dict[str, str] = Field(
        default_factory=dict
    )  # items that count in no mean, "task document", with the reason


class Failed(Record):
    """A job's error, for whoever must act. `blame`: operator (fix and retry), retry (try again), bug (ours)."""

    kind: Literal["failed"] = "failed"
    name: str
    job: Literal["build", "convert", "stage", "trial", "host", "execute", "score"]
    blame: Literal["operator", "retry", "bug"]
    error: str  # one line: what happened and what to do next
    detail: str = ""
    node: str | None = None
    shard: str | None = None  # the shard in hand, for a trial
    entry: int | None = None
    unstaged: bool = (
        False  # a trial that saw nothing of the weights staged on its node: its /dev/shm is another one
    )


Outcome = Annotated[
    Built | Converted | Staged | Cleared | TrialEnded | Probed | Executed | Scored | Failed,
    Field(discriminator="kind"),
]
OUTCOME: TypeAdapter[
    Built | Converted | Staged | Cleared | TrialEnded | Probed | Executed | Scored | Failed
] = TypeAdapter(Outcome)


class ShardResponses(Record):
    """One framed record of a response file: all responses of a shard, in batch order.

    `responses` holds [request index in build order, answer] pairs; an answer is what lm-eval's model class returned:
    [logprob, is_greedy], a string, or for rolling likelihood [window index, nll] terms that the metric side adds up;
    for a conversation a list of strings, one a turn.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str  # the request set's key: a record of other requests is refused
    shard: str
    trial: str
    started_at: float
    seconds: float
    responses: tuple[tuple[int, Any], ...]
