"""The shell of `evalspan doctor`: asks this machine, Redis, Slurm and its nodes, and has `doctor` judge the answers.

Rule: nothing of the checkup outlives it: its jobs, its Redis and its folder below the work folder are taken away. What
cannot be asked is a finding, never an exception.
It does not know: what is good or bad.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.cluster import Cluster, ClusterError, NodeState, slurm_rules
from coordinator.cluster.local import LocalCluster, gpu_names
from coordinator.cluster.slurm_rules import SiteRules
from coordinator.config.schema import Config
from coordinator.doctor import doctor
from coordinator.doctor.doctor import Checkup, Finding, fail, ok, warn
from coordinator.doctor.survey import Answer, Target, survey
from coordinator.errors import EvalspanError
from coordinator.evaluation.job_specs import Site
from coordinator.intake import validate
from coordinator.runtime import wiring
from coordinator.services import redis_server
from coordinator.services.redis_server import RedisServer, local_address_towards
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, read
from evaljobs.staging.capacity import fs_type

INTERPRETER_SECONDS = 120.0


def check_up(
    config: Config, *, most_nodes: int = 8, wait_seconds: float = 60.0, sample_mb: int = 256
) -> Checkup:
    """Look at everything that an evaluation needs. `most_nodes` 0: probe all of them, else that many of each partition."""
    site = wiring.site_of(config)
    slurm = config.cluster.kind == "slurm"
    findings = [ok("python", f"{platform.python_version()}, evalspan's own")]
    findings.append(_interpreter(site, config.trial.engine))
    folder_at = len(findings)
    findings.append(_work_folder(config, slurm=slurm))
    answers: Sequence[Answer] = ()
    with _folder(config) as folder:
        try:
            cluster = _cluster(config, folder)
            nodes = cluster.nodes()
        except (EvalspanError, ClusterError) as error:
            findings.append(
                fail("cluster", str(error), "name one that is there: --cluster, [cluster] partition")
            )
            return Checkup(cluster=config.cluster.kind, findings=tuple(findings))
        reason, more = _rules(config, cluster, nodes) if slurm else ("", _machine())
        findings += more
        hosting = config.stage.host_trials is True or bool(reason and config.stage.host_trials == "auto")
        targets, left_out = _targets(config, cluster, nodes, hosting=hosting, most=most_nodes)
        with _redis(config, cluster, folder) as (redis_file, finding):
            findings.append(finding)
            answers = survey(
                targets,
                site=site,
                folder=folder,
                redis_file=redis_file,
                wait_seconds=wait_seconds,
                sample_mb=sample_mb,
            )
        findings[folder_at] = doctor.proved_shared(findings[folder_at], answers)
        findings += doctor.judge_survey(answers, config, hosting=hosting, left_out=left_out)
    told = {a.target.node: {**a.record, "shared": a.shared, "trouble": a.trouble} for a in answers}
    return Checkup(cluster=config.cluster.kind, findings=tuple(findings), nodes=told)


@contextlib.contextmanager
def _folder(config: Config) -> Iterator[Path]:
    """A folder that nodes see, taken away at the end."""
    folder = WorkPaths(config.work_dir).cache / "doctor" / secrets.token_hex(4)
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cluster(config: Config, folder: Path) -> Cluster:
    """The settings' cluster. The local one keeps its jobs in our folder: a coordinator may be at work in its own."""
    if config.cluster.kind == "local":
        gpus = gpu_names()
        return LocalCluster(folder / "jobs", slots=config.cluster.slots or len(gpus) or 1, gpus=gpus)
    return wiring.cluster_of(config)


# --- here ------------------------------------------------------------------------------------------------------------


