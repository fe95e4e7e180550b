"""What crosses a process: suites, checkpoints, request sets, and the specs that jobs are given.

Rule: the coordinator and the jobs on nodes agree on nothing but this file, `evaljobs.contract.outcomes` and `evaljobs.contract.paths`. Each
record is frozen, refuses unknown fields and carries no behaviour. A job reads one spec and leaves outcomes.

It does not know: Slurm, Redis, lm-eval, or how any of it is decided.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA_VERSION = 1


class Record(BaseModel):
    """Base of all records that cross a process. Their floats are finite: JSON has no NaN, and would bring back null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# --- suites and checkpoints ---------------------------------------------------------------------------------------


class TaskEntry(Record):
    """One `[[task]]` of a suite: an lm-eval task, group or tag name and what the suite overrides of it."""

    name: str
    num_fewshot: int | None = None
    limit: int | float | None = None
    gen_kwargs: dict[str, Any] | None = None
    judge: bool = False  # scored by the model that [judge] names


class SuiteSpec(Record):
    """A suite, as lm-eval understands it. `seed=None` keeps lm-eval's own defaults (0, 1234, 1234, 1234)."""

    name: str
    include_path: tuple[str, ...] = ()
    batch_size: int | Literal["auto"] = 1
    seed: int | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None  # None: what the lm_eval command does by default
    tasks: tuple[TaskEntry, ...]


class Sources(Record):
    """The source key of one suite entry, in two parts (`evaljobs.lmeval.source_files.entry_files`).

    `files`: the suite's own files, which a build and a score check again; `installed`: what the installation holds.
    """

    files: str = ""
    installed: str = ""


class CheckpointFile(Record):
    """A file of a checkpoint: name relative to its folder, bytes, and mtime in ns as seen on shared storage."""

    name: str
    size: int
    mtime_ns: int
    xxh3_128: str | None = None  # only where the trainer's hook wrote a save-time manifest


class CheckpointSpec(Record):
    """A checkpoint on shared storage. `digest` is over names, sizes, mtimes and safetensors headers (no full read)."""

    source: str
    digest: str
    files: tuple[CheckpointFile, ...]  # only what inference needs: config, weights, tokenizer
    step: int | None = None
    converted_from: str | None = None  # the folder that was announced, where `source` was made from it

    @property
    def announced(self) -> str:
        """The folder that training wrote: what a person calls the checkpoint."""
        return self.converted_from or self.source

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)


class ModelOptions(Record):
    """How a trial loads the model: lm-eval's model name and its keyword arguments (less path and batch size)."""

    engine: str = "hf"
    model_args: dict[str, Any] = {}
    device: str | None = None  # None: cuda where the job has a GPU, else cpu
    threads: int | None = None  # CPU threads of one trial; None leaves torch's default


class JudgeOptions(Record):
    """The model that judges answers, behind an OpenAI-compatible endpoint, and what may be asked of it.

    The key itself is in no record: it is read where it is used, from an environment variable or a file of mode 0600.
    """

    url: str  # up to and without "/chat/completions"
    model: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    temperature: float = 0.0
    max_tokens: int = 2048  # of one answer
    concurrency: int = 8  # requests at once, of all workers together
    requests_per_minute: int | None = None  # started in any 60 s, of all workers together
    max_cost: float | None = None  # of one evaluation, in the currency of the prices
    price_per_million_prompt_tokens: float = 0.0
    price_per_million_completion_tokens: float = 0.0
    timeout_seconds: float = 120.0  # of one request, whole
    retries: int = 5  # after the first try; waiting out a 429 is none


class JudgeJob(Record):
    """What a metric job needs to ask the judge."""

    options: JudgeOptions
    redis_file: str  # where the caps that all workers share are kept
    cache_dir: str  # answers by content, shared by the evaluations of a work folder


# --- request sets --------------------------------------------------------------------------------------------------


class RequestSetManifest(Record):
    """A leaf task's requests, built and tokenised once. Written last: a set with a manifest is whole.

    `key` is the request digest, over all that decides an answer besides the weights: the requests with their generation
    settings, the tokenizer, the engine with its arguments and versions. `score_key` is over all that makes a score of
    answers: filters, metrics, gold answers, their code and versions.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    score_key: str = ""
    output_type: str
    executes: bool = False  # its metric runs programs or asks a judge: work divisible by document
    documents: int
    requests: int  # clones for repeats counted
    repeats: int = 1
    sampled: bool = False  # any generation with do_sample or a temperature
    prompt_tokens: int  # of all turns of a conversation, answers in later prompts at their cap
    generation_cap_tokens: int


class EntryManifest(Record):
    """All leaves of one suite entry are built: leaf task -> folder below the entry's own. Written last of all."""

    schema_version: int = SCHEMA_VERSION
    entry: str
    sets: dict[str, str]


