"""Specs passed to jobs, and the suites, checkpoints and request sets in them.

Rule: everything exchanged between the coordinator and the jobs is defined here, in `outcomes` and in `paths`. Records are
frozen and refuse unknown fields. A job reads one spec and writes outcomes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

SCHEMA_VERSION = 1
Mode = Literal["exact", "fast"]
"""How likelihoods are computed: with lm-eval's digits, or each shared context once."""
Blocks = tuple[tuple[int, ...], ...]
"""Documents of a leaf task in the order in which they are asked, a tuple from one look to the next."""


DEFERRED_BUILD = ConfigDict(defer_build=True)  # schemas are built on first use, so that commands start sooner


class Record(BaseModel):
    """Base of all records that cross a process. Floats are finite: JSON has no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, **DEFERRED_BUILD)


class StateRecord(Record):
    """A file of current state, rewritten by each version: unknown fields are ignored.

    A newer version may add fields with a default. All other records with unknown fields are refused, since one may decide a
    score.
    """

    model_config = ConfigDict(extra="ignore")


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
# in the order of the data set: lm_eval asks them so, and labels them by their place in this list
Numbers = Annotated[
    tuple[Count, ...], Field(min_length=1), AfterValidator(lambda given: tuple(sorted({*given})))
]
# names appear in lists, logs and file names; control characters could command a terminal
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


# --- suites and checkpoints ---------------------------------------------------------------------------------------


class TaskEntry(Record):
    """One `[[task]]` of a suite: an lm-eval task, group or tag, and the settings it overrides."""

    name: Name  # lm-eval task, group or tag, or one from a YAML in include_path
    num_fewshot: Count | None = None  # examples in each prompt; None: from the task's YAML
    limit: Positive | Share | None = None  # documents, or a fraction of them below 1; None: all
    gen_kwargs: dict[str, Any] | None = None  # generation settings, added to those of the task's YAML
    samples: dict[Name, Numbers] | None = None  # leaf task -> its documents, from 0; None: all
    # added to that of the task's YAML; functions of some tasks read it, such as RULER's
    metadata: dict[str, Any] | None = None
    judge: bool = False  # scored by the model that [judge] names
    batch_size: Positive | None = None  # overrides the suite's; in fast mode only for the task's generation
    # field that documents of one cluster share, such as a passage; comparisons treat them as one cluster
    cluster: str | None = None
    # the suite's own group: its tasks are listed together, and results have their mean
    group: Name | None = None
    # asked at the first of every so many checkpoints of a training, and at the final one; "auto": by its signal for its price
    every: Positive | Literal["auto"] = 1

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys that earlier versions lacked, so that their ids and request sets stay valid."""
        found: dict[str, Any] = dump(self)
        unset = {key for key in ("samples", "metadata") if getattr(self, key) is None}
        return {key: value for key, value in found.items() if key not in unset}


class ScreenOptions(Record):
    """`[screen]` of a suite: the question that each of its tasks answers."""

    reference: Name = (
        "previous"  # full evaluation to compare with: "previous", "best", a training step, or an id
    )
    max_drop: Share = 0.01  # is a task's score lower by more?
    level: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # probability of a false verdict
    power: Annotated[float, Field(ge=0.5, lt=1)] = 0.8  # at which documents are planned
    seed: int = 0  # of the order in which documents are asked


