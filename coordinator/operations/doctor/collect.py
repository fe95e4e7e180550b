"""Reads the facts for `evalspan doctor` from this machine, Redis, Slurm and small jobs on nodes.

Rule: its jobs, its Redis and its folder below the work folder are removed at the end. What cannot be read becomes a finding,
never an exception. Called by the `doctor` command; `findings` judges the facts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pwd
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command
from coordinator.decide.evaluation.job_specs import Site
from coordinator.errors import EvalspanError, OperatorError, RetryError
from coordinator.intake import from_settings, validate
from coordinator.operations.doctor.facts import Checkup, Facts, Status
from coordinator.operations.doctor.findings import judge_site
from coordinator.operations.doctor.limit_findings import judge_accounting
from coordinator.operations.doctor.node_jobs import Target, survey_nodes
from coordinator.runtime import wiring
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.cluster import Cluster, ClusterError, Job, NodeState, Purpose, slurm_rules
from coordinator.site.cluster.local import LocalCluster, gpu_names
from coordinator.site.cluster.slurm_cli import SlurmApi, SlurmCli
from coordinator.site.cluster.slurm_limits import setting_of
from coordinator.site.cluster.slurm_parse import parse_reservations
from coordinator.site.config.schema import Config, StageConfig
from coordinator.site.services import redis_server
from coordinator.site.services.redis_server import RedisServer, local_address_towards
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_folder
from evaljobs.queue.redis_client import QueueUnavailable, read_address
from evaljobs.staging.capacity import fs_type

INTERPRETER_SECONDS = 120.0  # to import torch and an engine from slow storage


def check_up(
    config: Config, *, most_nodes: int = 8, wait_seconds: float = 60.0, sample_mb: int = 256
) -> Checkup:
    """Return all findings about what an evaluation needs. `most_nodes`: nodes to probe per partition; 0: all."""
    with scratch_folder(config, "doctor") as folder:
        site = from_settings.site_of(config)
        disk = os.statvfs(config.work_dir)
        facts = Facts(
            config=config,
            python=platform.python_version(),
            work_fs=fs_type(config.work_dir),
            work_free=disk.f_bavail * disk.f_frsize,
        )
        ask_interpreter(facts, site)
        lock = WorkLock(folder / "lock")
        try:
            lock.acquire()
        except RetryError as error:
            facts.locks_error = str(error)
            return Checkup(cluster=config.cluster.kind, findings=judge_site(facts))
        lock.release()
        try:
            cluster = _cluster(config, folder)
            nodes = cluster.nodes()
        except (EvalspanError, ClusterError) as error:
            facts.cluster_error = str(error)
            return Checkup(cluster=config.cluster.kind, findings=judge_site(facts))
        if isinstance(cluster, SlurmCli):
            _ask_slurm(facts, cluster, nodes)
        else:
            facts.gpus = gpu_names()
        targets, facts.left_out = _targets(config, cluster, nodes, hosting=facts.hosting, most=most_nodes)
        with _redis(facts, cluster, folder) as redis_file:
            facts.answers = survey_nodes(
                targets,
                site=site,
                folder=folder,
                redis_file=redis_file,
                wait_seconds=wait_seconds,
                sample_mb=sample_mb,
            )
    answers = {a.target.node: {**a.record, "shared": a.shared, "trouble": a.trouble} for a in facts.answers}
    return Checkup(cluster=config.cluster.kind, findings=judge_site(facts), nodes=answers)


@contextlib.contextmanager
def scratch_folder(config: Config, what: str) -> Iterator[Path]:
    """Provide a folder that nodes can see, deleted at the end. Raise OperatorError if another user owns the work folder."""
    # File WORK_DIR/cache/doctor/RANDOM/…: jobs and answers of a check | `doctor` | at its end
    # File WORK_DIR/cache/nodes/RANDOM/…: jobs and answers of a check | `check-nodes` | at its end
    folder = WorkPaths(config.work_dir).cache / what / secrets.token_hex(4)
    try:
        make_folder(folder)
    except PermissionError as error:
        raise OperatorError(
            f"{config.work_dir} is another user's work folder: give --work-dir a folder of yours"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cluster(config: Config, folder: Path) -> Cluster:
    """Return the configured cluster. A local one gets a folder of its own, since a coordinator may use the work folder's."""
    if config.cluster.kind == "local":
        gpus = gpu_names()
        return LocalCluster(folder / "jobs", slots=config.cluster.slots or len(gpus) or 1, gpus=gpus)
    return wiring.cluster_of(config)


