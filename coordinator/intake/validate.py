"""Checks before submission: turns a typed checkpoint and suite into an EvaluationRecord.

Rule: input that will fail is refused in one line, before anything is written or started. Called by
`eval`, `submit` and the daemon; `doctor` calls `probes` and `refusals`.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from coordinator.base.run_command import CommandError, run_command
from coordinator.base.words import first_of
from coordinator.cluster import Cluster, ClusterError, Job, NodeState, Purpose, RefusedError
from coordinator.cluster.node_choice import none_left
from coordinator.cluster.sbatch_text import ROLES
from coordinator.cluster.slurm_limits import ends, setting_of
from coordinator.cluster.slurm_rules import precursor_refusal, refusal_of
from coordinator.errors import OperatorError, RetryError
from coordinator.evaluation.footprint import NO_CHECKPOINT, Footprint, footprint, gpu_need
from coordinator.evaluation.job_specs import Site, asked
from coordinator.evaluation.records import EvaluationRecord, Inputs, RunOptions, evaluation_id, is_snapshot
from coordinator.intake.checkpoint import inspect, inspect_raw, is_hugging_face, read_json, step_of
from coordinator.intake.suites import load_suite
from evaljobs.contract.rope import growing_rope
from evaljobs.contract.specs import CheckpointSpec, JudgeOptions, ModelOptions, SuiteSpec
from evaljobs.lmeval.task_yaml import unreadable

TASKS_SECONDS = 120


def make_record(
    checkpoint: str,
    suite: str | SuiteSpec,
    *,
    model: ModelOptions,
    options: RunOptions,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    judge: Callable[[], JudgeOptions | None] = lambda: None,
    priority: int = 0,
    step: int | None = None,
    allow_bin: bool = False,
    convert: str | None = None,
) -> EvaluationRecord:
    """Inspect the checkpoint and load the suite; OperatorError in one line where either is wrong.

    `inputs` computes the suite's source keys; `judge` is called only for a suite with judge tasks.
    With a `convert` command, a folder without Hugging Face format is converted. `step` None: from
    the folder's name.
    """
    if step is not None and step < 0:
        raise OperatorError(f"step is a training step, 0 or more, not {step}")
    spec, convert = inspected(checkpoint, allow_bin=allow_bin, convert=convert, step=step)
    if spec.step is None and not is_snapshot(spec.source):  # digits of a commit's hash are no step
        spec = spec.model_copy(update={"step": step_of(Path(spec.source).name)})
    loaded = load_suite(suite) if isinstance(suite, str) else suite
    if loaded.mode == "fast" and convert is None:
        _check_rope(Path(spec.source))
    judging = judge_for(loaded, judge)
    made_of = inputs(loaded, model)
    return EvaluationRecord(
        evaluation_id=evaluation_id(spec, loaded, model, judging, made_of),
        checkpoint=spec,
        suite=loaded,
        model=model,
        options=options,
        inputs=made_of,
        convert=convert,
        judge=judging,
        priority=priority,
        accepted_at=time.time(),
    )


def inspected(
    checkpoint: str, *, allow_bin: bool, convert: str | None, step: int | None = None
) -> tuple[CheckpointSpec, str | None]:
    """A checkpoint, and the command that converts it: None for a folder in Hugging Face format. CheckpointError."""
    if convert is None or is_hugging_face(checkpoint):
        return inspect(Path(checkpoint), allow_bin=allow_bin, step=step), None
    return inspect_raw(checkpoint, convert=convert, step=step), convert


def _check_rope(folder: Path) -> None:
    """OperatorError for a model whose tokens a tree would place on another scale than their own row does."""
    if kind := growing_rope(read_json(folder / "config.json")):
        raise OperatorError(
            f'{folder}: mode "fast" is not for a model with {kind} rope (config.json), which scales a row by the longest '
            'row beside it: --mode exact, or set mode = "exact"'
        )


def judge_for(suite: SuiteSpec, judge: Callable[[], JudgeOptions | None]) -> JudgeOptions | None:
    """The suite's judge, or None; OperatorError where it needs one and the settings have none."""
    judged = [task.name for task in suite.tasks if task.judge]
    if not judged:
        return None
    found = judge()
    if found is None:
        raise OperatorError(
            f"suite {suite.name} has tasks that a judge scores ({', '.join(judged)}): "
            "set url and model of [judge] in evalspan.toml (docs/evaluating/judges.md)"
        )
    return found


