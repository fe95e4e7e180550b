"""GPU seconds of each trial, by cause. Pure.

Rule: a trial that reported its own seconds gets those. A trial that died without them, for instance with its node, gets the
time that its GPUs were held, and in it the seconds of its shards that count. Called by `measurements`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from coordinator.decide.evaluation.state import State
from evaljobs.contract.names import LaneId
from evaljobs.contract.outcomes import TrialEnded
from evaljobs.contract.specs import Record

DRAINED = "drained"  # end of a trial whose work is done
CAUSES = ("infer", "imports", "load", "warm", "dump", "wait", "other")  # of GPU seconds: fields of `GpuUse`
Member = tuple[str, int]  # a job's name, and the member


class GpuUse(Record):
    """One trial's GPUs, from the job's start to its end. All in seconds; the parts add up to `held`."""

    trial: str
    node: str
    gpus: int
    device: str  # "": the trial died without reporting it
    started_at: float
    held: float
    infer: float
    imports: float = 0.0
    load: float = 0.0
    warm: float = 0.0  # the first forward pass
    dump: float = 0.0
    wait: float = 0.0  # for a shard from the queue, or for staged weights
    other: float  # the rest: interpreter start and exit
    shards: int
    ended: str  # a reason of `TrialEnded`, or the cluster's end state of a trial that died


def slot_word(devices: Iterable[str]) -> str:
    """Return what trials held: "GPU", or "slot" if every trial that reports its device has a CPU."""
    return "slot" if {device for device in devices if device} == {"cpu"} else "GPU"


def trial_gpu_use(outcome: TrialEnded, job_started: float | None) -> GpuUse:
    """Return the use that a trial reports. `job_started`: unix seconds, from the cluster."""
    begin = outcome.started_at if job_started is None else min(job_started, outcome.started_at)
    held = outcome.ended_at - begin
    parts = {
        "infer": outcome.infer_seconds,
        "imports": outcome.import_seconds,
        "load": outcome.load_seconds,
        "warm": outcome.warm_seconds,
        "dump": outcome.dump_seconds,
        "wait": outcome.wait_seconds,
    }
    return GpuUse(
        trial=outcome.name,
        node=outcome.node,
        gpus=outcome.gpus,
        device=outcome.devices,
        started_at=begin,
        held=held,
        **parts,
        other=max(0.0, held - sum(parts.values())),
        shards=outcome.shards,
        ended=outcome.reason,
    )


def dead_trials_gpu_use(
    state: State,
    started: Mapping[Member, float],
    ended: Mapping[Member, tuple[float, str]],
    said: Collection[str],
    shards: Mapping[str, list[float]],
) -> Iterator[GpuUse]:
    """Yield trials that ran and ended without reporting. `said`: the others; `shards`: trial -> its shards' seconds.

    `started`, `ended`: unix seconds from the cluster, with its end state.
    """
    for trial in state.trials.by_name.values():
        member = trial.job, trial.member
        if trial.name in said or member not in started or member not in ended:
            continue
        at, word = ended[member]
        held, seconds = max(0.0, at - started[member]), shards.get(trial.name, [])
        infer = min(held, sum(seconds))
        yield GpuUse(
            trial=trial.name,
            node=LaneId.parse(trial.lane).node,
            gpus=state.record.options.trial.gpus_per_trial,
            device="",
            started_at=started[member],
            held=held,
            infer=infer,
            other=held - infer,
            shards=len(seconds),
            ended=word,
        )