class BatchIndex(Record):
    """The fixed batches of a request set at one batch size, in lm-eval's own order. Position i is batch i.

    `offsets[i]..offsets[i+1]` are the bytes of batch i in the batch file (len(offsets) = batches + 1).
    `prefill_tokens` are padded input tokens of the forward pass; `generated_tokens` the cap on new ones.
    `documents[i]` lists the documents with a request in batch i.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    batch_size: int
    offsets: tuple[int, ...]
    requests: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]


# --- specs: what a job is given --------------------------------------------------------------------------------------


class BuildSpec(Record):
    """`python -m evaljobs build SPEC`: build the request sets of one suite entry (all leaves of a group).

    Idempotent: what is on disk under its key is kept; with batch_size "auto" only requests are written, and the same
    spec with a number later adds the batches.
    """

    kind: Literal["build"] = "build"
    name: str
    evaluation_dir: str | None  # None: `evalspan prepare`, no evaluation yet; no outcome file is left then
    suite: SuiteSpec
    entry: int  # index into suite.tasks
    batch_size: int | Literal["auto"]
    model_dir: str  # config and tokenizer are read, never weights
    model: ModelOptions
    out_dir: str  # request_sets/<lookup digest of this entry>
    offline: bool = True
    source: str = ""  # `Sources.files` that the entry's files must have; "": not checked


class ConvertSpec(Record):
    """`python -m evaljobs convert SPEC`: make a Hugging Face folder of a checkpoint in training's own format."""

    kind: Literal["convert"] = "convert"
    name: str
    evaluation_dir: str
    source: CheckpointSpec  # every file of the folder, whatever it holds
    command: str  # with {src} and {dst}
    out_dir: str  # converted/<digest>: there, once it is whole


class StageSpec(Record):
    """`python -m evaljobs stage SPEC`: copy a checkpoint to this node's memory, hold it, clear it (the precursor)."""

    kind: Literal["stage"] = "stage"
    name: str
    evaluation_dir: str
    node: str
    checkpoint: CheckpointSpec
    roots: tuple[str, ...] = ("/dev/shm",)  # rungs in order: the first that is usable and large enough
    lease_file: str  # touched by the coordinator; older than lease_seconds means nobody will come back
    lease_seconds: float = 900.0
    readers: int = 16
    share: float | None = None  # of a root's room that may be taken: staged ahead of GPUs, or not at all
    preimport: str | None = (
        None  # engine to import once while waiting, so that trials find it in the page cache
    )


class LaneSpec(Record):
    """One trial of an array: its lane in the work queue (the plan's list of shards for it)."""

    lane: str
    trial: str  # unique name of this attempt; names its response file


class TrialSpec(Record):
    """`python -m evaljobs trial SPEC`: load once, pull shards, dump responses, exit. Member i of an array is lanes[i]."""

    kind: Literal["trial"] = "trial"
    name: str
    evaluation_dir: str
    evaluation_id: str
    node: str
    model_path: str  # staged folder, or the checkpoint's own where staging was impossible
    model: ModelOptions
    batch_size: int | Literal["auto"]  # "auto": probe, leave `Probed`, wait for shards
    request_sets: dict[str, str]  # leaf task -> folder; may be empty for a probe
    request_sets_file: str | None = None  # where the probe finds them later
    seed: int = 1234
    redis_file: str
    redis_patience_seconds: float = (
        600.0  # Redis away for longer: the trial ends, its GPU is of use to others
    )
    lanes: tuple[LaneSpec, ...]
    idle_seconds: float = 5.0  # how long an empty queue is polled before the trial ends
    sampled_tasks: tuple[str, ...] = ()


class HostSpec(Record):
    """`python -m evaljobs host SPEC`: one long job stages into its own memory, runs the trials as children, clears."""

    kind: Literal["host"] = "host"
    name: str
    stage: StageSpec
    trial: TrialSpec  # its model_path is empty: the staged path is filled in
    gpus_per_trial: int = 1


class FrameRef(Record):
    """Where a shard's responses lie: a record of a response file."""

    file: str  # relative to the evaluation's responses folder
    offset: int
    length: int


class ExecuteSpec(Record):
    """RQ job `execute`: run the programs of whole documents, or ask the judge; what was found is kept by content."""

    kind: Literal["execute"] = "execute"
    name: str
    evaluation_dir: str
    suite: SuiteSpec
    entry: int
    task: str
    request_set: str
    documents: tuple[int, ...]
    frames: tuple[FrameRef, ...]
    model_dir: str
    model: ModelOptions
    item_seconds: float = 60.0
    allow_unsafe: bool = False
    judge: JudgeJob | None = None


class ScoreSpec(Record):
    """RQ job `score`: filters, metrics, aggregation and bootstrap of one suite entry, all of its responses present."""

    kind: Literal["score"] = "score"
    name: str
    evaluation_dir: str
    suite: SuiteSpec
    entry: int
    request_sets: dict[str, str]
    frames: dict[str, tuple[FrameRef, ...]]  # leaf task -> every shard's record
    model_dir: str
    model: ModelOptions
    source: str = ""  # as in BuildSpec
    bootstrap_iters: int = 100_000
    item_seconds: float = 60.0
    allow_unsafe: bool = False
    judge: JudgeJob | None = None


Spec = Annotated[
    BuildSpec | ConvertSpec | StageSpec | TrialSpec | HostSpec | ExecuteSpec | ScoreSpec,
    Field(discriminator="kind"),
]
SPEC: TypeAdapter[BuildSpec | ConvertSpec | StageSpec | TrialSpec | HostSpec | ExecuteSpec | ScoreSpec] = (
    TypeAdapter(Spec)
)
