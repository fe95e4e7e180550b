"""Checks before submission: the suite's tasks, the cluster.

Rule: input that would fail is refused in one line, before anything is written or started. Called by `eval` and `submit`;
`doctor` calls `probe_jobs` and `refused_jobs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coordinator.base.run_command import CommandError
from coordinator.base.words import first_of
from coordinator.decide.evaluation.footprint import (
    NO_CHECKPOINT,
    Footprint,
    footprint_of,
    gpu_need,
    job_resources,
)
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import EvaluationRecord, RunOptions
from coordinator.errors import OperatorError, RetryError
from coordinator.intake.source_keys import evaljobs_says
from coordinator.site.cluster import Cluster, ClusterError, Job, NodeState, Purpose, RefusedError
from coordinator.site.cluster.node_choice import none_left
from coordinator.site.cluster.sbatch_text import ROLES
from coordinator.site.cluster.slurm_limits import remedy_of, setting_of
from coordinator.site.cluster.slurm_rules import precursor_refusal, refusal_of
from evaljobs.contract.specs import SuiteSpec
from evaljobs.lmeval.task_yaml import unreadable_reason

TASKS_SECONDS = 120


def check_tasks(suite: SuiteSpec, site: Site, prepare: str, no_likelihoods: str = "") -> Sequence[str]:
    """Check a suite's tasks with lm-eval in the trial interpreter, and return their local data (files, patterns, folders).

    Raise OperatorError if lm-eval lacks a task, or jobs could not run its YAML, data or turns. `prepare`: the command that
    fetches data sets, for the message; `no_likelihoods`: as for `catalogue.resolve_names`.
    """
    _check_files(suite)
    asked = {
        "include_path": suite.include_path,
        "names": [name for task in suite.tasks for name in (task.name, *(task.samples or ()))],
        "cache": str(site.paths.cache),
        "chat": bool(suite.apply_chat_template),
        "no_likelihoods": no_likelihoods,
    }
    try:
        told = evaljobs_says(site, "tasks", json.dumps(asked), seconds=TASKS_SECONDS)
    except CommandError as error:
        if error.code is None:
            raise OperatorError(f"the trial interpreter {site.trial_command[-1]} {error}") from error
        said = f"lm-eval could not be asked for its tasks by {site.trial_command[-1]}: {error}"
        raise OperatorError(said) from error
    answer = json.loads(told.strip().splitlines()[-1])
    unfit: dict[str, str] = answer["unfit"]
    if unfit:
        name, why = min(unfit.items())
        others = ", ".join(sorted(unfit.keys() - {name}))
        also = f" (tasks that cannot run either: {others})" if others else ""
        raise OperatorError(f"suite {suite.name}: task {name}: {why}{also}")
    unknown: dict[str, list[str]] = answer["unknown"]
    if unknown:
        lines = [
            f"{name!r} (nearest: {', '.join(near)})" if near else repr(name)
            for name, near in sorted(unknown.items())
        ]
        own = "; a task of your own: --include-path FOLDER, or name its YAML file"
        if suite.include_path:
            own = f"; no YAML file in {', '.join(suite.include_path)} names it"
        raise OperatorError(f"suite {suite.name}: lm-eval knows no task {'; '.join(lines)}{own}")
    uncached: dict[str, str] = answer["uncached"]
    if uncached:
        sets = ", ".join(sorted(set(uncached.values())))
        raise OperatorError(
            f"suite {suite.name}: data sets that are not in the Hugging Face cache: {sets}; jobs run offline, so run "
            f"`{prepare}` where there is internet"
        )
    files: list[str] = answer["files"]
    return files


# above this number, not every YAML file is read: a copy of lm-eval's own tasks has thousands
MOST_LOOKED_AT = 500


def settings_passed_over(suite: SuiteSpec) -> str:
    """Return a warning about unreadable YAML files in the suite's folders, which lm-eval skips silently; "" if none."""
    files = [file for folder in suite.include_path for file in sorted(Path(folder).rglob("*.y*ml"))][
        :MOST_LOOKED_AT
    ]
    said = [f"{file}: {why}" for file in files if (why := unreadable_reason(file))]
    return f"lm-eval skips files that cannot be read: {first_of(said)}" if said else ""


def _check_files(suite: SuiteSpec) -> None:
    """Raise OperatorError for an unreadable YAML file of a task: lm-eval would skip it."""
    files = [Path(task.name) for task in suite.tasks if task.name.endswith((".yaml", ".yml"))]
    named = {task.name for task in suite.tasks}
    for folder in suite.include_path:  # of these, only those named like a task
        files += [file for file in Path(folder).rglob("*.y*ml") if file.stem in named]
    for file in files:
        if why := unreadable_reason(file):
            raise OperatorError(f"{file} cannot be read: {why}")


