"""All settings with their types, defaults and texts, as one frozen Config. Pure.

Rule: a setting's text is the docstring below its field, with "; default: …" where the default is None. The file that
`evalspan init` writes, docs/reference/settings.md and the errors are made of the fields. `loading.py` fills them from
evalspan.toml, the environment and the command line.
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
from evaljobs.contract.specs import Count, JudgeConfig, Mode, Positive, Record

TimeLimit = Annotated[str, AfterValidator(check_time)]
HostLists = Annotated[tuple[str, ...], AfterValidator(lambda texts: tuple(map(check_hostlist, texts)))]
SbatchOptions = Annotated[tuple[str, ...], AfterValidator(check_extra_args)]
# A folder or file; `load` resolves `~` and paths relative to the file that names it.
Place = Annotated[Path, PlainSerializer(str)]


def example(value: Any, **bounds: Any) -> Any:
    """A setting that is not set unless the user does. `value`: what the template shows of it."""
    return Field(None, examples=[value], **bounds)


class ClusterConfig(Record):
    """Where jobs run and as whom."""

    kind: Literal["local", "slurm"] = "local"
    """where jobs run: "local": as processes on this machine; "slurm": as jobs of Slurm"""
    api: Literal["cli", "pyslurm"] = "cli"
    """how Slurm is called; "pyslurm" needs `pip install evalspan[slurm]` and Slurm 25.11"""
    partition: str | None = example("gpu")
    """partition of jobs with GPUs; default: the site's"""
    cpu_partition: str | None = example("cpu")
    """partition of jobs without GPUs; default: partition"""
    account: str | None = example("my-account")
    """Slurm account of all jobs; default: the site's"""
    qos: str | None = example("my-qos")
    """QOS of all jobs; default: the site's"""
    nice: Count | None = example(100)
    """sbatch's --nice, so that jobs stand behind the site's others"""
    reservation: str | None = example("my-res")
    """reservation that all jobs run in"""
    extra_args: SbatchOptions = ()
    """options of every sbatch, e.g. ["--exclusive=user"]"""
    export: tuple[str, ...] = ()
    """further variables that jobs get, e.g. ["SITE_*"] (docs/site/slurm.md#variables-that-jobs-get)"""
    poll_seconds: float = Field(10.0, ge=1)
    """time between two listings of the cluster's jobs; of its nodes: 1.5 times that"""
    slots: Positive | None = example(2)
    """trials at once with kind "local"; default: one a GPU, or two without GPUs"""


class RoleConfig(Record):
    """What jobs of one role ask Slurm for, in place of what [cluster] says; their extra_args follow those of [cluster]."""

    partition: str | None = example("gpu")
    """partition of these jobs; default: as [cluster] says"""
    account: str | None = example("my-account")
    """account of these jobs; default: as [cluster] says"""
    qos: str | None = example("my-qos")
    """QOS of these jobs; default: as [cluster] says"""
    extra_args: SbatchOptions = ()
    """options of sbatch, behind those of [cluster]"""


class SlurmConfig(Record):
    """How jobs ask for GPUs; its tables: what jobs of one role ask for in place of what [cluster] says."""

    gpu_request: Annotated[str, AfterValidator(check_gpu_request)] = GPU_REQUEST
    """how sbatch asks for GPUs: "--gres=gpu:{type}:{n}" with the node's type, "--gpus-per-node={n}"."""
    precursor: RoleConfig = RoleConfig()
    """jobs that stage weights on a node"""
    trial: RoleConfig = RoleConfig()
    """jobs with GPUs"""
    metric: RoleConfig = RoleConfig()
    """jobs that execute programs and score"""
    build: RoleConfig = RoleConfig()
    """jobs that build request sets and convert checkpoints"""


class TrialConfig(Record):
    """How a trial loads the model, and what it asks of a node."""

    python: str | None = example("/path/python")
    """the interpreter that has your torch or vLLM; default: evalspan's own"""
    prologue: str | None = example("module load cuda")
    """shell lines before the interpreter of builds, precursors, trials and metric workers"""
    container: str | None = example("apptainer exec --nv image.sif")
    """command in front of the interpreter"""
    env: dict[str, str] = Field({})
    """variables of the jobs, e.g. { NCCL_DEBUG = "WARN" }"""
    engine: str = "hf"
    """lm-eval's name of the engine: "hf" or "vllm"; "sglang" is passed to lm-eval, not tested here"""
    mode: Mode = "exact"
    """mode of suites without one; "fast": hf computes each shared context once
    (docs/evaluating/exact-and-fast.md)"""
    model_args: Annotated[dict[str, Any], AfterValidator(check_model_args)] = Field({})
    """lm-eval's --model_args, e.g. { dtype = "bfloat16" }"""
    gpus_per_trial: Positive = 1
    """GPUs of a trial"""
    cpus: Positive = 1
    """CPU cores of a trial"""
    memory_mb: Positive | None = example(16384)
    """MB that a trial asks of Slurm; default: 4096 and what the weights need"""
    threads: Positive | None = example(1)
    """CPU threads of a trial; default: torch's own choice"""
    device: str | None = example("cpu")
    """torch device of a trial; default: cuda where the job has a GPU"""
    time_limit: TimeLimit = "4:00:00"
    """time limit of a trial at most; trials ask for what their work is predicted to take"""
    hung_seconds: float | None = example(900.0, gt=0)
    """without progress for so long a trial is ended, its shard given to another; default: 900, vllm 1800"""
    redis_patience_seconds: float = Field(600.0, ge=0)
    """a trial without work waits this long for Redis: a requeued coordinator's is away for 2 minutes"""

    @property
    def time_limit_seconds(self) -> int:
        return seconds_of(self.time_limit)


