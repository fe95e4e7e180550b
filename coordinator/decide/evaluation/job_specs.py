"""Jobs and their specs, derived from the state: names, argv, memory, time limits, paths.

Rule: all names and paths of jobs are decided here. Called from: the subjects' rules, which decide when a job is due;
`coordinator.runtime.effects`, which writes the specs and submits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from coordinator.decide.evaluation.events import JobIntended
from coordinator.decide.evaluation.footprint import (
    Footprint,
    JobResources,
    footprint_of,
    host_limit_seconds,
    job_resources,
    trial_limit_seconds,
    worker_limit_seconds,
)
from coordinator.decide.evaluation.records import EvaluationRecord, JobName, job_detail
from coordinator.decide.evaluation.state import EntryState, JobInfo, MetricState, NodeUse, State
from coordinator.site.cluster import CPU_SLOT, Job, Purpose
from coordinator.site.config.schema import StageConfig
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import (
    BuildSpec,
    CheckpointSpec,
    ConvertSpec,
    ExecuteSpec,
    FrameRef,
    HostSpec,
    JudgeJob,
    LaneSpec,
    ScoreSpec,
    Spec,
    StageSpec,
    TrialSpec,
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where jobs run: interpreters, folders and rungs of one work folder, as values from the config."""

    work_dir: str
    trial_command: tuple[str, ...]  # interpreter of builds, precursors and trials, e.g. (".../python",)
    worker_command: tuple[str, ...]  # interpreter of metric workers: the coordinator's
    trial_env: dict[str, str] = field(default_factory=dict)
    worker_env: dict[str, str] = field(default_factory=dict)  # of metric workers
    stage: StageConfig = field(default_factory=StageConfig)
    redis_patience_seconds: float = 600.0  # how long trials wait for an unreachable Redis
    foreign: bool = (
        False  # the trials' interpreter has other packages, or sees other files, than this process
    )
    command: str = ""  # the [trial] settings of that interpreter: prologue, container, python

    @cached_property
    def paths(self) -> WorkPaths:
        return WorkPaths(self.work_dir)

    def of(self, state: State) -> EvaluationPaths:
        return self.paths.evaluation(state.evaluation_id)

    def folder(self, state: State) -> str:
        return str(self.paths.root / state.evaluation_id)


def _asked(state: State, purpose: Purpose, lanes: int = 1) -> JobResources:
    return job_resources(purpose, state.record.options, footprint_of(state.record), lanes)


def _new_name(state: State, purpose: Purpose, detail: str) -> str:
    """Return a name that no job of the evaluation has had. Attempts are counted per detail as it appears in the name."""
    short = job_detail(detail)
    attempt = state.jobs.attempts.get((purpose, short), 0)
    name = str(JobName.of(state.evaluation_id, purpose, short, attempt))
    assert name not in state.jobs.by_name, f"two jobs of one name: {name}"
    return name


def _job(state: State, site: Site, purpose: Purpose, detail: str, asks: JobResources) -> Job:
    """A new job of this purpose, which reads the spec of its own name."""
    paths = site.of(state)
    name = _new_name(state, purpose, detail)
    return Job(
        name=name,
        argv=(*site.trial_command, "-m", "evaljobs", purpose, str(paths.spec(name))),
        log=str(paths.log(name)),
        **asks,
        comment=state.evaluation_id,
        purpose=purpose,
    )


def _elsewhere(state: State, job: Job) -> Job:
    """Return the job with the nodes excluded that could not launch one."""
    return replace(job, exclude=tuple(sorted(state.jobs.unlaunched)))


def _source(state: State, entry: int) -> str:
    entries = state.record.inputs.entries
    return entries[entry].files if entries else ""


def _member_log(job: Job) -> str:
    """The log of each member of an array."""
    return job.log.removesuffix(".log") + ".%i.log"


def build_job(state: State, site: Site, entries: Sequence[EntryState], now: float) -> JobIntended:
    """One CPU job that builds the request sets of these entries, one after the other."""
    job = _job(state, site, "build", entries[0].name.rsplit("/", 1)[-1][:24], _asked(state, "build"))
    specs = (str(site.of(state).spec(f"{job.name}.{e.index}")) for e in entries)
    job = replace(job, argv=(*job.argv[:-1], *specs))
    return JobIntended(at=now, job=_elsewhere(state, job), entries=tuple(e.index for e in entries))


def convert_job(state: State, site: Site, now: float) -> JobIntended:
    """Return a CPU job that converts the announced checkpoint to a Hugging Face folder."""
    asks = job_resources("convert", state.record.options, Footprint(files=_announced(state).bytes))
    return JobIntended(at=now, job=_elsewhere(state, _job(state, site, "convert", "checkpoint", asks)))