def parse_count(text: str, field: str) -> int | Literal["auto"]:
    """A positive number or "auto", of the suite's setting `field`."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) == 0:
        raise OperatorError(f'--{field.replace("_", "-")} is a positive number or "auto", not {text!r}')
    return int(text)


def check_tasks(suite: SuiteSpec, site: Site, prepare: str) -> Sequence[str]:
    """Local data of a suite's tasks (files, patterns, folders), by lm-eval in the trial interpreter.

    OperatorError where lm-eval lacks a task, or jobs could not run its YAML, data or turns.
    `prepare`: the command that fetches data sets, for the message.
    """
    _check_files(suite)
    argv = [*site.trial_command, "-m", "evaljobs", "tasks"]
    for task in suite.tasks:
        argv += ["--name", task.name]
    for folder in suite.include_path:
        argv += ["--include-path", folder]
    argv += ["--cache", str(site.paths.cache)]
    if suite.apply_chat_template:
        argv.append("--chat")
    try:
        told = run_command(argv, seconds=TASKS_SECONDS, env={**os.environ, **site.trial_env})
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
    if uncached and site.offline:
        sets = ", ".join(sorted(set(uncached.values())))
        raise OperatorError(
            f"suite {suite.name}: data sets that are not in the Hugging Face cache: {sets}; jobs run offline, so run "
            f"`{prepare}` where there is internet"
        )
    files: list[str] = answer["files"]
    return files


MOST_LOOKED_AT = 500  # YAML files, of which all are read: a copy of lm-eval's own tasks has thousands


def passed_over(suite: SuiteSpec) -> str:
    """Names YAML files in the suite's folders that cannot be read, which lm-eval passes over without a word; "" for none."""
    files = [file for folder in suite.include_path for file in sorted(Path(folder).rglob("*.y*ml"))][
        :MOST_LOOKED_AT
    ]
    said = [f"{file}: {why}" for file in files if (why := unreadable(file))]
    return f"lm-eval passes over what cannot be read: {first_of(said)}" if said else ""


def _check_files(suite: SuiteSpec) -> None:
    """OperatorError for a YAML file of a task that cannot be read: lm-eval would pass it over."""
    files = [Path(task.name) for task in suite.tasks if task.name.endswith((".yaml", ".yml"))]
    named = {task.name for task in suite.tasks}
    for folder in suite.include_path:  # of these, those that are named like a task
        files += [file for file in Path(folder).rglob("*.y*ml") if file.stem in named]
    for file in files:
        if why := unreadable(file):
            raise OperatorError(f"{file} cannot be read: {why}")


def prepare_command(checkpoint: str, options: Sequence[str], *, convert: str | None) -> str:
    """The `evalspan prepare` command for an evaluation. `options`: those that name its suite and settings."""
    # a raw checkpoint has no tokenizer that transformers reads
    tokenizer = checkpoint if convert is None else "CONVERTED_CHECKPOINT"
    return shlex.join(["evalspan", "prepare", *options, "--tokenizer", tokenizer])


def check_cluster(cluster: Cluster, record: EvaluationRecord) -> str:
    """Check that the cluster takes each kind of job and that a trial fits some node; nodes whose GPUs are too small, in words."""
    options = record.options
    size = NO_CHECKPOINT if record.convert else footprint(record)  # the size after a conversion is unknown
    try:
        need, listed = gpu_need(record), cluster.nodes()
        nodes = _with_gpus(listed, options.gpus_per_trial)
        if why := need.refusal(listed):
            raise OperatorError(why)
        nodes = [n for n in nodes if need.holds(n)]
        _check_power(nodes)
        _check_memory(nodes, options, size)
        jobs = probes(options, size, best_effort=all(n.best_effort for n in nodes))
        if record.convert:
            jobs["convert"] = _probe("convert", options, Footprint(files=record.checkpoint.bytes))
        if record.options.host_trials or not record.options.stage:
            del jobs["stage"]
        for kind, refusal in refusals(cluster, jobs, nodes):
            if ends(refusal) == "node" and not any(n.usable for n in nodes):
                continue  # it waits for its nodes; they refuse, too, where they cannot hold the job
            hint = _hint(jobs[kind], refusal)
            raise OperatorError(
                f"the cluster refuses evalspan's jobs ({kind}): {refusal}{f' ({hint})' if hint else ''}"
            )
    except RefusedError as error:
        raise OperatorError(f"the cluster refuses: {error}") from error
    except ClusterError as error:
        raise no_answer(error) from error
    return need.left_out(listed)


