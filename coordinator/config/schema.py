"""All settings with their types, defaults and texts, as one frozen Config. Pure.

Rule: a setting's text stands in its field alone: the file that `evalspan init` writes, docs/reference/settings.md and the
errors are made of the fields. `loading.py` fills them from evalspan.toml, the environment and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

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


def setting(text: str, default: Any = None, example: Any = None, **bounds: Any) -> Any:
    """A field. `text` is all that template and reference say of it, with "; default: …" where the default is None.

    `example`: what the template shows of a setting without a default.
    """
    return Field(default, description=text, examples=None if example is None else [example], **bounds)


class ClusterConfig(Record):
    """Where jobs run and as whom."""

    kind: Literal["local", "slurm"] = setting('"local": processes on this machine; "slurm": jobs', "local")
    api: Literal["cli", "pyslurm"] = setting(
        'how Slurm is called; "pyslurm" needs `pip install evalspan[slurm]` and Slurm 25.11', "cli"
    )
    partition: str | None = setting("partition of jobs with GPUs; default: the site's", example="gpu")
    cpu_partition: str | None = setting("partition of jobs without GPUs; default: partition", example="cpu")
    account: str | None = setting("Slurm account of all jobs; default: the site's", example="my-account")
    qos: str | None = setting("QOS of all jobs; default: the site's", example="my-qos")
    nice: Count | None = setting("sbatch's --nice, so that jobs stand behind the site's others", example=100)
    reservation: str | None = setting("reservation that all jobs run in", example="my-res")
    extra_args: SbatchOptions = setting('options of every sbatch, e.g. ["--exclusive=user"]', ())
    export: tuple[str, ...] = setting(
        'further variables that jobs get, e.g. ["SITE_*"] (docs/site/slurm.md#variables-that-jobs-get)', ()
    )
    poll_seconds: float = setting(
        "time between two listings of the cluster's jobs; of its nodes: 1.5 times that", 10.0, ge=1
    )
    slots: Positive | None = setting(
        'trials at once with kind "local"; default: one a GPU, or two without GPUs', example=2
    )


class RoleConfig(Record):
    """What jobs of one role ask Slurm for, in place of what [cluster] says; their extra_args follow those of [cluster]."""

    partition: str | None = setting("partition of these jobs; default: as [cluster] says", example="gpu")
    account: str | None = setting("account of these jobs; default: as [cluster] says", example="my-account")
    qos: str | None = setting("QOS of these jobs; default: as [cluster] says", example="my-qos")
    extra_args: SbatchOptions = setting("options of sbatch, behind those of [cluster]", ())


class SlurmConfig(Record):
    """How jobs ask for GPUs; its tables: what jobs of one role ask for in place of what [cluster] says."""

    gpu_request: Annotated[str, AfterValidator(check_gpu_request)] = setting(
        'how sbatch asks for GPUs: "--gres=gpu:{type}:{n}" with the node\'s type, "--gpus-per-node={n}"',
        GPU_REQUEST,
    )
    precursor: RoleConfig = setting("jobs that stage weights on a node", RoleConfig())
    trial: RoleConfig = setting("jobs with GPUs", RoleConfig())
    metric: RoleConfig = setting("jobs that execute programs and score", RoleConfig())
    build: RoleConfig = setting("jobs that build request sets and convert checkpoints", RoleConfig())


class TrialConfig(Record):
    """How a trial loads the model, and what it asks of a node."""

    python: str | None = setting(
        "the interpreter that has your torch or vLLM; default: evalspan's own", example="/path/python"
    )
    prologue: str | None = setting(
        "shell lines before the interpreter of builds, precursors, trials and metric workers",
        example="module load cuda",
    )
    container: str | None = setting(
        "command in front of the interpreter", example="apptainer exec --nv image.sif"
    )
    env: dict[str, str] = setting('variables of the jobs, e.g. { NCCL_DEBUG = "WARN" }', {})
    engine: str = setting(
        'lm-eval\'s name of the engine: "hf" or "vllm"; "sglang" is passed to lm-eval, not tested here', "hf"
    )
    mode: Mode = setting(
        'mode of suites without one; "fast": hf computes each shared context once (docs/evaluating/fast-mode.md)',
        "exact",
    )
    model_args: Annotated[dict[str, Any], AfterValidator(check_model_args)] = setting(
        'lm-eval\'s --model_args, e.g. { dtype = "bfloat16" }', {}
    )
    gpus_per_trial: Positive = setting("GPUs of a trial", 1)
    cpus: Positive = setting("CPU cores of a trial", 1)
    memory_mb: Positive | None = setting(
        "MB that a trial asks of Slurm; default: 4096 and what the weights need", example=16384
    )
    threads: Positive | None = setting("CPU threads of a trial; default: torch's own choice", example=1)
    device: str | None = setting(
        "torch device of a trial; default: cuda where the job has a GPU", example="cpu"
    )
    time_limit: TimeLimit = setting(
        "time limit of a trial at most; trials ask for what their work is predicted to take", "4:00:00"
    )
    hung_seconds: float | None = setting(
        "without progress for so long a trial is ended, its shard given to another; default: 900, vllm 1800",
        example=900.0,
        gt=0,
    )
    redis_patience_seconds: float = setting(
        "a trial without work waits this long for Redis: a requeued coordinator's is away for 2 minutes",
        600.0,
        ge=0,
    )

    @property
    def time_limit_seconds(self) -> int:
        return seconds_of(self.time_limit)


class PlanConfig(Record):
    """Which shards run where, in which order."""

    policy: Literal["evalspan", "round-robin"] = setting(
        'how shards are planned; "round-robin": sets sorted by prior, dealt round-robin to trials (Hu et al., NSDI 2024)',
        "evalspan",
    )
    steal: bool | None = setting(
        'a trial without shards takes another\'s; default: true, with "round-robin" false', example=True
    )

    @property
    def steals(self) -> bool:
        return self.policy == "evalspan" if self.steal is None else self.steal


class StageConfig(Record):
    """Weights in node memory."""

    enabled: bool = setting("false: every trial reads the checkpoint from shared storage", True)
    host_trials: bool | Literal["auto"] = setting(
        'true: one long job a node stages and hosts trials (private /dev/shm, exclusive nodes); "auto": where Slurm\'s own rules ask for it',
        "auto",
    )
    roots: tuple[str, ...] = setting(
        'folders of a node for the weights: the first that is usable and large enough, e.g. ["/dev/shm", "/local/scratch"]',
        ("/dev/shm",),
        min_length=1,
    )
    lease_seconds: float = setting(
        "staged weights are cleared after so long without the coordinator's renewal: keep it above 90 on Slurm",
        900.0,
        ge=1,
    )
    readers: Positive = setting("a precursor's parallel reads of one file", 16)
    prefetch: float = setting(
        "share of a node's free memory that the next checkpoint may take while its GPUs are busy",
        0.5,
        ge=0,
        le=1,
    )


class RedisConfig(Record):
    """The site's server where `url` is set; else evalspan starts its own."""

    url: str | None = setting(
        "the site's server; default: evalspan starts its own here", example="rediss://redis.site:6380/0"
    )
    bind: str | None = setting(
        "address of evalspan's server; default: the one that compute nodes reach", example="10.0.0.1"
    )
    port: int = setting("port of evalspan's server; 0: any free one", 0, ge=0, le=65535)
    username: str | None = setting("ACL user at the site's server", example="evalspan")
    password_file: Place | None = setting(
        "file of mode 0600 with that user's password", example="redis.password"
    )
    ca_file: Place | None = setting(
        "authority of a server with rediss://; default: the system's authorities", example="site-ca.pem"
    )
    cert_file: Place | None = setting(
        "the client's certificate, where the server asks for one", example="client.pem"
    )
    key_file: Place | None = setting("key of that certificate", example="client.key")


