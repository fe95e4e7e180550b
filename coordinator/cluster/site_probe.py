"""What `evalspan init` finds out about a site: its partitions, and the settings that follow from them. Pure.

Rule: a setting is chosen only where the default would not do. Called by `coordinator.cli.tools`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from coordinator.cluster import NodeState
from coordinator.cluster.daemon_job import slurm_time
from coordinator.config.schema import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteProbe:
    """What the probe of the cluster found."""

    kind: Literal["local", "slurm"] = "local"
    partition: str | None = None
    cpu_partition: str | None = None
    summary: str = "one machine"  # a line for the reader, e.g. "4 nodes with 8 a100"
    partitions: tuple[str, ...] = ()  # each with its GPUs, e.g. "gpu (16 GPUs)", the chosen one first
    max_seconds: int | None = None  # MaxTime of `partition`; None: no limit
    gpu_request: str | None = None  # form that the site asks for; None: the default does
    account: str | None = None  # that jobs name; None: the site's default
    qos: str | None = None  # the same

    @property
    def choice(self) -> str:
        """The partition of jobs with GPUs, and the others, in a line; "" where none has GPUs."""
        if self.partition is None:
            return ""
        return f"{self.partitions[0]}; others: {', '.join(self.partitions[1:]) or 'none'}"

    def chosen(self) -> dict[str, tuple[str, str]]:
        """Setting ("cluster.partition") -> its value, and a note for the reader; none where the default does."""
        found = {
            "cluster.kind": (self.kind, ""),
            "cluster.partition": (self.partition, self.choice),
            "cluster.cpu_partition": (self.cpu_partition, ""),
            "cluster.account": (self.account, ""),
            "cluster.qos": (self.qos, ""),
            "slurm.gpu_request": (self.gpu_request, ""),
        }
        if self.max_seconds is not None and self.max_seconds < TrialConfig().time_limit_seconds:
            found["trial.time_limit"] = (
                slurm_time(self.max_seconds),
                f"MaxTime of partition {self.partition}",
            )
        return {setting: (value, note) for setting, (value, note) in found.items() if value is not None}


def probe_of(
    nodes: Sequence[NodeState],
    preemptible: AbstractSet[str] = frozenset(),
    refusing: Mapping[str, str] = MappingProxyType({}),
    max_seconds: Mapping[str, int] = MappingProxyType({}),
) -> SiteProbe:
    """The partition with most GPUs whose jobs keep them, and one of nodes without GPUs, if any.

    `preemptible`: partitions whose jobs may be preempted. `refusing`: those that take no job of this user, with Slurm's
    words. Of both, one is chosen where there is no other. `max_seconds`: partition -> MaxTime; no key: no limit.
    """
    gpus: Counter[str] = Counter()
    for node in nodes:
        for partition in node.partitions:
            gpus[partition] += node.gpus
    with_gpus = [name for name, count in gpus.most_common() if count]
    with_gpus.sort(key=lambda name: (name in refusing, name in preemptible))  # stable: by GPUs within each
    without = [name for name, count in sorted(gpus.items()) if not count]
    notes = dict.fromkeys(preemptible, ", jobs may be preempted")
    notes |= {name: f", refuses your jobs: {words}" for name, words in refusing.items()}
    shapes = Counter((node.gpus, node.gpu_type or "GPUs") for node in nodes if node.gpus)
    summary = ", ".join(f"{n} nodes with {each} {kind_}" for (each, kind_), n in shapes.most_common())
    chosen = with_gpus[0] if with_gpus else None
    taken = [name for name in without if name not in refusing]
    if refusing.keys() >= set(gpus):  # whatever the reason is, it is none of a partition
        taken = without
    for_cpus = taken[0] if with_gpus and taken else None
    return SiteProbe(
        kind="slurm",
        partition=chosen,
        cpu_partition=for_cpus,
        max_seconds=max_seconds.get(chosen or ""),
        summary=summary or f"{len(nodes)} nodes without GPUs",
        partitions=tuple(f"{name} ({gpus[name]} GPUs{notes.get(name, '')})" for name in with_gpus + without),
    )
