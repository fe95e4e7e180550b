"""Evaluations from settings: site, model and run options, record.

Rule: machine-dependent defaults are set here and in `coordinator.runtime.wiring`. Called by the commands and the daemon.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import shlex
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import evaljobs
import priors
from coordinator.base.run_command import CommandError, run_command
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs, RunOptions, evaluation_id
from coordinator.errors import EvalspanError, OperatorError, RetryError
from coordinator.intake import cadence, suites
from coordinator.intake.checkpoint import MOST_STEPS, inspect_checkpoint
from coordinator.intake.source_keys import inputs_of, with_full_paths
from coordinator.intake.work_folder import is_of_another
from coordinator.site.cluster.local import gpu_names
from coordinator.site.cluster.slurm_rules import FEW_WORKERS
from coordinator.site.config.schema import Config, TrialConfig
from evaljobs.contract.engine_traits import ENDPOINT, engine_traits
from evaljobs.contract.names import HF_ENGINES
from evaljobs.contract.paths import WorkPaths, expand_home
from evaljobs.contract.specs import JudgeConfig, ModelOptions, SuiteSpec
from evaljobs.contract.storage import make_folder, show_as
from evaljobs.errors import JobError

FOR_TRIALS = ("lm_eval", "torch")  # modules without which no trial runs
# Variables of [trial] env meant for the trials' own interpreter: workers run the coordinator's.
OF_AN_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD"})
# bash: refuse the code in folder $1 if another user owns it or others may write to it; otherwise run the other arguments.
OWN_CODE = r"""
found=$(find "$1" -ignore_readdir_race \( ! -user "$(id -u)" ! -user 0 -o -perm /022 \)) && [ -z "$found" ] || {
  echo "evalspan: not run, since others may write to it or own it: $(head -n 1 <<<"${found:-$1}"); remove $1" >&2; exit 1; }
shift; exec "$@"
"""
DEVICES = ("cuda", "cpu", "xpu", "hpu", "npu", "mps", "mlu", "musa", "xla")  # of torch and its extensions
NOT_STARTED = (126, 127)  # exit codes of bash where it cannot start a program
LOCAL_CPU_SLOTS = 2  # concurrent trials on a machine without GPUs


def _command(config: Config) -> tuple[str, ...]:
    """Return the command of the trial interpreter: the site's prologue, the container, python."""
    python = config.trial.python or sys.executable
    command = _after_prologue(config, *shlex.split(config.trial.container or ""), python)
    return (
        ("bash", "-c", OWN_CODE, "bash", str(_code_folder(config)), *command)
        if _is_foreign(config)
        else command
    )


def _is_foreign(config: Config) -> bool:
    """Return whether the trials' interpreter may lack this package, so that it runs the code copied to the work folder."""
    return bool(config.trial.python or config.trial.container)


def _after_prologue(config: Config, *command: str) -> tuple[str, ...]:
    if config.trial.prologue:
        return ("bash", "-c", f'{config.trial.prologue.strip()}\nexec "$@"', "bash", *command)
    return command


def site_of(config: Config) -> Site:
    env = dict(config.trial.env)
    worker_env = dict(config.trial.env)
    if _is_foreign(config):
        worker_env = {name: value for name, value in env.items() if name not in OF_AN_INTERPRETER}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(_code_folder(config)), *filter(None, [env.get("PYTHONPATH")])]
        )
    for own in (env, worker_env):
        own.setdefault("PYTHONSAFEPATH", "1")  # otherwise a file in the current folder shadows a module
    # two trials on a node must not each start a thread per core
    env.setdefault("OMP_NUM_THREADS", str(_threads(config) or config.trial.cpus))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Site(
        work_dir=str(config.work_dir),
        trial_command=_command(config),
        worker_command=_after_prologue(config, sys.executable),
        trial_env=env,
        worker_env=worker_env,
        stage=config.stage,
        redis_patience_seconds=config.trial.redis_patience_seconds,
        foreign=_is_foreign(config),
        command="\n".join(filter(None, (config.trial.prologue, config.trial.container, config.trial.python))),
    )


def code_of(config: Config) -> str | None:
    """Return the name of the folder with the code that jobs run; None if they run the installed package."""
    return _code_folder(config).name if _is_foreign(config) else None


