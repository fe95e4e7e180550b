"""All settings with their types, defaults and descriptions, as one frozen Config. Pure.

Rule: a setting's description is the docstring below its field, with "; default: …" if the default is None. The file that
`evalspan init` writes, docs/reference/settings.md and the errors are generated from the fields. `loading.py` fills them from
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

from coordinator.site.config.checks import (
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
# A folder or file; `load` resolves `~`, and relative paths against the file that names it.
Place = Annotated[Path, PlainSerializer(str)]


def example_value(value: Any, **bounds: Any) -> Any:
    """Return a field that is unset by default. `value`: what the template shows."""
    return Field(None, examples=[value], **bounds)


class ClusterConfig(Record):
    """Where jobs run, and under which account."""

    kind: Literal["local", "slurm"] = "local"
    """where jobs run: "local": as processes on this machine; "slurm": as Slurm jobs"""
    api: Literal["cli", "pyslurm"] = "cli"
    """how Slurm is called; "pyslurm" needs `pip install evalspan[slurm]` and Slurm 25.11"""
    partition: str | None = example_value("gpu")
    """partition of jobs with GPUs; default: the site's"""
    cpu_partition: str | None = example_value("cpu")
    """partition of jobs without GPUs; default: partition"""
    account: str | None = example_value("my-account")
    """Slurm account of all jobs; default: the site's"""
    qos: str | None = example_value("my-qos")
    """QOS of all jobs; default: the site's"""
    nice: Count | None = example_value(100)
    """sbatch's --nice, so that jobs yield to the site's others"""
    reservation: str | None = example_value("my-res")
    """reservation that all jobs run in"""
    extra_args: SbatchOptions = ()
    """additional options for every sbatch, e.g. ["--exclusive=user"]"""
    export: tuple[str, ...] = ()
    """additional variables to pass to jobs, e.g. ["SITE_*"] (docs/site/slurm.md#variables-that-jobs-get)"""
    poll_seconds: float = Field(10.0, ge=1)
    """seconds between two listings of the cluster's jobs; nodes: 1.5 times that"""
    slots: Positive | None = example_value(2)
    """concurrent trials with kind "local"; default: one per GPU, or two without GPUs"""


class RoleConfig(Record):
    """Slurm options for the jobs of one role, overriding [cluster]; their extra_args are appended to those of [cluster]."""

    partition: str | None = example_value("gpu")
    """partition of these jobs; default: that of [cluster]"""
    account: str | None = example_value("my-account")
    """account of these jobs; default: that of [cluster]"""
    qos: str | None = example_value("my-qos")
    """QOS of these jobs; default: that of [cluster]"""
    extra_args: SbatchOptions = ()
    """options of sbatch, after those of [cluster]"""


class SlurmConfig(Record):
    """How jobs request GPUs; its tables override [cluster], for the jobs of one role."""

    gpu_request: Annotated[str, AfterValidator(check_gpu_request)] = GPU_REQUEST
    """sbatch's GPU request: "--gres=gpu:{type}:{n}" with the node's type, "--gpus-per-node={n}"."""
    precursor: RoleConfig = RoleConfig()
    """jobs that stage weights on a node"""
    trial: RoleConfig = RoleConfig()
    """jobs with GPUs"""
    metric: RoleConfig = RoleConfig()
    """jobs that execute programs and score"""
    build: RoleConfig = RoleConfig()
    """jobs that build request sets and convert checkpoints"""


class TrialConfig(Record):
    """How a trial loads the model, and its resources."""

    python: str | None = example_value("/path/python")
    """interpreter with your torch or vLLM; default: evalspan's own"""
    prologue: str | None = example_value("module load cuda")
    """shell lines to run before the interpreter in builds, precursors, trials and metric workers"""
    container: str | None = example_value("apptainer exec --nv image.sif")
    """command prefix of the interpreter"""
    env: dict[str, str] = Field({})
    """environment variables of the jobs, e.g. { NCCL_DEBUG = "WARN" }"""
    engine: str = "hf"
    """engine, by lm-eval's name: "hf", "vllm" or "local-completions" (a server); "sglang" is passed to lm-eval but not tested"""
    mode: Mode = "exact"
    """mode of suites that set none; "fast": hf computes each shared context once (docs/evaluating/exact-and-fast.md)"""
    model_args: Annotated[dict[str, Any], AfterValidator(check_model_args)] = Field({})
    """lm-eval's --model_args, e.g. { dtype = "bfloat16" }"""
    gpus_per_trial: Positive = 1
    """GPUs per trial"""
    cpus: Positive = 1
    """CPU cores per trial"""
    memory_mb: Positive | None = example_value(16384)
    """MB of memory that a trial requests; default: 4096 plus what the weights need"""
    threads: Positive | None = example_value(1)
    """CPU threads per trial; default: torch's own choice"""
    device: str | None = example_value("cpu")
    """torch device of trials; default: cuda if the job has a GPU"""
    time_limit: TimeLimit = "4:00:00"
    """longest time limit of a trial; trials request what their work is predicted to take"""
    hung_seconds: float | None = example_value(900.0, gt=0)
    """seconds without progress after which a trial is ended and its shard moves to another; default: 900, vllm 1800"""
    redis_patience_seconds: float = Field(600.0, ge=0)
    """seconds that an idle trial waits for an unreachable Redis; a requeued coordinator's returns after 2 minutes"""

    @property
    def time_limit_seconds(self) -> int:
        return seconds_of(self.time_limit)


