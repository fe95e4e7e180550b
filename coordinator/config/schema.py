"""One frozen Config from evalspan.toml, the environment and the command line.

Rule: the command line overrides the environment, the environment the file, the file the defaults
below. The file is read strictly. No other module of the coordinator reads settings from the
environment. `template.py` says what each setting means, for the file that `evalspan init` writes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from coordinator.cluster.node_choice import check_hostlist
from coordinator.cluster.sbatch_text import GPU_REQUEST, check_gpu_request
from coordinator.config import toml
from coordinator.errors import OperatorError
from evaljobs.contract.specs import Record

FILE_NAME = "evalspan.toml"
PREFIX = "EVALSPAN_"
MODEL_ARGS = "trial.model_args"
FOR_SLURM = ("partition", "cpu_partition", "account", "qos", "nice", "reservation", "extra_args")  # [cluster]

_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d\d):(\d\d)")


def seconds_of(time_limit: str) -> int:
    """Seconds of Slurm's `[days-]hours:minutes:seconds`; ValueError for any other text."""
    match = _TIME.fullmatch(time_limit)
    if match is None:
        raise ValueError('a time such as "4:00:00" or "2-00:00:00" (days-hours:minutes:seconds)')
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _is_time(text: str) -> str:
    if seconds_of(text) == 0:
        raise ValueError("a time longer than 0:00:00")
    return text


