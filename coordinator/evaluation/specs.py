"""From state to jobs: what is submitted, with which argv, memory and specs. Pure.

Rule: every name and path that a job is given is decided here and nowhere else.
It does not know: when a job is due (machine) or how it is submitted (cluster).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TypedDict

from coordinator.cluster import Job, Purpose
from coordinator.evaluation.records import EvaluationRecord, RunOptions, job_detail, job_token
from coordinator.evaluation.state import EntryState, JobInfo, LeafState, NodeUse, State
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import (
    BuildSpec,
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

MIB = 1 << 20
SHORTEST_LIMIT_SECONDS = 900
"""No trial asks for less: schedulers gain nothing below, and a cold prior may be off by several times."""
ENDING_SECONDS = 120
"""A trial is told to end a minute before its limit, and Slurm may be a minute early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where jobs run: interpreters, folders and rungs of one work folder. Config turned into values."""

    work_dir: str
    trial_command: tuple[str, ...]  # interpreter of builds, holders and trials, e.g. (".../python",)
    worker_command: tuple[str, ...]  # interpreter of metric workers: ours
    trial_env: dict[str, str] = field(default_factory=dict)
    stage_roots: tuple[str, ...] = ("/dev/shm",)
    redis_patience_seconds: float = 600.0  # that trials wait for a Redis that is away
    lease_seconds: float = 900.0
    readers: int = 16
    prefetch: float = (
        0.5  # share of a node's free memory that weights staged ahead of GPUs may take; 0: none are
    )
    linger_seconds: float = (
        60.0  # that a released holder keeps its pages where one waits that may take them over
    )
    offline: bool = True

    @property
    def paths(self) -> WorkPaths:
        return WorkPaths(self.work_dir)

    def of(self, state: State) -> EvaluationPaths:
        return self.paths.evaluation(state.evaluation_id)


class Asked(TypedDict):
    """What each member of a job asks of the cluster."""

    gpus: int
    cpus: int
    memory_mb: int
    time_limit_seconds: int


def asked(purpose: Purpose, options: RunOptions, checkpoint_bytes: int, lanes: int = 1) -> Asked:
    """The most that a job of this purpose asks for. `checkpoint_bytes`: of what it converts or stages; `lanes`: trials that
    a host runs. What is beyond a partition's MaxTime is left away at submission.
    """
    trial = options.trial_memory_mb
    seconds = options.trial_time_limit_seconds
    holder = int(checkpoint_bytes * options.holder_memory_slack / MIB) + options.requests_mb + 512
    match purpose:
        case "build":
            return Asked(gpus=0, cpus=options.trial_cpus, memory_mb=trial, time_limit_seconds=4 * 3600)
        case "convert":
            memory_mb = options.convert_memory_mb or checkpoint_bytes * 2 // MIB + 4096
            return Asked(gpus=0, cpus=options.trial_cpus, memory_mb=memory_mb, time_limit_seconds=4 * 3600)
        case "stage":
            return Asked(gpus=0, cpus=1, memory_mb=holder, time_limit_seconds=seconds + 1800)
        case "host":
            return Asked(
                gpus=options.gpus_per_trial * lanes,
                cpus=options.trial_cpus * lanes,
                memory_mb=trial * lanes + holder,
                time_limit_seconds=seconds,
            )
        case "metric":
            memory_mb = options.worker_memory_mb
            return Asked(
                gpus=0, cpus=options.worker_cpus, memory_mb=memory_mb, time_limit_seconds=seconds + 3600
            )
        case _:
            return Asked(
                gpus=options.gpus_per_trial,
                cpus=options.trial_cpus,
                memory_mb=trial,
                time_limit_seconds=seconds,
            )


def _asked(state: State, purpose: Purpose, lanes: int = 1) -> Asked:
    return asked(purpose, state.record.options, state.record.checkpoint.bytes, lanes)


def _info(job: Job, specs: dict[str, Spec], **more: tuple[str, ...] | tuple[int, ...]) -> JobInfo:
    info = JobInfo(job=job, specs=specs, **more)  # type: ignore[arg-type]
    info.members = dict.fromkeys(range(job.count), "pending")
    return info


def _new_name(state: State, kind: str, detail: str) -> str:
    """A name that no job of the evaluation has had: attempts are counted by the text that stands in it."""
    attempt = state.next_attempt(kind, job_detail(detail))
    name = job_token(state.evaluation_id, kind, detail, attempt)
    assert name not in state.jobs, f"two jobs of one name: {name}"
    return name


def _argv(
    command: tuple[str, ...], verb: str, paths: EvaluationPaths, names: Sequence[str]
) -> tuple[str, ...]:
    return (*command, "-m", "evaljobs", verb, *(str(paths.spec(n)) for n in names))


def _source(state: State, entry: int) -> str:
    inputs = state.record.inputs
    return inputs.entries[entry].files if inputs is not None else ""


def build_job(state: State, site: Site, entries: Sequence[EntryState]) -> JobInfo:
    """One CPU job that builds the request sets of these entries, one after the other."""
    paths = site.of(state)
    detail = slug_of(entries[0].name)
    name = _new_name(state, "build", detail)
    specs: dict[str, Spec] = {}
    for entry in entries:
        spec_name = f"{name}.{entry.index}"
        specs[spec_name] = BuildSpec(
            name=spec_name,
            evaluation_dir=str(paths.root),
            suite=state.record.suite,
            entry=entry.index,
            batch_size=state.batch_size,
            model_dir=state.record.checkpoint.source,
            model=state.record.model,
            out_dir=entry.folder,
            offline=site.offline,
            source=_source(state, entry.index),
        )
    job = Job(
        name=name,
        argv=_argv(site.trial_command, "build", paths, list(specs)),
        log=str(paths.log(name)),
        **_asked(state, "build"),
        comment=state.evaluation_id,
        env=site.trial_env,
        purpose="build",
    )
    return _info(job, specs, entries=tuple(e.index for e in entries))


def convert_job(state: State, site: Site) -> JobInfo:
    """One CPU job that makes a Hugging Face folder of the announced checkpoint."""
    source = state.announced or state.record.checkpoint
    paths = site.of(state)
    name = _new_name(state, "convert", "checkpoint")
    spec = ConvertSpec(
        name=name,
        evaluation_dir=str(paths.root),
        source=source,
        command=state.record.convert or "",
        out_dir=str(site.paths.converted / source.digest),
    )
    job = Job(
        name=name,
        argv=_argv(site.trial_command, "convert", paths, [name]),
        log=str(paths.log(name)),
        **asked("convert", state.record.options, source.bytes),
        comment=state.evaluation_id,
        env=site.trial_env,
        purpose="convert",
    )
    return _info(job, {name: spec})


def slug_of(name: str) -> str:
    """The part of a task name that fits into a job name."""
    return name.rsplit("/", 1)[-1][:24]


def stage_spec(state: State, site: Site, node: NodeUse, name: str) -> StageSpec:
    return StageSpec(
        name=name,
        evaluation_dir=str(site.of(state).root),
        node=node.name,
        checkpoint=state.record.checkpoint,
        roots=site.stage_roots if state.record.options.stage else (),
        lease_file=str(site.paths.lease),
        lease_seconds=site.lease_seconds,
        readers=site.readers,
        share=None if node.lanes else site.prefetch,
        preimport=state.record.model.engine,
    )


def holder_memory_mb(record: EvaluationRecord) -> int:
    """What a precursor asks of a node."""
    return asked("stage", record.options, record.checkpoint.bytes)["memory_mb"]


def holder_job(state: State, site: Site, node: NodeUse) -> JobInfo:
    """The precursor of a node: stages the weights, holds that memory with one CPU, clears it when told."""
    paths = site.of(state)
    name = _new_name(state, "stage", node.name)
    job = Job(
        name=name,
        argv=_argv(site.trial_command, "stage", paths, [name]),
        log=str(paths.log(name)),
        node=node.name,
        **_asked(state, "stage"),
        comment=state.evaluation_id,
        env=site.trial_env,
        best_effort=node.best_effort,
        purpose="stage",
    )
    return _info(job, {name: stage_spec(state, site, node, name)})


def trial_spec(
    state: State, site: Site, node: NodeUse, name: str, lanes: Sequence[str], *, path: str
) -> TrialSpec:
    record = state.record
    paths = site.of(state)
    probing = not state.leaves
    return TrialSpec(
        name=name,
        evaluation_dir=str(paths.root),
        evaluation_id=state.evaluation_id,
        node=node.name,
        model_path=path,
        model=record.model,
        batch_size=state.batch_size,
        request_sets={t: leaf.planned.folder for t, leaf in state.leaves.items()},
        request_sets_file=str(paths.request_sets) if probing else None,
        seed=record.suite.seed if record.suite.seed is not None else 1234,
        redis_file=str(site.paths.redis_address),
        redis_patience_seconds=site.redis_patience_seconds,
        lanes=tuple(LaneSpec(lane=lane, trial=f"{name}.{i}") for i, lane in enumerate(lanes)),
        idle_seconds=0.0,  # nothing unclaimed: a shard that comes back later gets a trial of its own
        sampled_tasks=tuple(t for t, leaf in state.leaves.items() if leaf.planned.sampled),
    )


def trial_limit_seconds(state: State, lanes: Sequence[str]) -> int:
    """The time limit that trials ask for: what load and an even share of the work take at the 95th percentile.

    A short limit finds gaps that a long one does not fit into. One that proves too short costs a load: the trial hands
    its shard back when it is told to end, and the next trial on its lane asks for twice as long. Never above the
    settings' limit, which stands where nothing was predicted (a trial that probes for the batch size).
    """
    most = state.record.options.trial_time_limit_seconds
    if not state.work_seconds_95:
        return most
    asked = state.load_seconds_95 + state.work_seconds_95 / max(1, state.index.lanes_in_use) + ENDING_SECONDS
    attempt = max(state.index.lane_trials.get(lane, 0) for lane in lanes)
    return min(most, ceil(max(SHORTEST_LIMIT_SECONDS, asked)) << min(attempt, 20))


def trial_job(state: State, site: Site, node: NodeUse, lanes: Sequence[str]) -> JobInfo:
    """An array of trials on one node, a member per lane."""
    paths = site.of(state)
    name = _new_name(state, "trial", node.name)
    spec = trial_spec(state, site, node, name, lanes, path=node.path)
    job = Job(
        name=name,
        argv=_argv(site.trial_command, "trial", paths, [name]),
        log=str(paths.logs / f"{name}.%i.log") if len(lanes) > 1 else str(paths.log(name)),
        count=len(lanes),
        node=node.name,
        **_asked(state, "trial") | {"time_limit_seconds": trial_limit_seconds(state, lanes)},
        comment=state.evaluation_id,
        env=site.trial_env,
        best_effort=node.best_effort,
        purpose="trial",
    )
    trials = tuple(lane.trial for lane in spec.lanes)
    return _info(job, {name: spec}, lanes=tuple(lanes), trials=trials)


def host_job(state: State, site: Site, node: NodeUse, lanes: Sequence[str]) -> JobInfo:
    """Rung 2: one long job that stages into its own memory and runs the node's trials as its children."""
    options = state.record.options
    paths = site.of(state)
    name = _new_name(state, "host", node.name)
    spec = HostSpec(
        name=name,
        stage=stage_spec(state, site, node, name),
        trial=trial_spec(state, site, node, name, lanes, path=""),
        gpus_per_trial=options.gpus_per_trial,
    )
    job = Job(
        name=name,
        argv=_argv(site.trial_command, "host", paths, [name]),
        log=str(paths.log(name)),
        node=node.name,
        **_asked(state, "host", len(lanes)),
        comment=state.evaluation_id,
        env=site.trial_env,
        best_effort=node.best_effort,
        purpose="host",
    )
    trials = tuple(lane.trial for lane in spec.trial.lanes)
    return _info(job, {name: spec}, lanes=tuple(lanes), trials=trials)