class PlanConfig(Record):
    """Which shards run where, and in which order."""

    policy: Literal["evalspan", "round-robin"] = "evalspan"
    """planning policy; "round-robin": sets sorted by prior, dealt round-robin to trials (Hu et al., NSDI 2024)"""
    steal: bool | None = example_value(True)
    """whether a trial without shards takes another's; default: true, with "round-robin" false"""

    @property
    def steals(self) -> bool:
        return self.policy == "evalspan" if self.steal is None else self.steal


class StageConfig(Record):
    """Weights in node memory."""

    enabled: bool = True
    """false: every trial reads the checkpoint from shared storage"""
    host_trials: bool | Literal["auto"] = "auto"
    """true: one long job per node stages weights and hosts trials (private /dev/shm, exclusive nodes); "auto": if Slurm's
    rules require it
    """
    roots: tuple[str, ...] = Field(("/dev/shm",), min_length=1)
    """folders on a node for the weights; the first that is usable and large enough, e.g. ["/dev/shm", "/local/scratch"]"""
    lease_seconds: float = Field(900.0, ge=1)
    """seconds without renewal by the coordinator after which staged weights are cleared; keep it above 90 on Slurm"""
    readers: Positive = 16
    """parallel reads per file in a precursor"""
    prefetch: float = Field(0.5, ge=0, le=1)
    """share of a node's free memory for the next checkpoint while its GPUs are busy"""

    @property
    def hosts(self) -> bool:
        return self.host_trials is True


class RedisConfig(Record):
    """The site's Redis server if `url` is set; otherwise evalspan starts its own."""

    url: str | None = example_value("rediss://redis.site:6380/0")
    """the site's server; default: evalspan starts its own"""
    bind: str | None = example_value("10.0.0.1")
    """address of evalspan's server; default: the one that compute nodes can reach"""
    port: int = Field(0, ge=0, le=65535)
    """port of evalspan's server; 0: any free port"""
    username: str | None = example_value("evalspan")
    """ACL user on the site's server"""
    password_file: Place | None = example_value("redis.password")
    """file with that user's password, mode 0600"""
    ca_file: Place | None = example_value("site-ca.pem")
    """CA certificates for rediss://; default: the system's"""
    cert_file: Place | None = example_value("client.pem")
    """client certificate, if the server requires one"""
    key_file: Place | None = example_value("client.key")
    """private key of that certificate"""


class MetricConfig(Record):
    """CPU workers that execute programs and score; the plan chooses their number, up to `workers`."""

    workers: Positive | None = example_value(16)
    """maximum number of metric workers; default: what the partition's cores hold, at most 64"""
    cpus: Positive = 1
    """CPU cores per metric worker"""
    memory_mb: Positive = 4096
    """MB of memory that a metric worker requests"""
    bootstrap_iters: Count = 100000
    """bootstrap resamples for standard errors, as in lm-eval; fewer are faster"""
    item_seconds: float = Field(60.0, gt=0)
    """time limit of one program, or of one item's metric"""
    allow_unsafe: bool = False
    """true: run generated programs even if only resource limits isolate them"""


class WatchConfig(Record):
    """Where checkpoints appear, and what a member's notice may name."""

    folders: tuple[Place, ...] = ()
    """folders that a training writes checkpoints to, listed every second, e.g. ["/shared/run7/checkpoints"]; requires `suite`
    below
    """
    roots: tuple[Place, ...] = ()
    """members of shared_group may only submit checkpoints below these and `folders`, e.g. ["/shared"]"""
    suites: tuple[Place, ...] = ()
    """suite files that the hook may name, e.g. ["suites/mine.toml"], named "mine"."""
    suite: str | None = example_value("core")
    """suite of checkpoints announced without a suite"""

    @field_validator("suite")
    @classmethod
    def _file_of(cls, name: str | None, info: ValidationInfo) -> str | None:
        """Return the file in `suites` with this name, otherwise the name."""
        return next((str(file) for file in info.data.get("suites", ()) if file.stem == name), name)


class BorrowConfig(Record):
    """How much of the cluster evalspan may take."""

    max_nodes: Positive | None = example_value(4)
    """maximum number of nodes for all evaluations together; default: no limit"""
    max_gpus: Positive | None = example_value(16)
    """maximum number of GPUs for all evaluations together; default: no limit"""
    leave_nodes_free: Count = 0
    """idle nodes to leave free for others"""
    best_effort: str | None = example_value("scavenge")
    """partitions with preemptible jobs, for nodes outside of [cluster] partition"""
    best_effort_qos: str | None = example_value("low")
    """QOS of jobs there; default: [cluster] qos"""