def _interpreter(site: Site, engine: str) -> Finding:
    what = "trial interpreter"
    question = (
        "import json, sys; from evaljobs.trial.probe import engine_trouble, versions; found = versions(); "
        "print('\\n' + json.dumps([found, found['lm_eval'] and engine_trouble(sys.argv[1]) or '']))"
    )
    try:
        done = subprocess.run(
            [*site.trial_command, "-c", question, engine],
            capture_output=True,
            text=True,
            timeout=INTERPRETER_SECONDS,
            check=False,
            env={**os.environ, **site.trial_env},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(what, str(error), "see [trial] python, prologue and container")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return fail(what, said, "see [trial] python, prologue and container")
    found, trouble = json.loads(done.stdout.strip().splitlines()[-1])
    return doctor.judge_versions(found, engine, trouble=trouble)


def _work_folder(config: Config, *, slurm: bool) -> Finding:
    disk = os.statvfs(config.work_dir)
    fs = fs_type(config.work_dir)
    return doctor.judge_work_folder(str(config.work_dir), fs, disk.f_bavail * disk.f_frsize, slurm=slurm)


def _machine() -> list[Finding]:
    gpus = gpu_names()
    return [ok("GPUs", ", ".join(gpus)) if gpus else ok("GPUs", "none: trials run on the CPU")]


@contextlib.contextmanager
def _redis(config: Config, cluster: Cluster, folder: Path) -> Iterator[tuple[Path | None, Finding]]:
    """A Redis to try, from here and from nodes: the site's, a running coordinator's, or one of our own for the while."""
    started: RedisServer | None = None
    try:
        if config.redis.url:
            keeper = wiring.keeper_of(config, cluster)
            keeper.ensure()
            file, said = WorkPaths(config.work_dir).redis_address, "the site's"
        else:
            bind = config.redis.bind or "127.0.0.1"
            if config.redis.bind is None and config.cluster.kind == "slurm":
                bind = local_address_towards(wiring.controller_host())
            place = WorkPaths(folder)
            started = RedisServer(place, bind)
            started.ensure()
            file, said = place.redis_address, "of our own, started for this checkup"
        address: RedisAddress = read(file)
        warnings = redis_server.check(address)
        found = f"answers at {address.where} ({said})"
        finding = warn("Redis", found, "; ".join(warnings)) if warnings else ok("Redis", found)
    except (EvalspanError, QueueUnavailable, OSError) as error:
        todo = "see [redis]: bind for a server of our own, url for the site's"
        yield None, fail("Redis", str(error), todo)
        return
    try:
        yield file, finding
    finally:
        if started is not None:
            started.stop()


# --- the cluster -----------------------------------------------------------------------------------------------------


def _rules(config: Config, cluster: Cluster, nodes: Sequence[NodeState]) -> tuple[str, list[Finding]]:
    """Why trials must be hosted (or ""), and what else Slurm's settings mean for us."""
    findings: list[Finding] = []
    rules = SiteRules(config={})
    try:
        rules = slurm_rules.ask_rules()
        findings += doctor.judge_partitions(rules, config)
        lanes = max((n.gpus for n in nodes), default=0) // max(1, config.trial.gpus_per_trial)
        findings += doctor.judge_limits(rules, _associations(rules), lanes)
        findings += doctor.judge_scripts(rules)
    except ClusterError as error:
        findings.append(warn("Slurm's settings", str(error), "without them the site's rules are not noticed"))
    findings += _probed(config, cluster, nodes)
    reason = ""
    with contextlib.suppress(ClusterError):
        usable = [n.name for n in nodes if n.usable and n.gpus]
        refusal = slurm_rules.precursor_refusal(cluster, usable)
        reason = slurm_rules.host_reason(rules, config.cluster.partition, refusal, stage=config.stage.enabled)
    return reason, [*findings, doctor.judge_host(reason, config.stage.host_trials)]


def _probed(config: Config, cluster: Cluster, nodes: Sequence[NodeState]) -> list[Finding]:
    """Whether the cluster would take each kind of job; a precursor's refusal is `doctor.judge_host`'s to judge."""
    findings = []
    options = wiring.run_options(config)
    for kind, job in validate.probes(options).items():
        if kind == "stage":
            continue
        what = f"{kind} jobs"
        try:
            refused = [words for _, words in validate.refusals(cluster, {kind: job}, nodes)]
        except ClusterError as error:
            findings.append(warn(what, str(error), "ask again when the controller answers"))
            continue
        todo = (
            "see [trial] and [cluster]" if job.gpus else "see [metric], [trial] and [cluster] cpu_partition"
        )
        findings.append(fail(what, f"refused: {refused[0]}", todo) if refused else ok(what, "would be taken"))
    return findings


def _associations(rules: SiteRules) -> str | None:
    """This user's limits in the accounting database, one row each; None where there is no accounting."""
    if rules.config.get("AccountingStorageType", "").partition("/")[2] in ("", "none"):
        return None
    argv = ["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=MaxSubmitJobs,MaxJobs"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _targets(
    config: Config, cluster: Cluster, nodes: Sequence[NodeState], *, hosting: bool, most: int
) -> tuple[list[Target], int]:
    """GPU nodes as stagers, CPU nodes as workers' places; free ones first, `most` of each (0: all)."""
    free_first = sorted(nodes, key=lambda n: (not n.usable, -n.gpus_free, -n.cpus_free, n.name))
    gpu = [n for n in free_first if n.gpus and n.usable]
    cpu = [n for n in free_first if not n.gpus and n.usable]
    least = config.trial.gpus_per_trial if hosting else 0
    local = config.cluster.kind == "local"
    split = config.cluster.cpu_partition is not None
    targets = [
        Target(
            node=n.name,
            cluster=cluster,
            partition="" if local else config.cluster.partition or "",
            gpus=least,
            sandbox=local or not split,
        )
        for n in gpu[: most or None]
    ]
    if split:
        section = config.cluster.model_copy(update={"partition": config.cluster.cpu_partition})
        workers = wiring.cluster_of(config.model_copy(update={"cluster": section}))
        targets += [
            Target(node=n.name, cluster=workers, partition=config.cluster.cpu_partition or "", stages=False)
            for n in cpu[: most or None]
        ]
    asked = len(targets)
    return targets, len(gpu) + (len(cpu) if split else 0) - asked