class MetricConfig(Record):
    """CPU workers that execute programs and score; the plan chooses their number, `workers` at most."""

    workers: Positive | None = setting(
        "most CPU jobs that execute programs and score; default: what the partition's cores hold, 64 at most",
        example=16,
    )
    cpus: Positive = setting("CPU cores of a metric worker", 1)
    memory_mb: Positive = setting("MB that a metric worker asks of Slurm", 4096)
    bootstrap_iters: Count = setting("resamples for standard errors, as in lm-eval; fewer are faster", 100000)
    item_seconds: float = setting("time limit of one program, or of one item's metric", 60.0, gt=0)
    allow_unsafe: bool = setting("true: run generated programs also where resource limits alone hold", False)


class JudgeConfig(Record):
    """The judge model, behind an OpenAI-compatible endpoint. Caps hold for all workers together."""

    url: str | None = setting(
        "an OpenAI-compatible endpoint, needed by suites with judge tasks",
        example="https://api.openai.com/v1",
    )
    model: str | None = setting("the model's name at the endpoint", example="gpt-4.1")
    api_key_env: str | None = setting("the variable that holds the key", example="OPENAI_API_KEY")
    api_key_file: Place | None = setting(
        "in place of api_key_env a file of mode 0600 with the key", example="judge.key"
    )
    allow_http: bool = setting(
        "true: a key may go to another host by http://, for a network that you trust", False
    )
    temperature: float = setting("sampling temperature of the judge", 0.0, ge=0, le=2)
    max_tokens: Positive = setting("most tokens of an answer", 2048)
    concurrency: int = setting("most requests at once, of all workers together", 8, ge=1, le=1024)
    requests_per_minute: Positive | None = setting(
        "most requests within 60 s, of all workers together; default: no bound", example=60
    )
    max_cost: float | None = setting(
        "most cost of an evaluation, in the currency of the prices; default: no bound", example=5.0, gt=0
    )
    price_per_million_prompt_tokens: float | None = setting(
        "price in any currency; default: not counted", example=2.0, ge=0
    )
    price_per_million_completion_tokens: float | None = setting(
        "price in any currency; default: not counted", example=8.0, ge=0
    )
    timeout_seconds: float = setting("time limit of a request", 120.0, gt=0)
    retries: Count = setting("further tries of a request that failed", 5)