def _with_gpus(listed: Sequence[NodeState], wanted: int) -> list[NodeState]:
    """The nodes that evaluations may use and that have the GPUs of a trial; OperatorError where there is none."""
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
    """The setting that a refusal is about; "" where none is known."""
    hint = setting_of(refusal)
    if not hint and not job.gpus:
        hint = "[cluster] cpu_partition names where jobs without GPUs go"
    if not hint and "Unspecified error" in refusal:  # a site's own rule, as of GPUs without a type
        hint = "[slurm] gpu_request says how jobs ask for GPUs"
    return hint.replace("ROLE", ROLES[job.purpose])


def no_answer(error: ClusterError) -> RetryError:
    """The error where the cluster cannot be asked; only Slurm is asked by commands that may be missing or fail."""
    return RetryError(
        f"no Slurm answers here ({error}): --cluster local evaluates on this machine; else run on a login node"
    )


def _check_power(nodes: Sequence[NodeState]) -> None:
    """OperatorError where every node is powered down and none may be booted: nothing would ever start."""
    if all("~" in n.state and not n.usable for n in nodes):
        raise OperatorError(
            f"Slurm has powered down all nodes with GPUs ({nodes[0].name} is {nodes[0].state}): "
            "[nodes] wake = true lets evalspan's jobs boot them"
        )


def _check_memory(nodes: Sequence[NodeState], options: RunOptions, size: Footprint) -> None:
    """OperatorError where no node could ever hold the staged weights and one trial."""
    if not all(n.counts_memory for n in nodes):
        return
    wanted = asked("trial", options, size)["memory_mb"]
    if options.stage or options.host_trials:
        wanted = asked("host", options, size)["memory_mb"]
    most = max(n.memory_mb for n in nodes)
    if most < wanted:
        raise OperatorError(
            f"no node has {wanted} MiB for the weights and one trial (the largest with GPUs has {most}): "
            "lower [trial] memory_mb, or have trials read storage with [stage] enabled = false"
        )


def probes(
    options: RunOptions, size: Footprint = NO_CHECKPOINT, *, best_effort: bool = False
) -> dict[Purpose, Job]:
    """A sample job of each kind that an evaluation submits, for `cluster.check`; a host has one trial."""
    kinds: list[Purpose] = ["build", "stage", "host" if options.host_trials else "trial", "metric"]
    return {kind: _probe(kind, options, size, best_effort=best_effort) for kind in kinds}


def _probe(kind: Purpose, options: RunOptions, size: Footprint, *, best_effort: bool = False) -> Job:
    return Job(
        name=f"evalspan-check-{kind}",
        argv=("true",),
        log="/dev/null",
        best_effort=best_effort and kind in ("stage", "trial", "host"),
        purpose=kind,
        **asked(kind, options, size),
    )


def refusals(
    cluster: Cluster, jobs: Mapping[Purpose, Job], nodes: Sequence[NodeState]
) -> Iterator[tuple[Purpose, str]]:
    """(kind, cluster's words) of each job that the cluster refuses. Raises ClusterError.

    `nodes`: those with GPUs; a precursor is checked on two of them.
    """
    largest = sorted(nodes, key=lambda n: (not n.usable, -n.memory_mb, n.name))
    for kind, job in jobs.items():
        asked_of = [n.name for n in largest]
        words = precursor_refusal(cluster, asked_of, job) if kind == "stage" else refusal_of(cluster, job)
        if words:
            yield kind, words
