"""Everything that is checked before anything is submitted: from what a person typed to an EvaluationRecord.

Rule: what can be known to fail is refused here with one clear line; nothing has been written or started by then.
It does not know: the loop.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from coordinator.checkpoint import inspect, inspect_raw, is_hugging_face
from coordinator.cluster import Cluster, ClusterError, Job, RefusedError
from coordinator.errors import OperatorError
from coordinator.records import EvaluationRecord, Inputs, RunOptions, evaluation_id
from coordinator.specs import Site
from coordinator.suites import load_suite
from evaljobs.contract import JudgeOptions, ModelOptions, SuiteSpec

TASKS_SECONDS = 120


def make_record(
    checkpoint: str,
    suite: str,
    *,
    model: ModelOptions,
    options: RunOptions,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    judge: Callable[[], JudgeOptions | None] = lambda: None,
    priority: int = 0,
    step: int | None = None,
    allow_bin: bool = False,
    batch_size: str | None = None,
    convert: str | None = None,
) -> EvaluationRecord:
    """Inspect the checkpoint, load the suite; OperatorError in one line where either is not what it should be.

    `inputs` finds what the suite's tasks are made of; `judge` is asked for only where the suite has tasks that one scores.
    With a `convert` command, a folder that is no Hugging Face folder is one to be converted.
    """
    if convert is not None and is_hugging_face(checkpoint):
        convert = None
    if convert is None:
        spec = inspect(Path(checkpoint), allow_bin=allow_bin, step=step)
    else:
        spec = inspect_raw(checkpoint, convert=convert, step=step)
    loaded = load_suite(suite)
    if batch_size is not None:
        loaded = loaded.model_copy(update={"batch_size": parse_batch_size(batch_size)})
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


def judge_for(suite: SuiteSpec, judge: Callable[[], JudgeOptions | None]) -> JudgeOptions | None:
    """The judge of a suite, None where it needs none; OperatorError where it needs one and the settings have none."""
    judged = [task.name for task in suite.tasks if task.judge]
    if not judged:
        return None
    found = judge()
    if found is None:
        raise OperatorError(
            f"suite {suite.name} has tasks that a judge scores ({', '.join(judged)}): "
            "set url and model of [judge] in evalspan.toml (docs/judges.md)"
        )
    return found


def parse_batch_size(text: str) -> int | Literal["auto"]:
    """A positive number or "auto"."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) == 0:
        raise OperatorError(f'--batch-size is a positive number or "auto", not {text!r}')
    return int(text)


def check_tasks(suite: SuiteSpec, site: Site) -> None:
    """Ask lm-eval, in a process of its own, whether it knows the suite's tasks and they can run as the suite has them.

    OperatorError names the nearest, or what to say in the suite.
    """
    names = [t.name for t in suite.tasks]
    argv = [*site.trial_command, "-m", "evaljobs", "tasks", "--names", ",".join(names)]
    for folder in suite.include_path:
        argv += ["--include-path", folder]
    argv += ["--cache", str(site.paths.cache)]
    if suite.apply_chat_template:
        argv.append("--chat")
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=TASKS_SECONDS, check=False, env=_environment(site)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(
            f"the trial interpreter {site.trial_command[0]} cannot be run: {error}"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OperatorError(f"lm-eval could not be asked for its tasks by {site.trial_command[0]}: {last}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    unknown: dict[str, list[str]] = answer["unknown"]
    if unknown:
        lines = [f"{n!r} (nearest: {', '.join(near) or 'none'})" for n, near in sorted(unknown.items())]
        raise OperatorError(f"suite {suite.name}: lm-eval knows no task {'; '.join(lines)}")
    unfit: dict[str, str] = answer["unfit"]
    if unfit:
        name, why = min(unfit.items())
        raise OperatorError(f"suite {suite.name}: task {name} has further turns, but {why}")


def _environment(site: Site) -> dict[str, str]:
    import os  # noqa: PLC0415 (the one place that reads the environment here)

    return {**os.environ, **site.trial_env}


def check_cluster(cluster: Cluster, record: EvaluationRecord) -> None:
    """Would the cluster take our jobs, and has any node enough GPUs for one trial?"""
    options = record.options
    try:
        nodes = cluster.nodes()
        most = max((n.gpus for n in nodes), default=0)
        if most < options.gpus_per_trial:
            raise OperatorError(
                f"no node has {options.gpus_per_trial} GPUs for a trial (the largest has {most}): "
                "choose another partition or lower gpus_per_trial"
            )
        spare = all(n.best_effort for n in nodes if n.gpus >= options.gpus_per_trial)
        for job in probes(options, best_effort=spare):
            try:
                cluster.check(job)
            except RefusedError as error:
                hint = "" if job.gpus else "; [cluster] cpu_partition names where jobs without GPUs go"
                raise OperatorError(f"the cluster refuses our jobs: {error}{hint}") from error
    except ClusterError as error:
        raise OperatorError(f"the cluster cannot be asked: {error}") from error


def probes(options: RunOptions, *, best_effort: bool = False) -> Sequence[Job]:
    """Jobs like those that an evaluation submits, for the cluster to say whether it would take them."""
    common = {"argv": ("true",), "log": "/dev/null", "time_limit_seconds": options.trial_time_limit_seconds}
    return (
        Job(
            name="evalspan-check-trial",
            gpus=options.gpus_per_trial,
            cpus=options.trial_cpus,
            memory_mb=options.trial_memory_mb,
            best_effort=best_effort,
            purpose="trial",
            **common,  # type: ignore[arg-type]
        ),
        Job(
            name="evalspan-check-metric",
            cpus=options.worker_cpus,
            memory_mb=options.worker_memory_mb,
            purpose="metric",
            **common,  # type: ignore[arg-type]
        ),
    )