def worker_job(state: State, site: Site, count: int) -> JobInfo:
    """CPU jobs that score: an array of `count` RQ workers."""
    paths = site.of(state)
    name = _new_name(state, "metric", "workers")
    job = Job(
        name=name,
        argv=(
            *site.worker_command,
            "-m",
            "evaljobs",
            "worker",
            "--redis-file",
            str(site.paths.redis_address),
            "--work-dir",
            site.work_dir,
            "--queue",
            state.evaluation_id,
            "--stop-file",
            str(workers_stop_file(paths)),
            "--lease-file",
            str(site.paths.lease),
            "--lease-seconds",
            str(site.lease_seconds),
        ),
        log=str(paths.logs / f"{name}.%i.log"),
        count=count,
        **_asked(state, "metric"),
        comment=state.evaluation_id,
        purpose="metric",
    )
    return _info(job, {})


def workers_stop_file(paths: EvaluationPaths) -> str:
    return str(paths.release / "workers")


def _frames(state: State, leaf: LeafState) -> tuple[FrameRef, ...]:
    return tuple(f for s in leaf.planned.shards if (f := state.shards[s].frame) is not None)


def _judge(state: State, site: Site, entry: int) -> JudgeJob | None:
    record = state.record
    if record.judge is None or not record.suite.tasks[entry].judge:
        return None
    return JudgeJob(
        options=record.judge,
        redis_file=str(site.paths.redis_address),
        cache_dir=str(site.paths.judgements),
    )