def ask_interpreter(facts: Facts, site: Site) -> None:
    """Read versions in the trials' interpreter, and whether it can import the engine."""
    question = (
        "import json, sys; from evaljobs.staging.node_probe import installed_versions; "
        "from evaljobs.trial.engines.loading import engine_trouble; found = installed_versions(); "
        "print('\\n' + json.dumps([found, found['lm_eval'] and engine_trouble(sys.argv[1]) or '']))"
    )
    argv = [*site.trial_command, "-c", question, facts.config.trial.engine]
    try:
        printed = run_command(argv, seconds=INTERPRETER_SECONDS, env={**os.environ, **site.trial_env})
    except CommandError as error:
        facts.interpreter_error = str(error)
    else:
        facts.versions, facts.engine_trouble = json.loads(printed.strip().splitlines()[-1])


@contextlib.contextmanager
def _redis(facts: Facts, cluster: Cluster, folder: Path) -> Iterator[Path | None]:
    """Yield the address file of a Redis to try: the site's, or a server started for this checkup. None if it does not answer."""
    config = facts.config
    started: RedisServer | None = None
    file: Path | None = None
    try:
        if config.redis.url:
            wiring.keeper_of(config, cluster).ensure()
            place, whose = WorkPaths(config.work_dir), "the site's"
        else:
            bind = config.redis.bind or "127.0.0.1"
            if config.redis.bind is None and facts.slurm:
                bind = local_address_towards(wiring.controller_host())
            place, whose = WorkPaths(folder), "evalspan's own, started for this check"
            started = RedisServer(place, bind)
            started.ensure()
        address = read_address(place.redis_address)
        facts.redis = f"answers at {address.where} ({whose})"
        facts.redis_warnings = redis_server.check_server(address)
        file = place.redis_address
    except (EvalspanError, QueueUnavailable, OSError) as error:
        facts.redis_error = str(error)
    try:
        yield file
    finally:
        if started is not None:
            started.stop()


# --- the cluster -----------------------------------------------------------------------------------------------------


def _ask_slurm(facts: Facts, cluster: SlurmCli, nodes: Sequence[NodeState]) -> None:
    """Read the site's rules and limits, which jobs it would accept, and whether trials must be hosted."""
    config = facts.config
    if isinstance(cluster, SlurmApi):
        facts.api = f"{cluster.version}; by Slurm's commands: {cluster.by_commands}"
    rules = slurm_rules.SiteRules(config={})
    try:
        rules = facts.rules = slurm_rules.ask_rules()
        facts.reservations = parse_reservations(
            slurm_rules.ask_slurm(["scontrol", "--oneliner", "show", "reservation"])
        )
    except ClusterError as error:
        facts.rules_error = str(error)
    ask_limits(facts, cluster, rules, nodes)
    facts.job_kinds = dict(_job_kinds(config, cluster, nodes))


def ask_limits(
    facts: Facts, cluster: SlurmCli, rules: slurm_rules.SiteRules, nodes: Sequence[NodeState]
) -> None:
    """Read the limits of accounting, and the jobs and nodes to compare them with."""
    config, facts.options = facts.config, cluster.options
    facts.gpu_nodes = [n for n in nodes if n.gpus]
    facts.cpu_nodes = [n for n in nodes if not n.gpus]
    facts.user = pwd.getpwuid(os.getuid()).pw_name
    try:
        facts.accounting = slurm_rules.ask_accounting(rules)
    except ClusterError as error:
        facts.accounting_error = str(error)
    facts.jobs = sample_jobs(config, nodes)
    with contextlib.suppress(ClusterError):
        refusal = slurm_rules.precursor_refusal(cluster, [n.name for n in nodes if n.usable and n.gpus])
        facts.host_reason = slurm_rules.host_reason(
            rules, facts.options.trial_partition, refusal, stage=config.stage.enabled
        )