class SuiteSpec(Record):
    """A suite in lm-eval's terms, as a suite file has it.

    `mode`: in a suite file None is the site's mode; in an evaluation's record None is "exact", and
    "exact" does not occur.
    """

    model_config = ConfigDict(validate_by_name=True)

    name: Name  # in reports and in the ids of evaluations
    include_path: tuple[str, ...] = ()  # folders of task YAMLs, relative to the suite file
    batch_size: Positive | Literal["auto"] = (
        1  # requests per forward pass; "auto": probed by the first trial, then fixed
    )
    seed: int | None = None  # seed of all generators; None: lm-eval's own (0, 1234, 1234, 1234)
    apply_chat_template: bool | str = False  # true, or a template's name: render prompts with the tokenizer's
    system_instruction: str | None = None  # system message of each prompt
    fewshot_as_multiturn: bool | None = None  # examples as turns of the conversation; None: lm_eval's default
    # "exact": lm-eval's digits, "fast": each shared context once, "screen": as many documents as the question of [screen]
    # needs; None: [trial] mode
    mode: Mode | Literal["screen"] | None = None
    screen: ScreenOptions | None = None  # for mode = "screen"; None: its defaults
    # tokens per forward pass in fast mode, padding included; "auto": found with the batch
    # size; None: 8192, or "auto" if the batch size is
    token_budget: Positive | Literal["auto"] | None = None
    all_at: tuple[Count, ...] = ()  # training steps at which each task is asked, whatever its `every`
    # [[task]], at least one, in the order of reports
    tasks: tuple[TaskEntry, ...] = Field(min_length=1, validation_alias="task")

    @property
    def computes(self) -> Mode:
        """How its likelihoods are computed."""
        return "fast" if self.mode == "fast" else "exact"


class Sources(Record):
    """The source key of one suite entry (`evaljobs.lmeval.source_files.Named.key`), which a build checks again."""

    files: str = ""


class CheckpointFile(Record):
    """A file of a checkpoint: name relative to its folder, bytes, mtime in ns on shared storage."""

    name: str
    size: int
    mtime_ns: int
    xxh3_128: str | None = None  # present where the trainer's hook wrote a manifest at save time


class Weights(Record):
    """Facts about a checkpoint's weights from its safetensors headers and config. Tensors count as stored."""

    sizes: dict[str, int]  # dtype as in the header, such as "BF16" -> bytes
    largest: int = 0  # total bytes of the four largest tensors
    dtype: str | None = None  # from the config, as loaded by `dtype = "auto"`
    quantized: bool = False  # the config names a quantiser

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


class CheckpointSpec(Record):
    """A checkpoint on storage. `digest`, `samples`: its identity (`evaljobs.staging.fingerprint`)."""

    source: str
    digest: str
    samples: str | None = None  # None: in training's own format
    growing_rope: str = ""  # kind of its rope, if that scales a row by the longest row in its batch
    content: str | None = None  # from the hook's hashes of whole files (`content_of`); None: unknown so far
    files: tuple[CheckpointFile, ...]  # those needed for inference: config, weights, tokenizer
    step: int | None = None
    converted_from: str | None = None  # the announced folder, if `source` is its conversion
    weights: Weights | None = None  # None: no safetensors

    @property
    def is_raw(self) -> bool:
        """Whether it is in training's own format, so that a job converts it first."""
        return self.samples is None

    @property
    def announced(self) -> str:
        """The folder that training wrote: the name by which users know the checkpoint."""
        return self.converted_from or self.source

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)


class ModelOptions(Record):
    """lm-eval's model name and its keyword arguments, without path and batch size."""

    engine: str = "hf"
    model_args: dict[str, Any] = {}
    device: str | None = None  # None: cuda if the job has a GPU, otherwise cpu
    threads: int | None = None  # CPU threads of one trial; None leaves torch's default


class JudgeConfig(Record):
    """The judge model, behind an OpenAI-compatible endpoint. One job at a time uses it."""

    url: str = Field("", examples=["https://api.openai.com/v1"])
    """an OpenAI-compatible endpoint; required by suites with judge tasks"""
    model: str = Field("", examples=["gpt-4.1"])
    """model name at the endpoint"""
    api_key_env: str | None = Field(None, examples=["OPENAI_API_KEY"])
    """environment variable with the key"""
    api_key_file: Path | None = Field(None, examples=["judge.key"])
    """instead of api_key_env: a file, mode 0600, with the key"""
    allow_http: bool = False
    """true: the key may be sent to another host by http://, on a network that you trust"""
    temperature: float = Field(0.0, ge=0, le=2)
    """sampling temperature of the judge"""
    max_tokens: Positive = 2048
    """maximum tokens per answer"""
    concurrency: int = Field(8, ge=1, le=1024)
    """maximum concurrent requests, over all evaluations of a work folder"""
    requests_per_minute: Positive | None = Field(None, examples=[60])
    """maximum requests within 60 s, over all evaluations of a work folder; default: no limit"""
    max_cost: float | None = Field(None, gt=0, examples=[5.0])
    """maximum cost of an evaluation, in the currency of the prices; default: no limit"""
    price_per_million_prompt_tokens: float | None = Field(None, ge=0, examples=[2.0])
    """price in any currency; default: not counted"""
    price_per_million_completion_tokens: float | None = Field(None, ge=0, examples=[8.0])
    """price in any currency; default: not counted"""
    timeout_seconds: float = Field(120.0, gt=0)
    """seconds for a complete answer to a request"""
    retries: Count = 5
    """retries of a failed request"""


