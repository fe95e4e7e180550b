"""Builds a coordinator from the settings: its cluster, Redis and interpreters.

Rule: every machine-dependent default is set here; nothing here decides about an evaluation. Commands call `coordinator_of`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command
from coordinator.decide.allocation.allocate import Limits
from coordinator.decide.evaluation.footprint import precursor_memory_mb, trial_memory_mb
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError, RetryError
from coordinator.intake.from_settings import cpu_slots, hung_seconds, lm_eval_version, site_of
from coordinator.runtime.causes import accept_rules
from coordinator.runtime.cluster_calls import ClusterCalls
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator, Keeper
from coordinator.runtime.node_offers import Pace
from coordinator.site.cluster import Cluster, RefusedError
from coordinator.site.cluster.local import LocalCluster, gpu_names
from coordinator.site.cluster.sbatch_text import ROLES, SlurmOptions
from coordinator.site.cluster.slurm_cli import SlurmApi, SlurmCli
from coordinator.site.cluster.slurm_limits import remedy_of
from coordinator.site.cluster.slurm_rules import (
    SCONTROL_SECONDS,
    Hosting,
    NodeNeeds,
    ask_hosting,
    unknown_partition,
)
from coordinator.site.config.schema import Config
from coordinator.site.services.redis_server import RedisServer, SiteRedis, local_address_towards
from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue.redis_client import RedisAddress

NODES_PACE = 1.5  # nodes are listed this many times less often than jobs: two RPCs each
MOST_WORKERS = 64  # default limit on metric workers: more would fill a CPU partition that others share
PATIENCE_SECONDS = 0.25  # how long the loop waits for a Slurm command before it continues without the answer
SUBMISSIONS_AT_ONCE = 8  # concurrent `sbatch` commands


def site_hosting(config: Config, cluster: Cluster) -> Hosting:
    """Return whether the site needs hosted trials (one job per node that stages and runs them), and how many metric workers
    fit.

    Raise ClusterError if the site cannot be queried, OperatorError if it lacks a partition that the settings name.
    """
    if not isinstance(cluster, SlurmCli):
        return Hosting(listed=tuple(cluster.nodes()))
    options = slurm_options(config)
    site = ask_hosting(cluster, cluster.rules(), options)
    named = {
        "--partition, [cluster] partition": config.cluster.partition,
        "[cluster] cpu_partition": config.cluster.cpu_partition,
        "[borrow] best_effort": config.borrow.best_effort,
        **{f"[slurm.{role}] partition": options.role(purpose).partition for purpose, role in ROLES.items()},
    }
    if site.rules is not None and (wrong := unknown_partition(site.rules, named)):
        raise OperatorError(wrong)
    return site


def cluster_with_site(record: EvaluationRecord, site: Hosting, config: Config) -> EvaluationRecord:
    """Return the record with trials hosted if the site requires it, with the reason, and no more workers than fit."""
    options = record.options
    wants = NodeNeeds(
        precursor_mb=precursor_memory_mb(record),
        trial_mb=trial_memory_mb(record),
        trial_cpus=options.trial.cpus,
        trial_gpus=options.trial.gpus_per_trial,
    )
    changes: dict[str, object] = {}
    reason = site.reason_for(wants)
    if reason:
        hosts = options.stage.model_copy(update={"host_trials": True})
        changes |= {"stage": hosts, "host_why": reason}
    if site.array_size is not None:
        changes["array_size"] = site.array_size
    fitting = site.workers_that_fit(wants, options.metric.cpus, options.metric.memory_mb)
    if fitting is not None:
        changes["workers"] = min(config.metric.workers or MOST_WORKERS, fitting)
    return record.model_copy(update={"options": options.model_copy(update=changes)})


def cluster_of(config: Config) -> Cluster:
    """Return the cluster that the settings name."""
    work = WorkPaths(config.work_dir)
    if config.cluster.kind == "local":
        gpus = () if config.trial.engine == ENDPOINT else gpu_names()  # its trials need none
        # File WORK_DIR/cache/jobs/jobs.jsonl: jobs of the local cluster of the last day | the coordinator | may be removed
        # File WORK_DIR/cache/jobs/guardians.lock: locked (flock) by each process that watches a local job | a guardian | may
        # be removed
        return LocalCluster(
            work.cache / "jobs",
            slots=config.cluster.slots or len(gpus) or cpu_slots(config),
            gpus=gpus,
            export=config.cluster.export,
            secrets=_secrets(config),
        )
    if shutil.which("sbatch") is None:
        raise OperatorError(
            "sbatch was not found on this machine: run this on a login node, or use --cluster local"
        )
    if "," in (clusters := os.environ.get("SLURM_CLUSTERS", "")):
        raise OperatorError(f"SLURM_CLUSTERS names several clusters ({clusters}): set it to one of them")
    if config.cluster.api == "pyslurm":
        try:
            return SlurmApi(slurm_options(config))
        except RefusedError as error:
            raise OperatorError(str(error)) from error
    return SlurmCli(slurm_options(config))


def _digest(text: str) -> str:
    """Return eight hex digits that keep two work folders of one name apart in Slurm's queue."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _secrets(config: Config) -> tuple[str, ...]:
    """Return the variable with the judge's key, passed by name to jobs that judge (`job_specs.secrets_for`)."""
    return (config.judge.api_key_env,) if config.judge.api_key_env else ()


