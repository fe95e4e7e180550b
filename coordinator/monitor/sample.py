"""What the metrics of a daemon are computed from: counts over its evaluations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.evaluation.state import Phase, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counts of one moment, by label."""

    phases: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    jobs: Mapping[str, int] = field(default_factory=dict)
    metric_jobs: int = 0  # given to RQ, without an outcome
    oldest_seconds: float = 0.0  # since the oldest open evaluation was accepted


PHASES = (*(phase.name.lower() for phase in Phase if phase is not Phase.ENDED), "parked", "pending")
SHARDS = ("to do", "done", "quarantined")
NODES = ("offered", "staging", "ready", "back-off", "withdrawn")
JOBS = ("build", "convert", "stage", "trial", "host", "metric")


def sample(states: Iterable[State], *, parked: int, pending: int, now: float) -> Sample:
    """`states`: of the evaluations that run; `pending`: checkpoints not accepted yet; `now`: unix seconds."""
    phases: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
    shards: Counter[str] = Counter(dict.fromkeys(SHARDS, 0))
    nodes: Counter[str] = Counter(dict.fromkeys(NODES, 0))
    jobs: Counter[str] = Counter(dict.fromkeys(JOBS, 0))
    oldest, outstanding = 0.0, 0
    for state in states:
        if state.ended_at is not None:
            continue
        phases[state.ending.phase.name.lower()] += 1
        of = len(state.shards.by_name)
        quarantined = sum(s.quarantined for s in state.shards.by_name.values())
        shards.update(
            {
                "to do": state.shards.todo,
                "quarantined": quarantined,
                "done": of - state.shards.todo - quarantined,
            }
        )
        nodes.update(n.status for n in state.nodes.by_name.values())
        jobs.update({purpose: len(each) for purpose, each in state.index.jobs.items()})
        outstanding += len(state.scoring.outstanding)
        oldest = max(oldest, now - state.record.accepted_at)
    phases.update({"parked": parked, "pending": pending})
    return Sample(
        phases=phases, shards=shards, nodes=nodes, jobs=jobs, metric_jobs=outstanding, oldest_seconds=oldest
    )