def _code_folder(config: Config) -> Path:
    """Return a copy of the node-side packages for an interpreter without them, created once per content.

    It is in the work folder, or in this user's own cache for a guest of another user's work folder.
    """
    sources = [Path(str(package.__file__)).parent for package in (evaljobs, priors)]
    digest = hashlib.sha256()
    for file in sorted(file for source in sources for file in source.rglob("*.py")):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    # File WORK_DIR/cache/code-HASH/…: the node-side code, for an interpreter without evalspan | any command | `prune`
    cache = WorkPaths(config.work_dir).cache
    if is_of_another(config.work_dir):
        # File ~/.cache/evalspan/code-HASH/…: the node-side code, where the work folder is another user's | `submit` | by
        # hand
        cache = expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "evalspan"
    folder = cache / f"code-{digest.hexdigest()[:16]}"
    for source in sources:
        target = folder / source.name
        if not target.exists():
            make_folder(folder)
            with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder) as scratch:
                made = Path(scratch) / source.name
                shutil.copytree(source, made, ignore=shutil.ignore_patterns("__pycache__"))
                # Python would create these folders by the umask, and others could plant modules in them
                for file in list(made.rglob("*.py")):
                    (file.parent / "__pycache__").mkdir(exist_ok=True)
                show_as(made, folder)
                with contextlib.suppress(OSError):  # another process was first
                    made.rename(target)
    return folder


def _threads(config: Config) -> int | None:
    """Return a trial's CPU threads: the setting, or this machine's cores divided by the slots; on a GPU, torch's default."""
    if config.trial.threads is not None:
        return config.trial.threads
    if config.cluster.kind == "local" and not gpu_names():
        return max(1, (os.cpu_count() or 1) // cpu_slots(config))
    return None


def cpu_slots(config: Config) -> int:
    return config.cluster.slots or min(LOCAL_CPU_SLOTS, os.cpu_count() or 1)


def model_options(config: Config) -> ModelOptions:
    return ModelOptions(
        engine=config.trial.engine,
        model_args=with_full_paths(
            config.trial.model_args, Path.cwd()
        ),  # local jobs inherit the current folder
        device="cpu" if config.trial.engine == ENDPOINT else config.trial.device,
        threads=_threads(config),
    )


SEVERAL_GPUS = {
    "sglang": ("tp_size", "dp_size", "pp_size"),
}
"""Engine -> arguments of lm-eval's model class that make one process use several GPUs."""


def check_endpoint(config: Config) -> None:
    """OperatorError where trials that only ask a server would hold GPUs."""
    if config.trial.engine == ENDPOINT and config.cluster.kind == "slurm":
        raise OperatorError(
            f"trials of engine {ENDPOINT!r} need no GPU, and those of cluster slurm would hold some: say --cluster local, for "
            "instance in a CPU job"
        )


def check_device(config: Config) -> None:
    """Raise OperatorError if torch has no such device, or trials need a GPU of this machine and it has none, or hold several
    GPUs but use one.
    """
    device = config.trial.device or ""
    if device and device.partition(":")[0] not in DEVICES:
        raise OperatorError(f"--device {device} ([trial] device): name one of torch's, {', '.join(DEVICES)}")
    none_here = config.cluster.kind == "local" and not gpu_names()
    if not none_here and not device.startswith("cpu"):
        _check_spread(config)
    if none_here and device.startswith("cuda"):
        raise OperatorError(
            f"--device {device} ([trial] device), and nvidia-smi lists no GPU of this machine that may be used: "
            "omit it to use the CPU, or use --cluster slurm"
        )


def _check_spread(config: Config) -> None:
    """Raise OperatorError if an engine would use only one of a trial's GPUs; `hf` and `vllm` spread the model themselves."""
    gpus, engine, given = config.trial.gpus_per_trial, config.trial.engine, config.trial.model_args
    why, instead = "", ""
    if engine in HF_ENGINES:
        if not given.get("parallelize", True):
            why, instead = "with parallelize = false", "omit it from [trial] model_args"
        elif given.get("tp_plan"):  # lm-eval takes the number of GPUs from torchrun's WORLD_SIZE
            why, instead = "with tp_plan, outside of torchrun,", "omit it from [trial] model_args"
    elif (names := SEVERAL_GPUS.get(engine)) and all(
        str(given.get(name)).lower() in ("none", "false", "0", "1", "") for name in names
    ):
        instead = f"set model_args = {{ {names[0]} = {gpus} }} in [trial]"
    if gpus > 1 and instead:
        raise OperatorError(
            f"[trial] gpus_per_trial is {gpus}, and engine {engine!r} {f'{why} ' if why else ''}would load the model on one GPU "
            f"and hold the others: {instead}, or set gpus_per_trial = 1"
        )


def run_options(config: Config) -> RunOptions:
    local = config.cluster.kind == "local"
    served = config.trial.engine == ENDPOINT  # no weights are loaded
    return RunOptions(
        trial=config.trial.model_copy(update={"env": {}}),
        metric=config.metric,
        stage=config.stage.model_copy(update={"enabled": False}) if served else config.stage,
        plan=config.plan,
        gpu_memory_gb=config.nodes.gpu_memory_gb,
        engine_memory_mb=_engine_memory_mb(config),
        max_nodes=config.borrow.max_nodes,
        convert_memory_mb=config.checkpoint.convert_memory_mb,
        early_trials=local and not gpu_names(),
        build_jobs=min(LOCAL_CPU_SLOTS, os.cpu_count() or 1) if local else 4,
        workers=1 if local else config.metric.workers or FEW_WORKERS,
    )


def hung_seconds(config: Config) -> float:
    """Return the seconds without progress after which a trial is ended."""
    own = config.trial.hung_seconds
    return engine_traits(config.trial.engine).hung_seconds if own is None else own


def _engine_memory_mb(config: Config) -> int:
    """Return the MiB that the engine needs beyond a trial's default; 0 if the settings give a trial's memory."""
    if config.trial.memory_mb != TrialConfig().memory_mb:
        return 0
    return engine_traits(config.trial.engine).memory_mb * config.trial.gpus_per_trial


@dataclass
class LmEvalVersion:
    """Asks the trial interpreter for its lm_eval version, a part of request sets' names, until it answers.

    After a failure, the next attempt waits `rest` seconds plus ten times the query's duration, since each
    attempt blocks the caller.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    patience: float = 60.0
    rest: float = 20.0
    _said: str = ""
    _failed: EvalspanError | None = None
    _rests_until: float = 0.0

    def __call__(self) -> str:
        """Return the version. Raise OperatorError if lm_eval is missing, RetryError without an answer."""
        if self._said:
            return self._said
        began = time.monotonic()
        if self._failed is not None and began < self._rests_until:
            raise self._failed
        try:
            self._said = self._ask()
        except EvalspanError as error:
            now = time.monotonic()
            self._failed, self._rests_until = error, now + self.rest + 10 * (now - began)
            raise
        return self._said

    def _ask(self) -> str:
        question = (
            "import importlib.metadata as m, importlib.util as u; version = m.version('lm_eval')\n"
            "print(version) if u.find_spec('torch') else exit('no module torch')"
        )
        interpreter = self.command[-1]
        try:
            return run_command(
                [*self.command, "-c", question], seconds=self.patience, env={**os.environ, **self.env}
            ).strip()
        except CommandError as error:
            if error.timed_out:
                raise RetryError(
                    f"the trial interpreter {interpreter} did not report its lm_eval version within {self.patience:g} s"
                ) from error
            if error.code in (None, *NOT_STARTED):
                raise OperatorError(f"the trial interpreter {interpreter} {error}") from error
            raise OperatorError(
                f"the trial interpreter has no lm_eval or no torch ({error}): install `evalspan[hf]` there"
            ) from error


def own_version(needs: Sequence[str] = FOR_TRIALS) -> str:
    """Return lm_eval's version in the coordinator's own interpreter. Raise OperatorError if it lacks a module of `needs`."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise OperatorError(
            f"{sys.executable} has no {' and no '.join(missing)}: `pip install 'evalspan[hf]'` there, or set [trial] python "
            "to an interpreter that has them"
        )
    return importlib.metadata.version("lm_eval")