class KeepEvery(Record):
    """Evaluate every k-th of a series' waiting checkpoints."""

    keep_every: Positive


class WatchConfig(Record):
    """Where checkpoints appear, and what a member's notice may name."""

    folders: tuple[Place, ...] = setting(
        'folders that a training writes checkpoints to, listed every second, e.g. ["/shared/run7/checkpoints"]; needs `suite` below',
        (),
    )
    roots: tuple[Place, ...] = setting(
        'checkpoints of members of shared_group are taken below these and `folders` only, e.g. ["/shared"]',
        (),
    )
    suites: tuple[Place, ...] = setting(
        'suite files that the hook may name, e.g. ["suites/mine.toml"], which it names "mine"', ()
    )
    suite: str | None = setting("suite of checkpoints announced without a suite", example="core")

    @field_validator("suite")
    @classmethod
    def _file_of(cls, name: str | None, info: ValidationInfo) -> str | None:
        """The file in `suites` that has this name, else the name."""
        return next((str(file) for file in info.data.get("suites", ()) if file.stem == name), name)


class BorrowConfig(Record):
    """How much of the cluster evalspan may take."""

    max_nodes: Positive | None = setting(
        "most nodes of all evaluations together; default: no bound", example=4
    )
    max_gpus: Positive | None = setting(
        "most GPUs of all evaluations together; default: no bound", example=16
    )
    leave_nodes_free: Count = setting("idle nodes to leave to others", 0)
    best_effort: str | None = setting(
        "partitions whose jobs are preempted, used for nodes that [cluster] partition lacks",
        example="scavenge",
    )
    best_effort_qos: str | None = setting("QOS of jobs there; default: [cluster] qos", example="low")


class NodesConfig(Record):
    """Which nodes evalspan may take."""

    include: HostLists = setting(
        'the only nodes for jobs with GPUs, as Slurm hostlists, e.g. ["gpu[01-16]", "dgx1"]', ()
    )
    exclude: HostLists = setting('nodes without jobs of evalspan, e.g. ["gpu[03,07]"]', ())
    gpu_types: tuple[str, ...] = setting(
        'GPU types to use, as Gres names them, e.g. ["a100", "h100"]; default: any', ()
    )
    features: tuple[str, ...] = setting(
        'features that a node for jobs with GPUs has, all of them, e.g. ["nvlink"]', ()
    )
    gpu_memory_gb: dict[str, Annotated[float, Field(gt=0)]] = setting(
        "GB of a GPU by its type, where the name does not say it, e.g. { h100 = 94 }", {}
    )
    wake: bool = setting("true: jobs may boot nodes that Slurm has powered down (idle~)", False)