class JudgeJob(Record):
    """What a metric job needs to ask the judge."""

    options: JudgeConfig
    cache_dir: str  # answers by content, shared by the evaluations of a work folder


# --- request sets --------------------------------------------------------------------------------------------------


class RequestSetManifest(StateRecord):
    """A leaf task's tokenised requests. Written last: a set with a manifest is complete.

    `key` is the request digest. It covers everything that decides an answer besides the weights: the requests with their
    generation settings, the tokenizer, the engine with its arguments and versions. `score_key` covers everything known before
    a score that turns answers into one: filters, metrics, gold answers, their code; a score file records what its scoring
    imported.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    asks: str = ""  # digest of what two results must share to be compared: prompts and settings, no versions
    score_key: str = ""
    shown: str = ""  # name of the file with the build's rows, as in `EntryManifest`
    executes: bool = False  # its metric runs programs or asks a judge, and can be split by document
    documents: int
    requests: int  # clones for repeats included
    repeats: int = 1
    sampled: bool = False  # any generation with do_sample or a temperature
    prompt_tokens: int  # over all turns; answers in later prompts count at their cap


class EntryManifest(StateRecord):
    """All leaves of a suite entry are built: leaf task -> folder below its own. Written last.

    `shown`: name of a file beside this one, path -> digest of what the build opened and imported
    (`evaljobs.lmeval.shown_inputs`). If a row has changed, the sets are rebuilt.
    """

    schema_version: int = SCHEMA_VERSION
    entry: str
    sets: dict[str, str]
    shown: str = ""  # "": from a version that did not record it; such sets are rebuilt


class BatchIndex(StateRecord):
    """A request set's batches in one cut (`names.Cut`), in execution order. Position i is batch i.

    `offsets[i]..offsets[i+1]` are the bytes of batch i in the batch file (len(offsets) = batches + 1). `prefill_tokens` are
    padded input tokens of the forward pass; `generated_tokens` the cap on new ones. `asked_tokens` are the input tokens of
    the same requests, each on its own and unpadded; indexes of earlier versions lack them. `documents[i]` lists the documents
    with a request in batch i.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    key: str
    batch_size: int
    offsets: tuple[int, ...]
    requests: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    asked_tokens: tuple[int, ...] = ()
    documents: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...] = ()  # in screen mode: of each block the batch after its last one


# --- specs of jobs -----------------------------------------------------------------------------------------------------


class BuildSpec(Record):
    """`python -m evaljobs build SPEC`: build the request sets of a suite entry (all its leaves).

    Idempotent: sets on disk under their key are kept. With batch_size "auto" the job only writes requests; the same spec with
    a number adds the batches later.
    """

    kind: Literal["build"] = "build"
    name: str
    evaluation_dir: str | None  # None for `evalspan prepare`: no outcome is written
    suite: SuiteSpec
    entry: int  # index into suite.tasks
    batch_size: int | Literal["auto"]
    cut: str = ""  # of the batches (`names.Cut`); "": by `batch_size`
    model_dir: str  # its config and tokenizer are read, not its weights
    model: ModelOptions
    out_dir: str  # request_sets/<lookup digest of this entry>
    offline: bool = True
    source: str = ""  # expected `Sources.files` of the entry; "": not checked
    blocks: dict[str, Blocks] = {}  # leaf task -> its documents as they are asked, in screen mode