def settings_within_limits(cluster: SlurmCli, rules: slurm_rules.SiteRules) -> dict[str, tuple[int, str]]:
    """Return the settings that keep evaluations within accounting's limits -> value and a comment, as in `check_up`."""
    facts = Facts(config=cluster.options.settings, python="", work_fs="", work_free=0)
    ask_limits(facts, cluster, rules, cluster.nodes())
    found = [(f.settings, f"keeps to {f.what}") for f in judge_accounting(facts, rules)]
    rows = [(key, value, what) for settings, what in found for key, value in settings]
    return {key: min((value, what) for k, value, what in rows if k == key) for key, _, _ in rows}


def sample_jobs(config: Config, nodes: Sequence[NodeState]) -> dict[Purpose, Job]:
    """Return a job of each kind; the precursor is on a node with GPUs, and thus in their partition."""
    options = from_settings.run_options(config).model_copy(update={"stage": StageConfig()})
    node = next((n.name for n in nodes if n.gpus), None)
    return {
        kind: replace(job, node=node) if kind == "stage" else job
        for kind, job in validate.probe_jobs(options).items()
        if kind != "stage" or config.stage.enabled
    }


def _job_kinds(
    config: Config, cluster: Cluster, nodes: Sequence[NodeState]
) -> Iterator[tuple[Purpose, tuple[Status, str, bool]]]:
    """Yield each kind of job, as in Facts. A refused precursor means hosted trials, unless one of its settings is wrong."""
    for kind, job in validate.probe_jobs(from_settings.run_options(config)).items():
        try:
            refused = next((words for _, words in validate.refused_jobs(cluster, {kind: job}, nodes)), None)
        except ClusterError as error:
            yield kind, ("warn", str(error), bool(job.gpus))
        else:
            if kind == "stage" and (refused is None or not setting_of(refused)):
                continue
            found = "would be taken" if refused is None else f"refused: {refused}"
            yield kind, ("ok" if refused is None else "fail", found, bool(job.gpus))


def _targets(
    config: Config, cluster: Cluster, nodes: Sequence[NodeState], *, hosting: bool, most: int
) -> tuple[list[Target], int]:
    """Return GPU nodes, and the CPU partition's for metric workers: the freest `most` of each (0: all), and how many others."""
    freest = sorted((n for n in nodes if n.usable), key=lambda n: (-n.gpus_free, -n.cpus_free, n.name))
    gpu = [n.name for n in freest if n.gpus]
    options = wiring.slurm_options(config)
    local, cpu_partition = config.cluster.kind == "local", options.metric_partition
    names = (cpu_partition or "").split(",")
    cpu = [n.name for n in freest if not n.gpus and not set(n.partitions).isdisjoint(names)]
    targets = [
        Target(
            node=name,
            cluster=cluster,
            partition="" if local else options.trial_partition or "",
            gpus=config.trial.gpus_per_trial if hosting else 0,
            sandbox=local or cpu_partition is None,
        )
        for name in gpu[: most or None]
    ]
    if cpu_partition is not None:
        section = config.cluster.model_copy(update={"partition": cpu_partition})
        # a probe makes the same requests as trials
        roles = config.slurm.model_copy(update={"trial": config.slurm.metric})
        workers = wiring.cluster_of(config.model_copy(update={"cluster": section, "slurm": roles}))
        targets += [
            Target(node=name, cluster=workers, partition=cpu_partition, stages=False)
            for name in cpu[: most or None]
        ]
    return targets, len(gpu) + len(cpu) - len(targets)