def _announced(state: State) -> CheckpointSpec:
    return state.conversion.announced or state.record.checkpoint


def precursor_job(state: State, site: Site, node: NodeUse, now: float) -> JobIntended:
    """Return the precursor of a node: it stages the weights, holds that memory with one CPU, and clears it when released.

    It requests the longest time; a precursor that replaces it at its limit stages the weights again.
    """
    job = _job(state, site, "stage", node.name, _asked(state, "stage"))
    job = replace(job, node=node.name, best_effort=node.best_effort)
    return JobIntended(at=now, job=job, node_lanes=node.lanes)


def trial_job(
    state: State, site: Site, node: NodeUse, lanes: Sequence[str], now: float, *, hosted: bool = False
) -> JobIntended:
    """Return an array of trials on one node, one member per lane. `hosted`: one long job that stages into its own memory and
    runs the node's trials as its children.
    """
    purpose: Purpose = "host" if hosted else "trial"
    asks = _asked(state, purpose, len(lanes))
    asks["time_limit_seconds"] = (host_limit_seconds if hosted else trial_limit_seconds)(state, lanes)
    job = replace(_job(state, site, purpose, node.name, asks), node=node.name, best_effort=node.best_effort)
    if not hosted and len(lanes) > 1:
        job = replace(job, log=_member_log(job), count=len(lanes))
    return JobIntended(
        at=now,
        job=job,
        lanes=tuple(lanes),
        trials=tuple(f"{job.name}.{number}" for number in range(len(lanes))),
        precursor=None if hosted else node.precursor,
        node_lanes=len(lanes) if hosted else node.lanes,
    )