def execute_spec(
    state: State, site: Site, leaf: LeafState, documents: Sequence[int], name: str
) -> ExecuteSpec:
    """Programs of these whole documents; only the records that hold them are named."""
    record = state.record
    places = sorted({place for document in documents for place in leaf.places[document]})
    frames = [state.shards[leaf.planned.shards[place]].frame for place in places]
    return ExecuteSpec(
        name=name,
        evaluation_dir=str(site.of(state).root),
        suite=record.suite,
        entry=leaf.planned.entry,
        task=leaf.planned.task,
        request_set=leaf.planned.folder,
        documents=tuple(sorted(documents)),
        frames=tuple(f for f in frames if f is not None),
        model_dir=record.checkpoint.source,
        model=record.model,
        item_seconds=record.options.item_seconds,
        allow_unsafe=record.options.allow_unsafe,
        judge=_judge(state, site, leaf.planned.entry),
    )


def score_spec(state: State, site: Site, entry: EntryState, name: str) -> ScoreSpec:
    record = state.record
    return ScoreSpec(
        name=name,
        evaluation_dir=str(site.of(state).root),
        suite=record.suite,
        entry=entry.index,
        request_sets=dict(entry.sets),
        frames={t: _frames(state, state.leaves[t]) for t in entry.sets},
        model_dir=record.checkpoint.source,
        model=record.model,
        source=_source(state, entry.index),
        bootstrap_iters=record.options.bootstrap_iters,
        item_seconds=record.options.item_seconds,
        allow_unsafe=record.options.allow_unsafe,
        judge=_judge(state, site, entry.index),
    )
