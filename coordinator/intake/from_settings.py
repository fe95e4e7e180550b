"""What the settings say of an evaluation: its site, its model and run options, its record.

Rule: defaults that depend on this machine are made here and in `coordinator.runtime.wiring`. Called by the commands
and the daemon.
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
from coordinator.cluster.local import gpu_names
from coordinator.cluster.slurm_rules import FEW_WORKERS
from coordinator.config.schema import Config, TrialConfig
from coordinator.errors import EvalspanError, OperatorError, RetryError
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord, Inputs, RunOptions, evaluation_id
from coordinator.intake import cadence, suites
from coordinator.intake.checkpoint import inspect
from coordinator.intake.source_keys import inputs_of, with_full_paths
from coordinator.intake.work_folder import is_of_another
from evaljobs.contract.engine_traits import engine_traits
from evaljobs.contract.names import HF_ENGINES
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import JudgeConfig, ModelOptions, SuiteSpec
from evaljobs.contract.storage import make_folder, show_as
from evaljobs.errors import JobError

FOR_TRIALS = ("lm_eval", "torch")  # modules without which no trial runs
# Variables of [trial] env that are for the trials' own interpreter: workers run the coordinator's.
OF_AN_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD"})
# bash: refuse the code in folder $1 where it is another user's, or others may write to it, else run the other arguments.
OWN_CODE = r"""
found=$(find "$1" -maxdepth 1 \( ! -user "$(id -u)" ! -user 0 -o -perm /022 \)) && [ -z "$found" ] || {
  echo "evalspan: not run, since others may write to it or own it: ${found:-$1}; remove $1" >&2; exit 1; }
shift; exec "$@"
"""
NOT_STARTED = (126, 127)  # exit codes of bash where it cannot start a program
LOCAL_CPU_SLOTS = 2  # trials at once on a machine without GPUs


def _command(config: Config) -> tuple[str, ...]:
    """The command of the trial interpreter: the site's prologue, the container, python."""
    python = config.trial.python or sys.executable
    command = _after_prologue(config, *shlex.split(config.trial.container or ""), python)
    return (
        ("bash", "-c", OWN_CODE, "bash", str(_code_folder(config)), *command)
        if _is_foreign(config)
        else command
    )


def _is_foreign(config: Config) -> bool:
    """May the trials' interpreter lack this package? It then runs the copy of the node-side code in the work folder."""
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
        own.setdefault("PYTHONSAFEPATH", "1")  # else a file of the current folder stands before a module
    # two trials on a node must not each start a thread per core of it
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
    """Name of the folder of the code that jobs run; None where they run the installed one."""
    return _code_folder(config).name if _is_foreign(config) else None


def _code_folder(config: Config) -> Path:
    """A copy of the node-side packages, for an interpreter without them; made once for each content of theirs.

    In the work folder; in this user's own cache where that is another user's, of which this one is a guest.
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
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evalspan"
    folder = cache / f"code-{digest.hexdigest()[:16]}"
    for source in sources:
        target = folder / source.name
        if not target.exists():
            make_folder(folder)
            with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder) as scratch:
                made = Path(scratch) / source.name
                shutil.copytree(source, made, ignore=shutil.ignore_patterns("__pycache__"))
                # else Python makes these folders, as the umask says, and others could plant modules in them
                for file in list(made.rglob("*.py")):
                    (file.parent / "__pycache__").mkdir(exist_ok=True)
                show_as(made, folder)
                with contextlib.suppress(OSError):  # another process was first
                    made.rename(target)
    return folder


def _threads(config: Config) -> int | None:
    """CPU threads of a trial: said, or this machine's cores shared by the slots; on a GPU, torch's own default."""
    if config.trial.threads is not None:
        return config.trial.threads
    if config.cluster.kind == "local" and not gpu_names():
        return max(1, (os.cpu_count() or 1) // slots(config))
    return None


def slots(config: Config) -> int:
    return config.cluster.slots or min(LOCAL_CPU_SLOTS, os.cpu_count() or 1)


def model_options(config: Config) -> ModelOptions:
    return ModelOptions(
        engine=config.trial.engine,
        model_args=with_full_paths(
            config.trial.model_args, Path.cwd()
        ),  # local jobs inherit the current folder
        device=config.trial.device,
        threads=_threads(config),
    )


SEVERAL_GPUS = {
    "sglang": ("tp_size", "dp_size", "pp_size"),
}
"""Engine -> the model arguments of lm-eval's class with which one process uses more than one GPU."""


def check_device(config: Config) -> None:
    """OperatorError where trials are to run on a GPU of this machine, and it has none; or hold GPUs and use one of them."""
    device = config.trial.device or ""
    none_here = config.cluster.kind == "local" and not gpu_names()
    if not none_here and not device.startswith("cpu"):
        _check_spread(config)
    if none_here and device.startswith("cuda"):
        raise OperatorError(
            f"--device {device} ([trial] device), and nvidia-smi lists no GPU of this machine that may be used: "
            "leave it away for the CPU, or say --cluster slurm"
        )