def _conversion(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not any("{src}" in w for w in words) or not any("{dst}" in w for w in words):
        raise ValueError('a command with {src} and {dst} in it, such as "python convert.py {src} {dst}"')
    return command


def _no_place(model_args: dict[str, Any]) -> dict[str, Any]:
    for key in ("pretrained", "revision", "subfolder"):
        if key in model_args:
            raise ValueError(
                f"a table without {key!r} (the checkpoint, ORG/MODEL@REVISION or a folder, says it)"
            )
    return model_args


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
TimeLimit = Annotated[str, AfterValidator(_is_time)]
HostLists = Annotated[tuple[str, ...], AfterValidator(lambda texts: tuple(map(check_hostlist, texts)))]
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
    extra_args: tuple[str, ...] = ()
    poll_seconds: Annotated[float, Field(ge=1)] = 10.0
    slots: Positive | None = None  # local: trials at once; None: one per GPU, or two CPU slots


class RoleConfig(Record):
    """What jobs of one role ask Slurm for; None: as [cluster] says. `extra_args` follow those of [cluster]."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    extra_args: tuple[str, ...] = ()


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
    # less path and batch size
    model_args: Annotated[dict[str, Any], AfterValidator(_no_place)] = Field(default_factory=dict)
    gpus_per_trial: Positive = 1
    cpus: Positive = 1
    memory_mb: Positive = 4096
    threads: Positive | None = None
    device: str | None = None
    time_limit: TimeLimit = "4:00:00"
    hung_seconds: Annotated[float, Field(gt=0)] = 900.0
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
    wake: bool = False  # also those that Slurm has powered down to save energy


class CheckpointConfig(Record):
    """Which checkpoints are evaluated, and how they are read."""

    allow_bin: bool = False
    # command that makes a Hugging Face folder {dst} from training's own format {src}; run without a shell
    convert: Annotated[str, AfterValidator(_conversion)] | None = None
    convert_memory_mb: Positive | None = None


class TrackersConfig(Record):
    """Trackers that get each ended evaluation; None: not this one."""

    tensorboard_dir: Place | None = None
    wandb_project: str | None = None
    wandb_mode: Literal["offline", "online"] = "offline"
    mlflow_uri: str | None = None  # a server, or file:///… for a file store
    mlflow_experiment: str = "evalspan"


# dotted key -> the option of the command line that sets it
OPTIONS = {
    "work_dir": "--work-dir",
    "cluster.kind": "--cluster",
    "cluster.partition": "--partition",
    "cluster.account": "--account",
    "cluster.qos": "--qos",
    "cluster.slots": "--slots",
    "trial.engine": "--model",
    "trial.device": "--device",
    "gpu_hour_price": "--gpu-hour-price",
}


class Config(Record):
    """All settings. Paths are absolute once loaded."""

    work_dir: Place = Path("evalspan-work")
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
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    backlog: Literal["all", "latest"] | KeepEvery = "all"


def _said_by(key: str) -> str:
    """What set this dotted key, in a message: the command line's option, else `settings` of a call."""
    return "--model-args" if key.startswith(f"{MODEL_ARGS}.") else OPTIONS.get(key, f"settings {key!r}")


def load(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> Config:
    """The settings of this process.

    `path`: of --config (None: searched, see `find`). `overrides`: dotted key ("cluster.partition")
    -> value of the command line; None: not given. OperatorError names file and line, variable or
    option.
    """
    file = find(path, environ)
    data: dict[str, Any] = {}
    where: toml.Where = lambda _location: "the defaults"  # noqa: E731 (replaced just below)
    if file is not None:
        data, text = toml.read(file)
        toml.check(Config, data, toml.in_file(file, text))
        data = _absolute(data, file.parent)
        where = toml.in_file(file, text)
    said: dict[toml.Location, str] = {}
    for location, variable, value in _from_environment(environ):
        _put(data, location, value)
        said[location] = f"${variable}"
    source: toml.Where = lambda location: said.get(location) or where(location)  # noqa: E731 (as above)
    toml.check(Config, data, source)
    for key, value in (overrides or {}).items():
        if value is not None or key.startswith(f"{MODEL_ARGS}."):  # None is a model argument's value, too
            _put(data, tuple(key.split(".")), value)
            said[tuple(key.split("."))] = _said_by(key)
    _over_roles(data, overrides or {})
    named = [location for location, _ in _settings() if _is_for_slurm(location) and _has(data, location)]
    if named:
        # a partition or an account means Slurm; a file that has them may yet be used with --cluster local
        data.setdefault("cluster", {}).setdefault("kind", "slurm")
    checked = toml.check(Config, data, source)
    typed: set[toml.Location] = {
        tuple(key.split(".")) for key, value in (overrides or {}).items() if value is not None
    }
    if ("cluster", "kind") not in said:  # the file chose it, so that a variable is no older choice
        typed |= said.keys()
    for location in named:
        if checked.cluster.kind == "local" and location in typed:
            raise OperatorError(
                f"{source(location)}: {toml.name(location[:-1])} {location[-1]} is for Slurm, and jobs would run on this machine: "
                f'add --cluster slurm, or set kind = "slurm" in [cluster] of {FILE_NAME}'
            )
    return Config.model_validate(_absolute(checked.model_dump(), Path.cwd()))


def find(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The first of --config, $EVALSPAN_CONFIG, ./evalspan.toml, ~/.config/evalspan.toml; or None.

    OperatorError where one was named and is not there.
    """
    named = path or (Path(environ["EVALSPAN_CONFIG"]) if environ.get("EVALSPAN_CONFIG") else None)
    if named is not None:
        named = named.expanduser().absolute()
        if not os.path.isfile(named):  # noqa: PTH113 (False in a private folder)
            by = "--config" if path else "$EVALSPAN_CONFIG"
            raise OperatorError(f"{by} names {named}, which is no file: `evalspan init` writes one")
        return named
    home = Path(environ["HOME"]) if environ.get("HOME") else None
    places = [Path.cwd() / FILE_NAME, *([home / ".config" / FILE_NAME] if home else [])]
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113 (as above)


def line_of(path: Path | None, environ: Mapping[str, str], *location: str) -> str:
    """Where a setting stands, as "FILE, line N: "; "" where no file has it. `path`, `environ`: as of `load`."""
    file = find(path, environ)
    text = toml.read(file)[1] if file is not None else ""
    line = toml.line_of(text, location)
    return f"{file}, line {line}: " if line is not None else ""


def work_folder_from(path: Path | None, environ: Mapping[str, str], given: Path | None) -> str:
    """Where the work folder's path came from: an option, a variable, a file, or the default. Arguments as of `load`."""
    if given is not None:
        return "--work-dir"
    if f"{PREFIX}WORK_DIR" in environ:
        return f"${PREFIX}WORK_DIR"
    file = find(path, environ)
    if file is not None and "work_dir" in toml.read(file)[0]:
        return str(file)
    return "the default, below the current folder"


def _settings(
    model: type[Record] = Config, table: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """(keys of its tables and its own, field) of every setting."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Record):
            yield from _settings(field.annotation, (*table, name))
        else:
            yield (*table, name), field


def _over_roles(data: dict[str, Any], overrides: Mapping[str, object]) -> None:
    """Let --account and --qos hold for every role, --partition for those of jobs on nodes with GPUs."""
    for key in ("partition", "account", "qos"):
        roles = ("precursor", "trial") if key == "partition" else ("precursor", "trial", "metric", "build")
        if overrides.get(f"cluster.{key}") is not None:
            for role in roles:
                data.get("slurm", {}).get(role, {}).pop(key, None)


def _is_for_slurm(location: tuple[str, ...]) -> bool:
    return location[0] in ("slurm", "nodes") or (location[0] == "cluster" and location[1] in FOR_SLURM)


def _has(data: Any, location: tuple[str, ...]) -> bool:
    for key in location:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[toml.Location, str, object]]:
    for location, field in _settings():
        variable = PREFIX + "_".join(location).upper()
        if environ.get(variable):
            yield location, variable, _value(environ[variable], field)
    known = {PREFIX + "_".join(location).upper() for location, _ in _settings()}
    sections = {location[0] for location, _ in _settings() if len(location) > 1}
    for variable in sorted(environ.keys() - known):
        section, _, key = variable.removeprefix(PREFIX).lower().partition("_")
        if variable.startswith(PREFIX) and section in sections:
            yield (section, key), variable, environ[variable]  # refused as an unknown key


def _value(text: str, field: FieldInfo) -> object:
    """The text itself where the key takes text, else parsed as TOML; checked later."""
    annotation: Any = field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        adapter.validate_json(json.dumps(text), strict=True)
    except ValidationError:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text


def _put(data: dict[str, Any], location: toml.Location, value: object) -> None:
    for key in location[:-1]:
        data = data.setdefault(str(key), {})
    data[str(location[-1])] = str(value) if isinstance(value, Path) else value


def _absolute(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`data` with every path absolute: `~` is the home, a relative one is below `folder`."""
    return _each_place(data, lambda text: str((folder / Path(text).expanduser()).absolute()))


def _each_place(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = json.loads(json.dumps(data, default=str))
    for location, field in _settings():
        if "Path" not in str(field.annotation):
            continue
        table = changed if len(location) == 1 else changed.get(location[0], {})
        value = table.get(location[-1])
        if isinstance(value, str):
            table[location[-1]] = change(value)
        elif isinstance(value, list):
            table[location[-1]] = [change(text) for text in value]
    suite = changed.get("watch", {}).get("suite")
    if isinstance(suite, str) and toml.is_file_name(suite):
        changed["watch"]["suite"] = change(suite)
    return dict(changed)