def worker_job(state: State, site: Site, count: int, now: float) -> JobIntended:
    """CPU jobs that score: an array of `count` RQ workers."""
    options = {
        "--redis-file": site.paths.redis_address,
        "--queue": state.evaluation_id,
        "--stop-file": workers_stop_file(site.of(state)),
        "--lease-file": site.paths.lease,
        "--lease-seconds": site.stage.lease_seconds,
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    asks = _asked(state, "metric")
    asks["time_limit_seconds"] = worker_limit_seconds(state, count, asks["time_limit_seconds"])
    job = _job(state, site, "metric", "workers", asks)
    argv = (*site.worker_command, "-m", "evaljobs", "worker", *words)
    job = replace(job, argv=argv, log=_member_log(job), count=count)
    return JobIntended(at=now, job=_elsewhere(state, job))


# --- what the performer writes and submits for an intended job -----------------------------------------------------------


def environment_of_job(site: Site, purpose: Purpose) -> Mapping[str, str]:
    """Return the environment of a job. It is not journalled, since it may hold tokens."""
    return site.worker_env if purpose == "metric" else site.trial_env


def secrets_for(record: EvaluationRecord, purpose: Purpose) -> tuple[str, ...]:
    """Return the names of secret variables passed to a job: the judge's key if it may call the judge."""
    judge = record.judge
    asks = purpose == "metric" and any(task.judge for task in record.suite.tasks)
    return (judge.api_key_env,) if asks and judge is not None and judge.api_key_env else ()


def specs_of(state: State, site: Site, info: JobInfo) -> dict[str, Spec]:
    """Return the specs of an intended job by name, from what is known at submission."""
    name = info.job.name
    match info.job.purpose:
        case "build":
            specs = [_build_spec(state, site, f"{name}.{i}", state.entries[i]) for i in info.entries]
            return {spec.name: spec for spec in specs}
        case "convert":
            return {name: _convert_spec(state, site, name)}
        case "stage":
            return {name: _stage_spec(state, site, info)}
        case "host":
            trial = _trial_spec(state, site, info, path="")
            gpus = state.record.options.trial.gpus_per_trial
            stage = _stage_spec(state, site, info)
            return {name: HostSpec(name=name, stage=stage, trial=trial, gpus_per_trial=gpus)}
        case "trial":
            node = state.nodes.by_name[info.job.node or ""]
            return {name: _trial_spec(state, site, info, path=node.path)}
        case _:
            return {}


def _build_spec(state: State, site: Site, name: str, entry: EntryState) -> BuildSpec:
    return BuildSpec(
        name=name,
        evaluation_dir=site.folder(state),
        suite=state.record.suite,
        entry=entry.index,
        batch_size=state.batch_size,
        cut=state.cut_of(entry),
        model_dir=state.record.checkpoint.source,
        model=state.record.model,
        out_dir=entry.folder,
        source=_source(state, entry.index),
    )


def _convert_spec(state: State, site: Site, name: str) -> ConvertSpec:
    source = _announced(state)
    return ConvertSpec(
        name=name,
        evaluation_dir=site.folder(state),
        source=source,
        command=state.record.convert or "",
        out_dir=str(site.paths.converted / source.digest),
    )


def _stage_spec(state: State, site: Site, info: JobInfo) -> StageSpec:
    node = info.job.node or ""
    return StageSpec(
        name=info.job.name,
        evaluation_dir=site.folder(state),
        node=node,
        checkpoint=state.record.checkpoint,
        roots=site.stage.roots if state.record.options.stage.enabled else (),
        lease_file=str(site.paths.lease),
        lease_seconds=site.stage.lease_seconds,
        readers=site.stage.readers,
        share=None if state.nodes.by_name[node].lanes else site.stage.prefetch,
    )


def _trial_spec(state: State, site: Site, info: JobInfo, *, path: str) -> TrialSpec:
    record = state.record
    paths = site.of(state)
    leaves = state.shards.leaves
    lanes = zip(info.lanes, info.trials, strict=True)
    return TrialSpec(
        name=info.job.name,
        evaluation_dir=str(paths.root),
        evaluation_id=state.evaluation_id,
        node=info.job.node or "",
        model_path=path,
        checkpoint=record.checkpoint,
        adapters=_adapters(record),
        model=record.model,
        batch_size=state.batch_size,
        request_sets={name: leaf.planned.folder for name, leaf in leaves.items()},
        request_sets_file=None if leaves else str(paths.request_sets),
        seed=record.suite.seed if record.suite.seed is not None else 1234,
        redis_file=str(site.paths.redis_address),
        redis_patience_seconds=site.redis_patience_seconds,
        lanes=tuple(LaneSpec(lane=lane, trial=trial) for lane, trial in lanes),
        gpus=_gpus_of_a_trial(state, info),
    )


def _adapters(record: EvaluationRecord) -> dict[str, str]:
    """Return the adapters on storage that the model arguments name, with their identities at acceptance."""
    args, named = record.model.model_args, record.inputs.named(adapters=True)
    return {args[key]: digest for key, digest in named.items() if args[key].startswith("/")}


def _gpus_of_a_trial(state: State, info: JobInfo) -> int:
    """Return how many GPUs a trial must see: 0 if the local cluster's slots are shares of the CPU."""
    node = state.nodes.by_name.get(info.job.node or "")
    return 0 if node is None or node.gpu_type == CPU_SLOT else state.record.options.trial.gpus_per_trial


def workers_stop_file(paths: EvaluationPaths) -> str:
    return str(paths.release / "workers")


def metric_spec(state: State, site: Site, metric: MetricState) -> ExecuteSpec | ScoreSpec:
    """Return the spec of a metric job, from what is known when it is queued."""
    record, entry, shards = state.record, state.entries[metric.entry], state.shards
    judge = None
    if record.judge is not None and record.suite.tasks[entry.index].judge:
        judge = JudgeJob(options=record.judge, cache_dir=str(site.paths.judgements))
    common: Any = {
        "name": metric.name,
        "evaluation_dir": site.folder(state),
        "suite": record.suite,
        "entry": entry.index,
        "model_dir": record.checkpoint.source,
        "model": record.model,
        "item_seconds": record.options.metric.item_seconds,
        "allow_unsafe": record.options.metric.allow_unsafe,
        "judge": judge,
    }

    def frames(names: Iterable[str]) -> tuple[FrameRef, ...]:
        return tuple(frame for name in names if (frame := shards.by_name[name].frame) is not None)

    if metric.kind == "execute":  # programs of whole documents; only the records that hold them are named
        leaf = shards.leaves[metric.task]
        places = sorted({place for document in metric.documents for place in leaf.places[document]})
        return ExecuteSpec(
            **common,
            task=leaf.planned.task,
            request_set=entry.sets[leaf.planned.task],
            documents=metric.documents,
            frames=frames(leaf.planned.shards[place] for place in places),
        )
    planned = {task: shards.leaves[name].planned for task, name in entry.leaves.items()}
    if metric.blocks:
        planned = {task: leaf.first(metric.blocks) for task, leaf in planned.items()}
    return ScoreSpec(
        **common,
        request_sets=dict(entry.sets),
        frames={task: frames(leaf.shards) for task, leaf in planned.items()},
        documents={task: tuple(sorted(set(chain(*leaf.shard_documents)))) for task, leaf in planned.items()}
        if metric.blocks
        else None,
        bootstrap_iters=record.options.metric.bootstrap_iters,
    )