def lm_eval_version(config: Config, site: Site, needs: Sequence[str] = FOR_TRIALS) -> Callable[[], str]:
    """Return a function that gives the trials' lm_eval version. `needs`: modules that the caller imports for its use."""
    own = config.trial.python is None and config.trial.container is None
    return partial(own_version, needs) if own else LmEvalVersion(site.trial_command, site.trial_env)


def inputs_for(site: Site, version: Callable[[], str]) -> Callable[[SuiteSpec, ModelOptions], Inputs]:
    """Return a function that finds the source keys of a suite (`source_keys.inputs_of`), once per suite."""
    known: dict[str, Inputs] = {}

    def look(suite: SuiteSpec, model: ModelOptions) -> Inputs:
        key = suite.model_dump_json()
        if key not in known:
            known[key] = inputs_of(suite, model, site, version())
        return known[key]

    return look


def chosen_suite(config: Config, suite: str | SuiteSpec) -> SuiteSpec:
    """Return the suite, or the one with this name or file, in its own mode or that of these settings. Raise OperatorError."""
    loaded = suites.load_suite(suite) if isinstance(suite, str) else suite
    return suites.suite_in_mode(loaded, config.trial.mode, config.trial.engine)


def evaluation_record(
    config: Config,
    checkpoint: str,
    suite: str | SuiteSpec,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    *,
    options: RunOptions | None = None,
    priority: int = 0,
    step: int | None = None,
    final: bool = False,
    cadences: cadence.Cadences | None = None,
) -> EvaluationRecord:
    """Return the evaluation of a checkpoint under these settings. Raise OperatorError if checkpoint, suite or settings are
    wrong.

    `inputs`: computes the suite's source keys; `options`: replaces those of the settings. With a command of `[checkpoint]
    convert`, a folder that is not in Hugging Face format is converted. `step` None: from the folder's name. `final`: the last
    checkpoint of a training. `cadences`: as in `not_asked`.
    """
    if step is not None and not 0 <= step <= MOST_STEPS:
        raise OperatorError(f"step is a training step, from 0 to {MOST_STEPS}, not {step}")
    loaded, section = chosen_suite(config, suite), config.checkpoint
    spec = inspect_checkpoint(checkpoint, allow_bin=section.allow_bin, convert=section.convert, step=step)
    if loaded.mode == "fast" and spec.growing_rope:
        raise OperatorError(
            f'{spec.source}: mode "fast" is not for a model with {spec.growing_rope} rope (config.json), which scales a row by '
            'the longest row beside it: --mode exact, or set mode = "exact"'
        )
    judge = judge_for(config, loaded)
    made_of = inputs(loaded, model := model_options(config))
    return EvaluationRecord(
        evaluation_id=evaluation_id(spec, loaded, model, judge, made_of),
        checkpoint=spec,
        suite=loaded,
        model=model,
        options=options or run_options(config),
        inputs=made_of,
        convert=section.convert if spec.is_raw else None,
        judge=judge,
        not_asked=() if final else cadence.not_asked(config.work_dir, loaded, spec, cadences),
        priority=priority,
        accepted_at=time.time(),
    )