class CheckpointConfig(Record):
    """Which checkpoints are evaluated, and how they are read."""

    allow_bin: bool = setting("true: take pickled weights, which run code when they are loaded", False)
    convert: Annotated[str, AfterValidator(check_conversion)] | None = setting(
        "command that makes a Hugging Face folder {dst} of training's own format {src}, without a shell; a CPU job, cached",
        example="python dcp_to_hf.py {src} {dst}",
    )
    convert_memory_mb: Positive | None = setting(
        "MB that a conversion asks of Slurm; default: twice the checkpoint and 4 GB", example=65536
    )


class TrackersConfig(Record):
    """Trackers that get each ended evaluation; each needs its package (docs/results/trackers.md)."""

    tensorboard_dir: Place | None = setting("folder of TensorBoard's event files", example="tb")
    wandb_project: str | None = setting(
        "project of W&B; offline runs lie in the work folder below trackers/", example="pretraining"
    )
    wandb_mode: Literal["offline", "online"] = setting(
        'when W&B gets them; "online" sends at once', "offline"
    )
    mlflow_uri: str | None = setting(
        "MLflow's server, or file:///path of a file store", example="http://mlflow.site:5000"
    )
    mlflow_experiment: str = setting("name of MLflow's experiment", "evalspan")


class RetentionConfig(Record):
    """What the daemon keeps of evaluations that ended `older_than` ago; scores and journals always (docs/operations/retention.md)."""

    keep: Literal["scores", "responses"] | None = setting(
        'what stays: "scores" alone, or "responses" and samples too; default: nothing goes',
        example="scores",
    )
    older_than: Annotated[str, AfterValidator(check_age)] = setting(
        'time since an evaluation\'s end, also "12h" or "8w"', "30d"
    )
    baselines: tuple[str, ...] = setting(
        'evaluations that lose nothing, by id or glob of ids, e.g. ["step-100000-*"]; `prune` heeds it, too',
        (),
    )

    @property
    def older_than_seconds(self) -> int:
        return age_seconds(self.older_than)


class MetricsConfig(Record):
    """Prometheus metrics of the daemon (docs/results/alerts.md); they need `pip install 'evalspan[metrics]'`."""

    listen: Annotated[str, AfterValidator(check_address)] | None = setting(
        "HOST:PORT that Prometheus scrapes; default: no metrics", example="127.0.0.1:9464"
    )


class NotifyConfig(Record):
    """News of the daemon as JSON: an evaluation ended, failed or is parked, a score fell beyond its error."""

    command: tuple[str, ...] = setting(
        "program and arguments; it reads the JSON from its standard input", (), example=["/home/me/tell"]
    )
    webhook: Annotated[str, AfterValidator(check_web_address)] | None = setting(
        "gets the JSON by POST", example="https://chat.site/hook"
    )
    webhook_file: Place | None = setting(
        "in place of webhook a file of mode 0600 with the address, where who knows it may post",
        example="webhook.url",
    )


class Config(Record):
    """All settings. Paths are absolute once loaded."""

    work_dir: Place = setting(
        "folder of journals, request sets and results, on storage that all nodes share; relative to this file, the default to the current folder",
        Path("evalspan-work"),
    )
    shared_group: str | None = setting(
        "the Unix group that may read the work folder and submit; default: its user alone", example="llm-team"
    )
    backlog: Literal["all", "latest"] | KeepEvery = setting(
        'waiting checkpoints to evaluate: "all", the "latest" of a folder, or { keep_every = 5 } and the latest',
        "all",
    )
    gpu_hour_price: float | None = setting(
        "price in any currency: reports and trackers then show what a checkpoint cost", example=2.10, ge=0
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


def settings(
    model: type[Record] = Config, table: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """(keys of its tables and its own, field) of every setting, in the order of the fields."""
    for name, field in model.model_fields.items():
        if inner := record_of(field):
            yield from settings(inner, (*table, name))
        else:
            yield (*table, name), field


def record_of(field: FieldInfo) -> type[Record] | None:
    """The record of a field that is a table of settings, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Record) else None