def slurm_options(config: Config) -> SlurmOptions:
    return SlurmOptions(
        settings=config,
        secrets=_secrets(config),
        log_mode=0o600 if config.shared_group is None else 0o640,
        chdir=str(config.work_dir),
        token=f"evalspan:{config.work_dir.name}:{_digest(str(config.work_dir.resolve()))}",
    )


def _password(file: Path | None) -> str | None:
    """Read the Redis password. Raise OperatorError if the file cannot be read, or if all users may read it."""
    if file is None:
        return None
    try:
        mode, password = file.stat().st_mode, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"[redis] password_file {file}: {getattr(error, 'strerror', error)}") from error
    if mode & stat.S_IROTH:
        raise OperatorError(f"[redis] password_file {file}: all users may read it; type: chmod o-r {file}")
    return password


def keeper_of(config: Config, cluster: Cluster, calls: ClusterCalls | None = None) -> Keeper:
    """Return the keeper of the site's Redis if the settings name one, otherwise of our own server."""
    work = WorkPaths(config.work_dir)
    if config.redis.url:
        password = _password(config.redis.password_file)
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
    if config.redis.bind is None and not isinstance(cluster, LocalCluster):
        bind = _towards_controller(calls or ClusterCalls())
    return RedisServer(work, bind, port=config.redis.port)


def _towards_controller(calls: ClusterCalls) -> Callable[[], str]:
    """Return a function that gives Redis's address: this host's address facing the controller, queried once.

    It raises RetryError until that is known.
    """
    known: list[str] = []

    def bind() -> str:
        if not known:
            call = calls.ask("the question where its controller runs", controller_host)
            if call is None:
                raise RetryError("Slurm has not said yet where its controller runs")
            known.append(local_address_towards(call.result()))
        return known[0]

    return bind


def _tls_files(config: Config) -> dict[str, str]:
    """Return the TLS files that the settings name. Raise OperatorError if one cannot be read."""
    files = {}
    named = {"ca_file", "cert_file", "key_file"}
    for key, place in config.redis.model_dump(include=named, exclude_none=True).items():
        try:
            Path(place).open("rb").close()
        except OSError as error:
            raise OperatorError(f"[redis] {key} {place}: {error.strerror}") from error
        files[key] = str(place)
    return files


def controller_host() -> str:
    """Return the host of slurmctld: compute nodes reach this host at its address facing that one.

    Raise RetryError while it is unreachable, OperatorError if it does not say.
    """
    argv = ["scontrol", "show", "config"]
    said, away = "it names no SlurmctldHost", False
    try:
        config = run_command(argv, seconds=SCONTROL_SECONDS)
        match = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", config, re.MULTILINE)
        if match is not None:
            return match.group(2) or match.group(1)
    except CommandError as error:
        said, away = str(error), error.timed_out or remedy_of(str(error)) == "away"
    if away:
        raise RetryError(f"{' '.join(argv)}: {said}")
    raise OperatorError(f"{' '.join(argv)}: {said}; set [redis] bind to this host's cluster address")


def coordinator_of(config: Config) -> Coordinator:
    """Build a coordinator for this work folder, not yet in charge of it."""
    accept_rules(WorkPaths(config.work_dir))
    site = site_of(config)
    cluster = cluster_of(config)
    local = isinstance(cluster, LocalCluster)
    calls = ClusterCalls(PATIENCE_SECONDS if isinstance(cluster, SlurmCli) else None)
    performer = Performer(
        site=site,
        cluster=cluster,
        lm_eval_version=lm_eval_version(config, site),
        observations=site.paths.observations,
        at_once=SUBMISSIONS_AT_ONCE if isinstance(cluster, SlurmCli) else 1,
        calls=calls,
    )
    poll = config.cluster.poll_seconds
    lease = min(Pace().lease, config.stage.lease_seconds / 6)  # between two touches
    return Coordinator(
        performer=performer,
        cluster=cluster,
        keeper=keeper_of(config, cluster, calls),
        limits=Limits(
            max_nodes=config.borrow.max_nodes,
            max_gpus=config.borrow.max_gpus,
            leave_nodes_free=config.borrow.leave_nodes_free,
        ),
        pace=Pace(tick=0.1, jobs=0.2, nodes=1.0, lease=lease)
        if local
        else Pace(jobs=poll, nodes=NODES_PACE * poll, lease=lease),
        grace=Grace(lost=2.0, uncertain=1.0, hung=hung_seconds(config))
        if local
        else Grace(lost=max(30.0, 3 * poll), outcome=3.0, hung=hung_seconds(config)),
    )
