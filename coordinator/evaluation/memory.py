"""Memory that jobs ask for: after the kernel ended one for lack of it, jobs of its kind ask for twice as much.

Rule: such an end counts against no node, shard or task, nor as one of a job's tries, while more can be asked for: three
times for each setting, and no more than the largest node has beside the weights. A node that has less is left by itself:
the cluster refuses the job there. Called from: the subjects that see jobs end, `ending`.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.cluster import Purpose
from coordinator.evaluation.footprint import footprint
from coordinator.evaluation.job_specs import asked, precursor_memory_mb
from coordinator.evaluation.records import RunOptions
from coordinator.evaluation.state import JobInfo, State

OUT_OF_MEMORY = (
    "OUT_OF_MEMORY"  # Slurm's word for a job of which the kernel ended a process for lack of memory
)
MAX_DOUBLINGS = 3  # of one setting, until the evaluation ends or is tried again
LEAST_MORE = 1.1  # times as much, below which no job is tried again
# purpose -> the setting that decides its memory; "": none does
_SETTINGS: Mapping[Purpose, str] = {
    "build": "[trial] memory_mb",
    "trial": "[trial] memory_mb",
    "host": "[trial] memory_mb",
    "metric": "[metric] memory_mb",
    "convert": "[checkpoint] convert_memory_mb",
    "stage": "",
}


def why(state: State, purpose: Purpose, who: str) -> str:
    """What happened, and the setting that would do, for a job for which no more is asked."""
    setting = _SETTINGS[purpose]
    has, more = _now(state, purpose), _more(state, purpose)
    said = f"the kernel ended {who} for lack of memory: it had {has} MB"
    if more <= LEAST_MORE * has:
        largest = f"no node has more than {state.nodes.largest_mb} MB for it and the weights"
        return f"{said}, and {largest}: choose larger nodes by [cluster] partition, or a smaller batch_size"
    return f"{said}; set {setting} = {more}" if setting else said


def job_short(state: State, info: JobInfo) -> bool:
    """The kernel ended this job. Does the next of its kind ask for more?"""
    lanes = len(info.lanes) if info.job.purpose == "host" else 1
    return short(state, info.job.purpose, info.job.name, had_mb=info.job.memory_mb, lanes=max(1, lanes))


def short(state: State, purpose: Purpose, who: str, *, had_mb: int, lanes: int = 1) -> bool:
    """The kernel ended a job, or a process of it, that had `had_mb` MiB. Does the next one ask for more?"""
    options, size = state.record.options, footprint(state.record)
    if 2 * asked(purpose, options, size, lanes)["memory_mb"] > 3 * had_mb:
        return True  # since another job's end; a site may give a job somewhat more than it asks for
    setting = _SETTINGS[purpose]
    has, more = _now(state, purpose), _more(state, purpose, lanes)
    if more <= LEAST_MORE * has:
        return False
    if state.jobs.doublings.get(setting, 0) >= MAX_DOUBLINGS:
        return False
    state.jobs.doublings[setting] = state.jobs.doublings.get(setting, 0) + 1
    state.record = state.record.model_copy(update={"options": _raised(options, purpose, more)})
    advice = f": set {setting} = {more} for later evaluations" if setting else ""
    state.warnings.append(
        f"the kernel ended {who} for lack of memory: it had {has} MB, and the next asks for {more} MB{advice}"
    )
    return True


def _raised(options: RunOptions, purpose: Purpose, memory_mb: int) -> RunOptions:
    update: dict[str, object]
    match purpose:
        case "metric":
            update = {"metric": options.metric.model_copy(update={"memory_mb": memory_mb})}
        case "stage" | "convert":
            update = {f"{purpose}_memory_mb": memory_mb}
        case _:
            update = {"trial": options.trial.model_copy(update={"memory_mb": memory_mb})}
    return options.model_copy(update=update)


def _now(state: State, purpose: Purpose) -> int:
    """MiB that a job of this purpose asks for now; of a host, each of its trials."""
    kind: Purpose = "trial" if purpose == "host" else purpose
    return asked(kind, state.record.options, footprint(state.record))["memory_mb"]


def _more(state: State, purpose: Purpose, lanes: int = 1) -> int:
    """MiB that the next one asks for: twice as much, or what the largest node holds beside the weights.

    Builds and trials share a setting, which lowers neither.
    """
    twice, largest = 2 * _now(state, purpose), state.nodes.largest_mb
    if purpose == "build":
        return max(twice, _now(state, "trial"))
    if purpose not in ("stage", "trial", "host") or not largest:
        return twice
    options = state.record.options
    weights = 0 if purpose == "stage" else precursor_memory_mb(state.record)
    if purpose == "trial" and not options.stage.enabled:
        weights = 0
    return min(twice, (largest - weights) // lanes - (options.engine_memory_mb if weights else 0))
