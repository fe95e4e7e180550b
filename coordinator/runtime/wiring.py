"""A coordinator from the settings: its cluster, Redis and interpreters.

Rule: every default that depends on the machine is made here; nothing here decides about an evaluation. Commands call
`coordinator_of`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import evaljobs
import priors
from coordinator.allocation.allocate import Limits
from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import Cluster, RefusedError, slurm_parse
from coordinator.cluster.local import LocalCluster, gpu_names
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_pyslurm import SlurmApi
from coordinator.cluster.slurm_rules import FEW_WORKERS, Hosting, Wants, ask_hosting
from coordinator.config import schema as settings_schema
from coordinator.config.schema import Config
from coordinator.errors import OperatorError, RetryError
from coordinator.evaluation.job_specs import Site, precursor_memory_mb
from coordinator.evaluation.records import EvaluationRecord, Inputs, RunOptions
from coordinator.intake.lm_eval_version import LmEvalVersion, own_version
from coordinator.intake.source_keys import inputs_of
from coordinator.intake.validate import check_tasks
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator, Keeper, Pace
from coordinator.services.redis_server import RedisServer, SiteRedis, local_address_towards
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import JudgeOptions, ModelOptions, SuiteSpec
from evaljobs.errors import JobError
from evaljobs.judges.endpoint import read_key
from evaljobs.queue.redis_client import RedisAddress

log = logging.getLogger(__name__)

LOCAL_CPU_SLOTS = 2  # trials at once on a machine without GPUs
NODES_PACE = 1.5  # nodes are listed so many times less often than jobs: under 0.2 requests a second at 10 s
MOST_WORKERS = 64  # metric workers without a setting: more would fill a CPU partition that others share
SUBMISSIONS_AT_ONCE = 8  # `sbatch` commands side by side, as of several users


def load(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """The settings in force: file, environment, command line. The work folder is made and checked."""
    config = settings_schema.load(path, os.environ, overrides)
    work = config.work_dir
    try:
        work.mkdir(parents=True, exist_ok=True)
        probe = work / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # a process of another host may have had the same pid, and name
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT} and WorkPaths(work).lock.exists():
            # it was in use before: the loop waits for room
            log.warning("the work folder %s: %s", work, error.strerror)
            return config
        raise OperatorError(
            f"the work folder {work} cannot be written ({error.strerror}): give --work-dir a folder of yours on shared storage"
        ) from error
    return config


def _python(config: Config) -> str:
    return config.trial.python or sys.executable


def _command(config: Config) -> tuple[str, ...]:
    """The command of the trial interpreter: the site's prologue, the container, python."""
    command = (*shlex.split(config.trial.container or ""), _python(config))
    if config.trial.prologue:
        return ("bash", "-c", f'{config.trial.prologue.strip()}\nexec "$@"', "bash", *command)
    return command


def site_of(config: Config) -> Site:
    """Where jobs run."""
    env = dict(config.trial.env)
    if config.trial.python or config.trial.container:
        env["PYTHONPATH"] = os.pathsep.join(
            [str(_code_folder(config)), *filter(None, [env.get("PYTHONPATH")])]
        )
    # two trials on a node must not each start a thread per core of it
    env.setdefault("OMP_NUM_THREADS", str(_threads(config) or config.trial.cpus))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Site(
        work_dir=str(config.work_dir),
        trial_command=_command(config),
        worker_command=(sys.executable,),
        trial_env=env,
        stage_roots=config.stage.roots,
        redis_patience_seconds=config.trial.redis_patience_seconds,
        lease_seconds=config.stage.lease_seconds,
        readers=config.stage.readers,
        prefetch=config.stage.prefetch,
    )


def _code_folder(config: Config) -> Path:
    """A copy of the node-side packages, for an interpreter without them; made once a version."""
    version = importlib.metadata.version("evalspan")
    folder = WorkPaths(config.work_dir).cache / f"code-{version}"
    for package in (evaljobs, priors):
        source = Path(str(package.__file__)).parent
        target = folder / source.name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder) as scratch:
                made = Path(scratch) / source.name
                shutil.copytree(source, made, ignore=shutil.ignore_patterns("__pycache__"))
                with contextlib.suppress(OSError):  # another process was first
                    made.rename(target)
    return folder