class PlanConfig(Record):
    """Which shards run where, in which order."""

    policy: Literal["evalspan", "round-robin"] = "evalspan"
    """how shards are planned; "round-robin": sets sorted by prior, dealt round-robin to trials (Hu et al.,
    NSDI 2024)"""
    steal: bool | None = example(True)
    """a trial without shards takes another's; default: true, with "round-robin" false"""

    @property
    def steals(self) -> bool:
        return self.policy == "evalspan" if self.steal is None else self.steal


class StageConfig(Record):
    """Weights in node memory."""

    enabled: bool = True
    """false: every trial reads the checkpoint from shared storage"""
    host_trials: bool | Literal["auto"] = "auto"
    """true: one long job a node stages and hosts trials (private /dev/shm, exclusive nodes); "auto": where
    Slurm's own rules ask for it"""
    roots: tuple[str, ...] = Field(("/dev/shm",), min_length=1)
    """folders of a node for the weights: the first that is usable and large enough, e.g. ["/dev/shm",
    "/local/scratch"]"""
    lease_seconds: float = Field(900.0, ge=1)
    """staged weights are cleared after so long without the coordinator's renewal: keep it above 90 on
    Slurm"""
    readers: Positive = 16
    """a precursor's parallel reads of one file"""
    prefetch: float = Field(0.5, ge=0, le=1)
    """share of a node's free memory that the next checkpoint may take while its GPUs are busy"""

    @property
    def hosts(self) -> bool:
        return self.host_trials is True


class RedisConfig(Record):
    """The site's server where `url` is set; else evalspan starts its own."""

    url: str | None = example("rediss://redis.site:6380/0")
    """the site's server; default: evalspan starts its own here"""
    bind: str | None = example("10.0.0.1")
    """address of evalspan's server; default: the one that compute nodes reach"""
    port: int = Field(0, ge=0, le=65535)
    """port of evalspan's server; 0: any free one"""
    username: str | None = example("evalspan")
    """ACL user at the site's server"""
    password_file: Place | None = example("redis.password")
    """file of mode 0600 with that user's password"""
    ca_file: Place | None = example("site-ca.pem")
    """authority of a server with rediss://; default: the system's authorities"""
    cert_file: Place | None = example("client.pem")
    """the client's certificate, where the server asks for one"""
    key_file: Place | None = example("client.key")
    """key of that certificate"""


class MetricConfig(Record):
    """CPU workers that execute programs and score; the plan chooses their number, `workers` at most."""

    workers: Positive | None = example(16)
    """most CPU jobs that execute programs and score; default: what the partition's cores hold, 64 at most"""
    cpus: Positive = 1
    """CPU cores of a metric worker"""
    memory_mb: Positive = 4096
    """MB that a metric worker asks of Slurm"""
    bootstrap_iters: Count = 100000
    """resamples for standard errors, as in lm-eval; fewer are faster"""
    item_seconds: float = Field(60.0, gt=0)
    """time limit of one program, or of one item's metric"""
    allow_unsafe: bool = False
    """true: run generated programs also where resource limits alone hold"""


class WatchConfig(Record):
    """Where checkpoints appear, and what a member's notice may name."""

    folders: tuple[Place, ...] = ()
    """folders that a training writes checkpoints to, listed every second, e.g. ["/shared/run7/checkpoints"];
    needs `suite` below"""
    roots: tuple[Place, ...] = ()
    """checkpoints of members of shared_group are taken below these and `folders` only, e.g. ["/shared"]"""
    suites: tuple[Place, ...] = ()
    """suite files that the hook may name, e.g. ["suites/mine.toml"], which it names "mine"."""
    suite: str | None = example("core")
    """suite of checkpoints announced without a suite"""

    @field_validator("suite")
    @classmethod
    def _file_of(cls, name: str | None, info: ValidationInfo) -> str | None:
        """The file in `suites` that has this name, else the name."""
        return next((str(file) for file in info.data.get("suites", ()) if file.stem == name), name)