def _check_spread(config: Config) -> None:
    """OperatorError where an engine would load the model on one of a trial's GPUs; `hf` and `vllm` spread it by themselves."""
    gpus, engine, given = config.trial.gpus_per_trial, config.trial.engine, config.trial.model_args
    why, instead = "", ""
    if engine in HF_ENGINES:
        if not given.get("parallelize", True):
            why, instead = "with parallelize = false", "leave it away in [trial] model_args"
        elif given.get("tp_plan"):  # lm-eval takes the number of GPUs from torchrun's WORLD_SIZE
            why, instead = "with tp_plan, outside of torchrun,", "leave it away in [trial] model_args"
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
    return RunOptions(
        trial=config.trial.model_copy(update={"env": {}}),
        metric=config.metric,
        stage=config.stage,
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
    """Seconds without progress after which a trial is ended."""
    own = config.trial.hung_seconds
    return engine_traits(config.trial.engine).hung_seconds if own is None else own


def _engine_memory_mb(config: Config) -> int:
    """MiB that the engine takes beside a trial's default; nothing where the settings say what a trial takes."""
    if config.trial.memory_mb != TrialConfig().memory_mb:
        return 0
    return engine_traits(config.trial.engine).memory_mb * config.trial.gpus_per_trial


@dataclass
class LmEvalVersion:
    """Asks the trial interpreter for its lm_eval version, a part of request sets' names, until it answers.

    After a failure the next attempt comes `rest` seconds plus ten times the question's duration
    later, since each attempt blocks the caller.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    patience: float = 60.0
    rest: float = 20.0
    _said: str = ""
    _failed: EvalspanError | None = None
    _rests_until: float = 0.0

    def __call__(self) -> str:
        """OperatorError where there is none, RetryError where there is no answer."""
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
                    f"the trial interpreter {interpreter} did not say in {self.patience:g} s which lm_eval it has"
                ) from error
            if error.code in (None, *NOT_STARTED):
                raise OperatorError(f"the trial interpreter {interpreter} {error}") from error
            raise OperatorError(
                f"the trial interpreter has no lm_eval or no torch ({error}): install `evalspan[hf]` there"
            ) from error


def own_version(needs: Sequence[str] = FOR_TRIALS) -> str:
    """lm_eval's version in the coordinator's own interpreter; OperatorError where it lacks a module of `needs`."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise OperatorError(
            f"{sys.executable} has no {' and no '.join(missing)}: `pip install 'evalspan[hf]'` there, or set [trial] python "
            "to an interpreter that has them"
        )
    return importlib.metadata.version("lm_eval")


def lm_eval_version(config: Config, site: Site, needs: Sequence[str] = FOR_TRIALS) -> Callable[[], str]:
    """Says which lm_eval trials run. `needs`: modules that the caller's use of it imports."""
    own = config.trial.python is None and config.trial.container is None
    return partial(own_version, needs) if own else LmEvalVersion(site.trial_command, site.trial_env)


def inputs_for(site: Site, version: Callable[[], str]) -> Callable[[SuiteSpec, ModelOptions], Inputs]:
    """What finds the source keys of a suite (`source_keys.inputs_of`), once for each suite."""
    known: dict[str, Inputs] = {}

    def look(suite: SuiteSpec, model: ModelOptions) -> Inputs:
        key = suite.model_dump_json()
        if key not in known:
            known[key] = inputs_of(suite, model, site, version())
        return known[key]

    return look


def settled(config: Config, suite: str | SuiteSpec) -> SuiteSpec:
    """The suite, or that of a name or file, in the mode that it or these settings say. OperatorError."""
    loaded = suites.load_suite(suite) if isinstance(suite, str) else suite
    return suites.settled(loaded, config.trial.mode, config.trial.engine)


def record_of(
    config: Config,
    checkpoint: str,
    suite: str | SuiteSpec,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    *,
    options: RunOptions | None = None,
    priority: int = 0,
    step: int | None = None,
    final: bool = False,
) -> EvaluationRecord:
    """The evaluation of a checkpoint under these settings. OperatorError, one line: what of checkpoint, suite or settings is wrong.

    `inputs`: computes the suite's source keys; `options`: in place of those of the settings. With a command of
    `[checkpoint] convert`, a folder without Hugging Face format is converted. `step` None: from the folder's name. `final`: the last checkpoint of a training.
    """
    if step is not None and step < 0:
        raise OperatorError(f"step is a training step, 0 or more, not {step}")
    loaded, section = settled(config, suite), config.checkpoint
    spec = inspect(checkpoint, allow_bin=section.allow_bin, convert=section.convert, step=step)
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
        not_asked=() if final else cadence.not_asked(config.work_dir, loaded, spec),
        priority=priority,
        accepted_at=time.time(),
    )


def judge_for(config: Config, suite: SuiteSpec) -> JudgeConfig | None:
    """The suite's judge, or None; OperatorError where it needs one and the settings have none."""
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
    """The judge of the settings, None without one. OperatorError where the settings are incomplete.

    The key is only checked here: jobs read it themselves.
    """
    section = config.judge
    if not section.url:
        return None
    try:
        parts = urllib.parse.urlsplit(section.url)
    except ValueError:  # a bracket or port that is none
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise OperatorError(
            "[judge] url is an http:// or https:// address without ?query, e.g. https://HOST/v1"
        )
    if parts.username is not None or parts.password is not None:
        raise OperatorError("[judge] url holds a password: name the key by api_key_env or api_key_file")
    if not section.model:
        raise OperatorError("[judge] has a url and no model: say which model judges")
    if section.api_key_env is not None and section.api_key_file is not None:
        raise OperatorError("[judge] has api_key_env and api_key_file: keep one of them")
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
    """OperatorError where the key would cross a network unencrypted, and the settings do not allow that."""
    host, with_key = url.hostname or "", judge.api_key_env is not None or judge.api_key_file is not None
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        here = host == "localhost"
    if url.scheme == "http" and with_key and not here and not judge.allow_http:
        raise OperatorError(
            f"[judge] url is http://{host}, and others on the way could read the key: use https://, leave the key away "
            "where the server asks for none, or set allow_http = true for a network that you trust"
        )