class NodesConfig(Record):
    """Which nodes evalspan may take."""

    include: HostLists = ()
    """the only nodes to use for jobs with GPUs, as Slurm hostlists, e.g. ["gpu[01-16]", "dgx1"]"""
    exclude: HostLists = ()
    """nodes that evalspan must not use, e.g. ["gpu[03,07]"]"""
    gpu_types: tuple[str, ...] = ()
    """GPU types to use, as named in Gres, e.g. ["a100", "h100"]; default: any"""
    features: tuple[str, ...] = ()
    """features that nodes for jobs with GPUs must have, e.g. ["nvlink"]"""
    gpu_memory_gb: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """GB of memory per GPU type, if the name does not tell, e.g. { h100 = 94 }"""
    wake: bool = False
    """true: jobs may boot nodes that Slurm has powered down (idle~)"""
    check: bool = False
    """true: the daemon checks each Slurm node before its first use of a day, for half a minute, and cordons bad ones"""


class CheckpointConfig(Record):
    """Which checkpoints are evaluated, and how they are read."""

    allow_bin: bool = False
    """true: accept pickled weights, which can run code when loaded"""
    convert: Annotated[str, AfterValidator(check_conversion)] | None = example_value(
        "python dcp_to_hf.py {src} {dst}"
    )
    """command that converts training's own format {src} to a Hugging Face folder {dst}, without a shell; a CPU job, cached"""
    convert_memory_mb: Positive | None = example_value(65536)
    """MB of memory that a conversion requests; default: twice the checkpoint plus 4 GB"""


class TrackersConfig(Record):
    """Trackers that receive each ended evaluation; each needs its package (docs/results/trackers.md)."""

    tensorboard_dir: Place | None = example_value("tb")
    """folder for TensorBoard event files"""
    wandb_project: str | None = example_value("pretraining")
    """W&B project; offline runs are stored in the work folder below trackers/"""
    wandb_mode: Literal["offline", "online"] = "offline"
    """when to send to W&B; "online": immediately"""
    mlflow_uri: str | None = example_value("http://mlflow.site:5000")
    """MLflow server, or file:///path of a file store"""
    mlflow_experiment: str = "evalspan"
    """MLflow experiment name"""


class RetentionConfig(Record):
    """What the daemon keeps of evaluations that ended `older_than` ago; scores and journals are always kept
    (docs/site/disk.md).
    """

    keep: Literal["scores", "responses"] | None = example_value("scores")
    """what to keep: "scores" only, or "responses" and samples too; default: everything"""
    older_than: Annotated[str, AfterValidator(check_age)] = "30d"
    """age, counted from an evaluation's end, such as "12h" or "8w"."""
    baselines: tuple[str, ...] = ()
    """evaluations of which nothing is removed, by id or glob of ids, e.g. ["step-100000-*"]; also applies to `prune`"""

    @property
    def older_than_seconds(self) -> int:
        return age_seconds(self.older_than)


class MetricsConfig(Record):
    """Prometheus metrics of the daemon (docs/results/alerts.md); requires `pip install 'evalspan[metrics]'`."""

    listen: Annotated[str, AfterValidator(check_address)] | None = example_value("127.0.0.1:9464")
    """HOST:PORT that Prometheus scrapes; default: no metrics"""


class NotifyConfig(Record):
    """Notifications from the daemon as JSON: an evaluation ended, failed or was parked, or a score is worse than it was."""

    command: tuple[str, ...] = Field((), examples=[["/home/me/tell"]])
    """program and arguments; receives the JSON on standard input"""
    webhook: Annotated[str, AfterValidator(check_web_address)] | None = example_value(
        "https://chat.site/hook"
    )
    """URL that receives the JSON by POST"""
    webhook_file: Place | None = example_value("webhook.url")
    """instead of webhook: a file, mode 0600, with a URL that must stay secret"""
    gate: Place | None = example_value("policy.toml")
    """policy file of `evalspan gate` to apply to each ended evaluation; notifications include the result"""


class Config(Record):
    """All settings. Paths are absolute once loaded."""

    work_dir: Place = Path("evalspan-work")
    """folder for journals, request sets and results, on storage that all nodes share; relative to this file, the default to
    the current folder
    """
    shared_group: str | None = example_value("llm-team")
    """Unix group that may read the work folder and submit; default: only its user"""
    backlog: Literal["all", "latest"] = "all"
    """which waiting checkpoints to evaluate: "all", or the "latest" of a folder"""
    gpu_hour_price: float | None = example_value(2.10, ge=0)
    """price in any currency; reports and trackers then show the cost of each checkpoint"""
    horizon: int = Field(100, ge=10)
    """checkpoints of a training, over which at most 5 % of trainings without a drop are falsely reported as "worse since" one"""
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


def all_settings(
    model: type[Record] = Config, table: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield (keys of its tables and its own, field) of every setting, in the order of the fields."""
    for name, field in model.model_fields.items():
        if inner := settings_record(field):
            yield from all_settings(inner, (*table, name))
        else:
            yield (*table, name), field


def settings_record(field: FieldInfo) -> type[Record] | None:
    """Return the record of a field that is a table of settings, otherwise None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Record) else None