class BorrowConfig(Record):
    """How much of the cluster evalspan may take."""

    max_nodes: Positive | None = example(4)
    """most nodes of all evaluations together; default: no bound"""
    max_gpus: Positive | None = example(16)
    """most GPUs of all evaluations together; default: no bound"""
    leave_nodes_free: Count = 0
    """idle nodes to leave to others"""
    best_effort: str | None = example("scavenge")
    """partitions whose jobs are preempted, used for nodes that [cluster] partition lacks"""
    best_effort_qos: str | None = example("low")
    """QOS of jobs there; default: [cluster] qos"""


class NodesConfig(Record):
    """Which nodes evalspan may take."""

    include: HostLists = ()
    """the only nodes for jobs with GPUs, as Slurm hostlists, e.g. ["gpu[01-16]", "dgx1"]"""
    exclude: HostLists = ()
    """nodes without jobs of evalspan, e.g. ["gpu[03,07]"]"""
    gpu_types: tuple[str, ...] = ()
    """GPU types to use, as Gres names them, e.g. ["a100", "h100"]; default: any"""
    features: tuple[str, ...] = ()
    """features that a node for jobs with GPUs has, all of them, e.g. ["nvlink"]"""
    gpu_memory_gb: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """GB of a GPU by its type, where the name does not say it, e.g. { h100 = 94 }"""
    wake: bool = False
    """true: jobs may boot nodes that Slurm has powered down (idle~)"""
    check: bool = False
    """true: the daemon checks a node of Slurm alone before its first use of a day, for half a minute, and cordons a bad one"""


class CheckpointConfig(Record):
    """Which checkpoints are evaluated, and how they are read."""

    allow_bin: bool = False
    """true: take pickled weights, which run code when they are loaded"""
    convert: Annotated[str, AfterValidator(check_conversion)] | None = example(
        "python dcp_to_hf.py {src} {dst}"
    )
    """command that makes a Hugging Face folder {dst} of training's own format {src}, without a shell; a CPU
    job, cached"""
    convert_memory_mb: Positive | None = example(65536)
    """MB that a conversion asks of Slurm; default: twice the checkpoint and 4 GB"""


class TrackersConfig(Record):
    """Trackers that get each ended evaluation; each needs its package (docs/results/trackers.md)."""

    tensorboard_dir: Place | None = example("tb")
    """folder of TensorBoard's event files"""
    wandb_project: str | None = example("pretraining")
    """project of W&B; offline runs lie in the work folder below trackers/"""
    wandb_mode: Literal["offline", "online"] = "offline"
    """when W&B gets them; "online" sends at once"""
    mlflow_uri: str | None = example("http://mlflow.site:5000")
    """MLflow's server, or file:///path of a file store"""
    mlflow_experiment: str = "evalspan"
    """name of MLflow's experiment"""


class RetentionConfig(Record):
    """What the daemon keeps of evaluations that ended `older_than` ago; scores and journals always (docs/site/disk.md)."""

    keep: Literal["scores", "responses"] | None = example("scores")
    """what stays: "scores" alone, or "responses" and samples too; default: nothing goes"""
    older_than: Annotated[str, AfterValidator(check_age)] = "30d"
    """time since an evaluation's end, also "12h" or "8w"."""
    baselines: tuple[str, ...] = ()
    """evaluations that lose nothing, by id or glob of ids, e.g. ["step-100000-*"]; `prune` heeds it, too"""

    @property
    def older_than_seconds(self) -> int:
        return age_seconds(self.older_than)


class MetricsConfig(Record):
    """Prometheus metrics of the daemon (docs/results/alerts.md); they need `pip install 'evalspan[metrics]'`."""

    listen: Annotated[str, AfterValidator(check_address)] | None = example("127.0.0.1:9464")
    """HOST:PORT that Prometheus scrapes; default: no metrics"""


class NotifyConfig(Record):
    """News of the daemon as JSON: an evaluation ended, failed or is parked, a score is worse than it was."""

    command: tuple[str, ...] = Field((), examples=[["/home/me/tell"]])
    """program and arguments; it reads the JSON from its standard input"""
    webhook: Annotated[str, AfterValidator(check_web_address)] | None = example("https://chat.site/hook")
    """gets the JSON by POST"""
    webhook_file: Place | None = example("webhook.url")
    """in place of webhook a file of mode 0600 with the address, where who knows it may post"""
    gate: Place | None = example("policy.toml")
    """rules of `evalspan gate` that each evaluation is held against at its end; its news say what came of it"""


class Config(Record):
    """All settings. Paths are absolute once loaded."""

    work_dir: Place = Path("evalspan-work")
    """folder of journals, request sets and results, on storage that all nodes share; relative to this file,
    the default to the current folder"""
    shared_group: str | None = example("llm-team")
    """the Unix group that may read the work folder and submit; default: its user alone"""
    backlog: Literal["all", "latest"] = "all"
    """waiting checkpoints to evaluate: "all", or the "latest" of a folder"""
    gpu_hour_price: float | None = example(2.10, ge=0)
    """price in any currency: reports and trackers then show what a checkpoint cost"""
    horizon: int = Field(100, ge=10)
    """checkpoints of a training, over which at most 5 % of trainings without a drop are falsely "worse since" one"""
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