def judge_for(config: Config, suite: SuiteSpec) -> JudgeConfig | None:
    """Return the suite's judge, or None. Raise OperatorError if it needs one and the settings have none."""
    judged = [task.name for task in suite.tasks if task.judge]
    if not judged:
        return None
    found = judge_options(config)
    if found is None:
        raise OperatorError(
            f"suite {suite.name} has tasks that a judge scores ({', '.join(judged)}): "
            "set url and model of [judge] in evalspan.toml (docs/evaluating/judges.md)"
        )
    return found


def judge_options(config: Config) -> JudgeConfig | None:
    """Return the judge of the settings, or None. Raise OperatorError if the settings are incomplete.

    The key is only checked here: jobs read it themselves.
    """
    section = config.judge
    if not section.url:
        return None
    try:
        parts = urllib.parse.urlsplit(section.url)
    except ValueError:  # invalid brackets or port
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise OperatorError(
            "[judge] url must be an http:// or https:// address without ?query, e.g. https://HOST/v1"
        )
    if parts.username is not None or parts.password is not None:
        raise OperatorError("[judge] url contains a password: pass the key by api_key_env or api_key_file")
    if not section.model:
        raise OperatorError("[judge] has a url but no model: set model")
    if section.api_key_env is not None and section.api_key_file is not None:
        raise OperatorError("[judge] has both api_key_env and api_key_file: keep one of them")
    _check_way(parts, section)
    prices = (section.price_per_million_prompt_tokens, section.price_per_million_completion_tokens)
    if section.max_cost is not None and None in prices:
        raise OperatorError(
            "[judge] max_cost needs price_per_million_prompt_tokens and price_per_million_completion_tokens"
        )
    options = section.model_copy(update={"url": section.url.rstrip("/")})
    from evaljobs.judges.asking import read_key  # noqa: PLC0415 (asyncio: not for each command)

    try:
        read_key(options)
    except JobError as error:
        raise OperatorError(str(error)) from error
    return options


def _check_way(url: urllib.parse.SplitResult, judge: JudgeConfig) -> None:
    """Raise OperatorError if the key would cross a network unencrypted and the settings do not allow that."""
    host, with_key = url.hostname or "", judge.api_key_env is not None or judge.api_key_file is not None
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        here = host == "localhost"
    if url.scheme == "http" and with_key and not here and not judge.allow_http:
        raise OperatorError(
            f"[judge] url is http://{host}, so others on the network could read the key: use https://, omit the key "
            "if the server needs none, or set allow_http = true for a network that you trust"
        )
