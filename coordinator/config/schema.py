"""All settings with their types and defaults, as one frozen Config. Pure.

Rule: `loading.py` fills it from evalspan.toml, the environment and the command line. `template.py`
says what each setting means, for the file that `evalspan init` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

from coordinator.config.checks import (
    GPU_REQUEST,
    age_seconds,
    check_address,
    check_age,
    check_conversion,
    check_extra_args,
    check_gpu_request,
    check_hostlist,
    check_model_args,
    check_time,
    check_web_address,
    seconds_of,
)
from evaljobs.contract.specs import Mode, Record

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
TimeLimit = Annotated[str, AfterValidator(check_time)]
HostLists = Annotated[tuple[str, ...], AfterValidator(lambda texts: tuple(map(check_hostlist, texts)))]
SbatchOptions = Annotated[tuple[str, ...], AfterValidator(check_extra_args)]
# A folder or file; `load` resolves `~` and paths relative to the file that names it.
Place = Annotated[Path, PlainSerializer(str)]


class ClusterConfig(Record):
    """Where jobs run and as whom."""

    kind: Literal["local", "slurm"] = "local"
    api: Literal["cli", "pyslurm"] = "cli"
    partition: str | None = None  # for jobs with GPUs; None: the site's default
    cpu_partition: str | None = None  # for jobs without; None: `partition`
    account: str | None = None
    qos: str | None = None
    nice: Count | None = None  # users can only lower their priority
    reservation: str | None = None
    extra_args: SbatchOptions = ()
    export: tuple[str, ...] = ()  # further variables that jobs get, "*" for any characters
    poll_seconds: Annotated[float, Field(ge=1)] = 10.0
    slots: Positive | None = None  # local: trials at once; None: one per GPU, or two CPU slots


class RoleConfig(Record):
    """What jobs of one role ask Slurm for, in place of what [cluster] says."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    extra_args: SbatchOptions = ()


class SlurmConfig(Record):
    """How jobs ask for GPUs, and what jobs of each role ask for."""

    gpu_request: Annotated[str, AfterValidator(check_gpu_request)] = GPU_REQUEST
    precursor: RoleConfig = RoleConfig()
    trial: RoleConfig = RoleConfig()  # also a job that hosts a node's trials
    metric: RoleConfig = RoleConfig()
    build: RoleConfig = RoleConfig()  # also a conversion


class TrialConfig(Record):
    """How a trial loads the model, and what it asks of a node."""

    python: str | None = None  # interpreter of builds, precursors and trials; None: the coordinator's own
    prologue: str | None = None
    container: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    engine: str = "hf"  # lm-eval's model name: hf, vllm, sglang
    mode: Mode = "exact"  # of suites that do not say theirs
    # less path and batch size
    model_args: Annotated[dict[str, Any], AfterValidator(check_model_args)] = Field(default_factory=dict)
    gpus_per_trial: Positive = 1
    cpus: Positive = 1
    memory_mb: Positive | None = None  # None: by the checkpoint
    threads: Positive | None = None
    device: str | None = None
    time_limit: TimeLimit = "4:00:00"
    hung_seconds: Annotated[float, Field(gt=0)] | None = None  # None: by the engine
    # seconds that a trial waits for Redis; a requeued coordinator is away for Slurm's cred_expire (120 s)
    redis_patience_seconds: Annotated[float, Field(ge=0)] = 600.0

    @property
    def time_limit_seconds(self) -> int:
        return seconds_of(self.time_limit)


class PlanConfig(Record):
    """Which shards run where, in which order."""

    policy: Literal["evalspan", "round-robin"] = "evalspan"
    steal: bool | None = None  # a trial without shards takes another's; None: with policy "evalspan" alone

    @property
    def steals(self) -> bool:
        return self.policy == "evalspan" if self.steal is None else self.steal


class StageConfig(Record):
    """Weights in node memory."""

    enabled: bool = True
    host_trials: bool | Literal["auto"] = "auto"
    roots: Annotated[tuple[str, ...], Field(min_length=1)] = ("/dev/shm",)
    # seconds, renewed six times per lease; longer than any delay of the coordinator, e.g. by Slurm
    lease_seconds: Annotated[float, Field(ge=1)] = 900.0
    readers: Positive = 16
    prefetch: Annotated[float, Field(ge=0, le=1)] = 0.5


class RedisConfig(Record):
    """The site's server where `url` is set; else evalspan starts its own."""

    url: str | None = None
    bind: str | None = None  # address of evalspan's server; None: the one that compute nodes reach
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of evalspan's server; 0: any free one
    username: str | None = None
    password_file: Place | None = None
    ca_file: Place | None = None
    cert_file: Place | None = None
    key_file: Place | None = None