def _threads(config: Config) -> int | None:
    """CPU threads of a trial: said, or this machine's cores shared by the slots; on a GPU, torch's own default."""
    if config.trial.threads is not None:
        return config.trial.threads
    if config.cluster.kind == "local" and not gpu_names():
        return max(1, (os.cpu_count() or 1) // _slots(config))
    return None


def _slots(config: Config) -> int:
    return config.cluster.slots or min(LOCAL_CPU_SLOTS, os.cpu_count() or 1)


def model_options(config: Config) -> ModelOptions:
    return ModelOptions(
        engine=config.trial.engine,
        model_args=config.trial.model_args,
        device=config.trial.device,
        threads=_threads(config),
    )


def run_options(config: Config) -> RunOptions:
    local = config.cluster.kind == "local"
    return RunOptions(
        gpus_per_trial=config.trial.gpus_per_trial,
        trial_cpus=config.trial.cpus,
        trial_memory_mb=config.trial.memory_mb,
        trial_time_limit_seconds=config.trial.time_limit_seconds,
        max_nodes=config.borrow.max_nodes,
        convert_memory_mb=config.checkpoint.convert_memory_mb,
        build_jobs=min(LOCAL_CPU_SLOTS, os.cpu_count() or 1) if local else 4,
        workers=1 if local else config.metric.workers or FEW_WORKERS,
        worker_cpus=config.metric.cpus,
        worker_memory_mb=config.metric.memory_mb,
        plan_policy=config.plan.policy,
        steal=config.plan.steals,
        stage=config.stage.enabled,
        host_trials=config.stage.host_trials is True,
        allow_unsafe=config.metric.allow_unsafe,
        bootstrap_iters=config.metric.bootstrap_iters,
        item_seconds=config.metric.item_seconds,
    )


def judge_options(config: Config) -> JudgeOptions | None:
    """The judge of the settings, None without one. OperatorError where the settings are incomplete.

    The key is only checked here: jobs read it themselves.
    """
    section = config.judge
    if section.url is None:
        return None
    parts = urllib.parse.urlsplit(section.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise OperatorError(
            "[judge] url is an http:// or https:// address without ?query, e.g. https://HOST/v1"
        )
    if parts.username is not None or parts.password is not None:
        raise OperatorError("[judge] url holds a password: name the key by api_key_env or api_key_file")
    if section.model is None:
        raise OperatorError("[judge] has a url and no model: say which model judges")
    if section.api_key_env is not None and section.api_key_file is not None:
        raise OperatorError("[judge] has api_key_env and api_key_file: keep one of them")
    prices = (section.price_per_million_prompt_tokens, section.price_per_million_completion_tokens)
    if section.max_cost is not None and None in prices:
        raise OperatorError(
            "[judge] max_cost needs price_per_million_prompt_tokens and price_per_million_completion_tokens"
        )
    known = section.model_dump(exclude_none=True) | {"url": section.url.rstrip("/")}
    options = JudgeOptions.model_validate(known)
    try:
        read_key(options)
    except JobError as error:
        raise OperatorError(str(error)) from error
    return options


def hosting(config: Config, cluster: Cluster) -> Hosting:
    """What of the site asks for one job a node that stages and hosts its trials, and how many metric workers fit there.

    ClusterError where the site cannot be asked.
    """
    if isinstance(cluster, LocalCluster):
        return Hosting()
    return ask_hosting(
        cluster,
        config.cluster.partition,
        config.cluster.cpu_partition,
        stage=config.stage.enabled,
        free=config.stage.host_trials == "auto",
    )


def at_site(record: EvaluationRecord, site: Hosting, config: Config) -> EvaluationRecord:
    """The record with trials hosted where the site asks for it, and the reason; with no more workers than fit there."""
    options = record.options
    wants = Wants(
        holder_mb=precursor_memory_mb(record),
        trial_mb=options.trial_memory_mb,
        trial_cpus=options.trial_cpus,
        trial_gpus=options.gpus_per_trial,
    )
    changes: dict[str, object] = {}
    reason = site.reason_for(wants)
    if reason:
        changes |= {"host_trials": True, "host_why": reason}
    fitting = site.workers_that_fit(wants, options.worker_cpus)
    if fitting is not None:
        changes["workers"] = min(config.metric.workers or MOST_WORKERS, fitting)
    return record.model_copy(update={"options": options.model_copy(update=changes)})


def cluster_of(config: Config) -> Cluster:
    """The cluster that the settings name."""
    work = WorkPaths(config.work_dir)
    if config.cluster.kind == "local":
        gpus = gpu_names()
        return LocalCluster(
            work.cache / "jobs", slots=config.cluster.slots or len(gpus) or _slots(config), gpus=gpus
        )
    if shutil.which("sbatch") is None:
        raise OperatorError(
            "there is no sbatch on this machine: run this on a login node, or use --cluster local"
        )
    if config.cluster.api == "pyslurm":
        try:
            return SlurmApi(slurm_options(config))
        except RefusedError as error:
            raise OperatorError(str(error)) from error
    return SlurmCli(slurm_options(config))


def _digest(text: str) -> str:
    """Eight hex digits that keep two work folders of one name apart in Slurm's queue."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def slurm_options(config: Config) -> SlurmOptions:
    section = config.cluster
    extra = section.extra_args
    return SlurmOptions(
        partition=section.partition,
        cpu_partition=section.cpu_partition,
        account=section.account,
        qos=section.qos,
        best_effort=config.borrow.best_effort,
        best_effort_qos=config.borrow.best_effort_qos,
        nice=section.nice,
        reservation=section.reservation,
        extra_args=extra,
        chdir=str(config.work_dir),
        token=f"evalspan:{config.work_dir.name}:{_digest(str(config.work_dir.resolve()))}",
    )


def keeper_of(config: Config, cluster: Cluster) -> Keeper:
    """The site's Redis where the settings name one, else a server of our own."""
    work = WorkPaths(config.work_dir)
    if config.redis.url:
        password = None
        if config.redis.password_file is not None:
            try:
                password = config.redis.password_file.read_text().strip()
            except OSError as error:
                raise OperatorError(
                    f"redis.password_file {config.redis.password_file}: {error.strerror}"
                ) from error
        try:
            address = RedisAddress.from_url(
                config.redis.url,
                username=config.redis.username,
                password=password,
                **_tls_files(config),
            )
        except ValueError as error:
            raise OperatorError(str(error)) from error
        return SiteRedis(work, address)
    bind: str | Callable[[], str] = config.redis.bind or "127.0.0.1"
    local = isinstance(cluster, LocalCluster)
    if config.redis.bind is None and not local:
        bind = lambda: local_address_towards(controller_host())  # noqa: E731 (once it is needed: the controller may be away)
    return RedisServer(work, bind, port=config.redis.port, ends_with_coordinator=local)


def _tls_files(config: Config) -> dict[str, str]:
    """The files of a TLS connection that the settings name; OperatorError where one cannot be read."""
    files = {}
    named = {"ca_file", "cert_file", "key_file"}
    for key, place in config.redis.model_dump(include=named, exclude_none=True).items():
        try:
            Path(place).open("rb").close()
        except OSError as error:
            raise OperatorError(f"redis.{key} {place}: {error.strerror}") from error
        files[key] = str(place)
    return files


def controller_host() -> str:
    """Where slurmctld runs: the side of this host that faces it is the one that compute nodes reach.

    RetryError while it is away, OperatorError where it does not say.
    """
    argv = ["scontrol", "show", "config"]
    said, away = "it names no SlurmctldHost", False
    try:
        config = run_command(argv, seconds=30)
        match = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", config, re.MULTILINE)
        if match is not None:
            return match.group(2) or match.group(1)
    except CommandError as error:
        said, away = str(error), error.timed_out or slurm_parse.says(str(error), slurm_parse.AWAY)
    if away:
        raise RetryError(f"{' '.join(argv)}: {said}")
    raise OperatorError(f"{' '.join(argv)}: {said}; set redis.bind to this host's cluster address")


def lm_eval_version(config: Config, site: Site) -> Callable[[], str]:
    """Says which lm_eval trials run."""
    own = config.trial.python is None and config.trial.container is None
    return own_version if own else LmEvalVersion(site.trial_command, site.trial_env)


def inputs_for(site: Site, version: Callable[[], str]) -> Callable[[SuiteSpec, ModelOptions], Inputs]:
    """What finds the source keys of a suite, asking lm-eval where it must (`inputs.inputs_of`)."""
    return lambda suite, model: inputs_of(suite, model, site, version(), partial(check_tasks, prepare=""))


def coordinator_of(config: Config) -> Coordinator:
    """A coordinator for this work folder, not yet in charge of it."""
    site = site_of(config)
    cluster = cluster_of(config)
    local = isinstance(cluster, LocalCluster)

    performer = Performer(
        site=site,
        cluster=cluster,
        lm_eval_version=lm_eval_version(config, site),
        observations=site.paths.observations,
        at_once=SUBMISSIONS_AT_ONCE if isinstance(cluster, SlurmCli) else 1,
    )
    poll = config.cluster.poll_seconds
    lease = min(Pace().lease, config.stage.lease_seconds / 6)  # between two touches
    return Coordinator(
        performer=performer,
        cluster=cluster,
        keeper=keeper_of(config, cluster),
        limits=Limits(
            max_nodes=config.borrow.max_nodes,
            max_gpus=config.borrow.max_gpus,
            leave_nodes_free=config.borrow.leave_nodes_free,
        ),
        pace=Pace(tick=0.1, jobs=0.2, nodes=1.0, lease=lease)
        if local
        else Pace(jobs=poll, nodes=NODES_PACE * poll, lease=lease),
        grace=Grace(lost=2.0, uncertain=1.0, hung=config.trial.hung_seconds)
        if local
        else Grace(lost=max(30.0, 3 * poll), outcome=3.0, hung=config.trial.hung_seconds),
    )