class ConvertSpec(Record):
    """`python -m evaljobs convert SPEC`: convert a checkpoint to a Hugging Face folder."""

    kind: Literal["convert"] = "convert"
    name: str
    evaluation_dir: str
    source: CheckpointSpec  # all files of the folder
    command: str  # with {src} and {dst}
    out_dir: str  # converted/<digest>; created when complete


class StageSpec(Record):
    """`python -m evaljobs stage SPEC`: copy a checkpoint to node memory, hold it, clear it."""

    kind: Literal["stage"] = "stage"
    name: str
    evaluation_dir: str
    node: str
    checkpoint: CheckpointSpec
    roots: tuple[str, ...] = ("/dev/shm",)  # rungs in order; the first with enough space is used
    lease_file: str  # touched by the coordinator; precursors exit when it is too old
    lease_seconds: float = 900.0
    readers: int = 16
    share: float | None = None  # largest fraction of a root's space to fill, for prefetched weights


class LaneSpec(Record):
    """One trial of an array, and its lane in the work queue (the shards planned for it)."""

    lane: str
    trial: str  # unique name of this attempt; names its response file


class TrialSpec(Record):
    """`python -m evaljobs trial SPEC`: load once, claim shards, dump responses, exit.

    Member i of the array is lanes[i].
    """

    kind: Literal["trial"] = "trial"
    name: str
    evaluation_dir: str
    evaluation_id: str
    node: str
    model_path: str  # the staged folder, or the checkpoint's own if it could not be staged
    checkpoint: CheckpointSpec | None = None  # as announced; None: not compared with what is loaded
    adapters: dict[
        str, str
    ] = {}  # adapter's folder on storage -> its identity (`folder_identity`) at acceptance
    model: ModelOptions
    batch_size: int | Literal["auto"]  # "auto": probe, leave `Probed`, wait for shards
    request_sets: dict[str, str]  # leaf task -> folder; may be empty for a probe
    request_sets_file: str | None = None  # the probe finds the sets here later
    seed: int = 1234
    redis_file: str
    redis_patience_seconds: float = 600.0  # the trial ends after an outage of Redis this long
    lanes: tuple[LaneSpec, ...]
    gpus: int = 0  # GPUs that the trial must see; 0: its slot is not a GPU


class HostSpec(Record):
    """`python -m evaljobs host SPEC`: one job stages, runs its trials as children, clears."""

    kind: Literal["host"] = "host"
    name: str
    stage: StageSpec
    trial: TrialSpec  # its model_path is empty; the job fills in the staged path
    gpus_per_trial: int = 1


class FrameRef(Record):
    """Position of a shard's responses: one record of a response file."""

    file: str  # relative to the evaluation's responses folder
    offset: int
    length: int


class MetricSpec(Record):
    """What the two RQ jobs of a metric share."""

    name: str
    evaluation_dir: str
    suite: SuiteSpec
    entry: int
    model_dir: str
    model: ModelOptions
    item_seconds: float = 60.0
    allow_unsafe: bool = False
    judge: JudgeJob | None = None


class ExecuteSpec(MetricSpec):
    """RQ job `execute`: run the programs of whole documents, or ask the judge about them."""

    kind: Literal["execute"] = "execute"
    task: str
    request_set: str
    documents: tuple[int, ...]
    frames: tuple[FrameRef, ...]


class ScoreSpec(MetricSpec):
    """RQ job `score`: results of one suite entry, whose responses are all on disk."""

    kind: Literal["score"] = "score"
    request_sets: dict[str, str]
    frames: dict[str, tuple[FrameRef, ...]]  # leaf task -> every shard's record
    # in screen mode: leaf task -> documents that these records answer; no score of lm-eval's is made of them
    documents: dict[str, tuple[int, ...]] | None = None
    bootstrap_iters: int = 100_000


_AnySpec = BuildSpec | ConvertSpec | StageSpec | TrialSpec | HostSpec | ExecuteSpec | ScoreSpec
Spec = Annotated[_AnySpec, Field(discriminator="kind")]
SPEC: TypeAdapter[_AnySpec] = TypeAdapter(Spec, config=DEFERRED_BUILD)