class MetricConfig(Record):
    """CPU workers that execute programs and score; the plan chooses their number, `workers` at most."""

    workers: Positive | None = None  # None: as many as the partition's cores hold, 64 at most
    cpus: Positive = 1
    memory_mb: Positive = 4096
    bootstrap_iters: Count = 100_000  # lm-eval's default
    item_seconds: Annotated[float, Field(gt=0)] = 60.0
    allow_unsafe: bool = False


class JudgeConfig(Record):
    """The judge model, behind an OpenAI-compatible endpoint. Caps hold for all workers together."""

    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    api_key_file: Place | None = None
    allow_http: bool = False  # the key may go to another host unencrypted
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    max_tokens: Positive = 2048
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    requests_per_minute: Positive | None = None
    max_cost: Annotated[float, Field(gt=0)] | None = None
    price_per_million_prompt_tokens: Annotated[float, Field(ge=0)] | None = None
    price_per_million_completion_tokens: Annotated[float, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    retries: Count = 5


class KeepEvery(Record):
    """Evaluate every k-th of a series' waiting checkpoints."""

    keep_every: Positive


class WatchConfig(Record):
    """Where checkpoints appear, and what a notice may name."""

    folders: tuple[Place, ...] = ()
    roots: tuple[Place, ...] = ()
    suites: tuple[Place, ...] = ()
    suite: str | None = None  # after `suites`, of which it may name one as a notice does

    @field_validator("suite")
    @classmethod
    def _file_of(cls, name: str | None, info: ValidationInfo) -> str | None:
        """The file in `suites` that has this name, else the name."""
        return next((str(file) for file in info.data.get("suites", ()) if file.stem == name), name)


class BorrowConfig(Record):
    """How much of the cluster evalspan may take."""

    max_nodes: Positive | None = None
    max_gpus: Positive | None = None
    leave_nodes_free: Count = 0
    best_effort: str | None = None
    best_effort_qos: str | None = None


class NodesConfig(Record):
    """Which nodes evalspan may take."""

    include: HostLists = ()  # for jobs with GPUs; empty: all
    exclude: HostLists = ()
    gpu_types: tuple[str, ...] = ()  # as Gres names them; empty: all
    features: tuple[str, ...] = ()  # that a node for jobs with GPUs has, all of them
    # (part of) a GPU type -> GB of one GPU, where the name does not say it
    gpu_memory_gb: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    wake: bool = False  # also those that Slurm has powered down to save energy


class CheckpointConfig(Record):
    """Which checkpoints are evaluated, and how they are read."""

    allow_bin: bool = False
    # command that makes a Hugging Face folder {dst} from training's own format {src}; run without a shell
    convert: Annotated[str, AfterValidator(check_conversion)] | None = None
    convert_memory_mb: Positive | None = None


class TrackersConfig(Record):
    """Trackers that get each ended evaluation; one that is not set gets nothing."""

    tensorboard_dir: Place | None = None
    wandb_project: str | None = None
    wandb_mode: Literal["offline", "online"] = "offline"
    mlflow_uri: str | None = None  # a server, or file:///… for a file store
    mlflow_experiment: str = "evalspan"


class RetentionConfig(Record):
    """What the daemon keeps of ended evaluations by itself."""

    keep: Literal["scores", "responses"] | None = None  # None: nothing is removed
    older_than: Annotated[str, AfterValidator(check_age)] = "30d"
    baselines: tuple[str, ...] = ()  # ids of evaluations, or globs of them, that lose nothing

    @property
    def older_than_seconds(self) -> int:
        return age_seconds(self.older_than)


class MetricsConfig(Record):
    """Prometheus metrics of the daemon."""

    listen: Annotated[str, AfterValidator(check_address)] | None = None  # "HOST:PORT"; None: no metrics


class NotifyConfig(Record):
    """Who gets news of evaluations, as JSON."""

    command: tuple[str, ...] = ()  # program and arguments; reads the JSON from its standard input
    webhook: Annotated[str, AfterValidator(check_web_address)] | None = None
    webhook_file: Place | None = None


class Config(Record):
    """All settings. Paths are absolute once loaded."""

    work_dir: Place = Path("evalspan-work")
    shared_group: str | None = (
        None  # Unix group whose members may read the work folder and leave checkpoints; None: its user alone
    )
    cluster: ClusterConfig = ClusterConfig()
    slurm: SlurmConfig = SlurmConfig()
    trial: TrialConfig = TrialConfig()
    plan: PlanConfig = PlanConfig()
    stage: StageConfig = StageConfig()
    redis: RedisConfig = RedisConfig()
    metric: MetricConfig = MetricConfig()
    judge: JudgeConfig = JudgeConfig()
    watch: WatchConfig = WatchConfig()
    borrow: BorrowConfig = BorrowConfig()
    nodes: NodesConfig = NodesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: TrackersConfig = TrackersConfig()
    retention: RetentionConfig = RetentionConfig()
    metrics: MetricsConfig = MetricsConfig()
    notify: NotifyConfig = NotifyConfig()
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    backlog: Literal["all", "latest"] | KeepEvery = "all"