def check_cluster(cluster: Cluster, record: EvaluationRecord) -> str:
    """Check that the cluster accepts each kind of job and a trial fits some node. Return a warning about small GPUs."""
    options = record.options
    size = NO_CHECKPOINT if record.convert else footprint_of(record)  # the size after a conversion is unknown
    try:
        need, listed = gpu_need(record), cluster.nodes()
        nodes = _with_gpus(listed, options.trial.gpus_per_trial)
        if why := need.refusal(listed):
            raise OperatorError(why)
        nodes = [n for n in nodes if need.holds(n)]
        _check_power(nodes)
        _check_memory(nodes, options, size)
        jobs = probe_jobs(options, size, best_effort=all(n.best_effort for n in nodes))
        if record.convert:
            jobs["convert"] = _probe("convert", options, Footprint(files=record.checkpoint.bytes))
        if record.options.stage.hosts or not record.options.stage.enabled:
            del jobs["stage"]
        for kind, refusal in refused_jobs(cluster, jobs, nodes):
            if remedy_of(refusal) == "node" and not any(n.usable for n in nodes):
                continue  # it waits for its nodes; they also refuse jobs that they cannot hold
            hint = _hint(jobs[kind], refusal)
            raise OperatorError(
                f"the cluster refuses evalspan's jobs ({kind}): {refusal}{f' ({hint})' if hint else ''}"
            )
    except RefusedError as error:
        raise OperatorError(f"the cluster refuses: {error}") from error
    except ClusterError as error:
        raise no_answer_message(error) from error
    return need.left_out(listed)


def _with_gpus(listed: Sequence[NodeState], wanted: int) -> list[NodeState]:
    """Return the usable nodes with enough GPUs for a trial. Raise OperatorError if there are none."""
    nodes = [n for n in listed if n.gpus]
    if why := none_left(nodes):
        raise OperatorError(why)
    nodes = [n for n in nodes if not n.excluded]
    most = max((n.gpus for n in nodes), default=0)
    if not most:
        raise OperatorError(
            "no node of the partition has GPUs: name another by --partition or [cluster] partition "
            "(`sinfo -o '%P %G'` lists them)"
        )
    if most < wanted:
        raise OperatorError(
            f"no node has {wanted} GPUs for a trial (the largest has {most}): "
            "choose another partition or lower gpus_per_trial"
        )
    return [n for n in nodes if n.gpus >= wanted]


def _hint(job: Job, refusal: str) -> str:
    """Return the setting that a refusal is about; "" if unknown."""
    hint = setting_of(refusal)
    if not hint and not job.gpus:
        hint = "[cluster] cpu_partition names where jobs without GPUs go"
    # a site's own rule, for instance about GPUs without a type
    if not hint and "Unspecified error" in refusal:
        hint = "[slurm] gpu_request says how jobs ask for GPUs"
    return hint.replace("ROLE", ROLES[job.purpose])


def no_answer_message(error: ClusterError) -> RetryError:
    """Return the error for an unreachable cluster; only Slurm's commands may be missing or fail."""
    return RetryError(
        f"no Slurm answers here ({error}): --cluster local evaluates on this machine; else run on a login node"
    )


def _check_power(nodes: Sequence[NodeState]) -> None:
    """Raise OperatorError if every node is powered down and none may be booted: nothing would ever start."""
    if all("~" in n.state and not n.usable for n in nodes):
        raise OperatorError(
            f"Slurm has powered down all nodes with GPUs ({nodes[0].name} is {nodes[0].state}): "
            "[nodes] wake = true lets evalspan's jobs boot them"
        )


def _check_memory(nodes: Sequence[NodeState], options: RunOptions, size: Footprint) -> None:
    """Raise OperatorError if no node could ever hold the staged weights and one trial."""
    if not all(n.counts_memory for n in nodes):
        return
    wanted = job_resources("trial", options, size)["memory_mb"]
    if options.stage.enabled or options.stage.hosts:
        wanted = job_resources("host", options, size)["memory_mb"]
    most = max(n.memory_mb for n in nodes)
    if most < wanted:
        raise OperatorError(
            f"no node has {wanted} MiB for the weights and one trial (the largest with GPUs has {most}): "
            "lower [trial] memory_mb, or have trials read storage with [stage] enabled = false"
        )


def probe_jobs(
    options: RunOptions, size: Footprint = NO_CHECKPOINT, *, best_effort: bool = False
) -> dict[Purpose, Job]:
    """Return a sample job of each kind that an evaluation submits, for `cluster.check`; a host has one trial."""
    kinds: list[Purpose] = ["build", "stage", "host" if options.stage.hosts else "trial", "metric"]
    return {kind: _probe(kind, options, size, best_effort=best_effort) for kind in kinds}


def _probe(kind: Purpose, options: RunOptions, size: Footprint, *, best_effort: bool = False) -> Job:
    return Job(
        name=f"evalspan-check-{kind}",
        argv=("true",),
        log="/dev/null",
        best_effort=best_effort and kind in ("stage", "trial", "host"),
        purpose=kind,
        **job_resources(kind, options, size),
    )


def refused_jobs(
    cluster: Cluster, jobs: Mapping[Purpose, Job], nodes: Sequence[NodeState]
) -> Iterator[tuple[Purpose, str]]:
    """Yield (kind, the cluster's message) of each job that the cluster refuses. Raise ClusterError.

    `nodes`: those with GPUs; a precursor is checked on two of them.
    """
    largest = sorted(nodes, key=lambda n: (not n.usable, -n.memory_mb, n.name))
    for kind, job in jobs.items():
        asked_of = [n.name for n in largest]
        words = precursor_refusal(cluster, asked_of, job) if kind == "stage" else refusal_of(cluster, job)
        if words:
            yield kind, words
