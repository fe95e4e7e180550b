"""What `evalspan init` finds out about a site: its partitions, and the settings that follow from them. Pure.

Rule: a setting is chosen only where the default would not do. Called by `coordinator.cli.tools`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

from coordinator.cluster import NodeState
from coordinator.cluster.daemon_job import slurm_time
from coordinator.config.schema import TrialConfig


def probe_of(
    nodes: Sequence[NodeState],
    preemptible: AbstractSet[str] = frozenset(),
    refusing: Mapping[str, str] = MappingProxyType({}),
    max_seconds: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, dict[str, tuple[Any, str]]]:
    """The site in a line, and setting ("cluster.partition") -> its value, and a note for the reader.

    The partition with most GPUs whose jobs keep them, and one of nodes without GPUs, if any; a time limit within MaxTime.
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
    shapes = Counter((node.gpus, node.gpu_type or "GPUs") for node in nodes if node.gpus)
    summary = ", ".join(f"{n} nodes with {each} {kind}" for (each, kind), n in shapes.most_common())
    chosen: dict[str, tuple[Any, str]] = {"cluster.kind": ("slurm", "")}
    if with_gpus:
        notes = dict.fromkeys(preemptible, ", jobs may be preempted")
        notes |= {name: f", refuses your jobs: {words}" for name, words in refusing.items()}
        best, *others = (f"{name} ({gpus[name]} GPUs{notes.get(name, '')})" for name in with_gpus + without)
        chosen["cluster.partition"] = (with_gpus[0], f"{best}; others: {', '.join(others) or 'none'}")
        # where every partition refuses, whatever the reason is, it is none of a partition
        every = refusing.keys() >= set(gpus)
        if taken := [name for name in without if every or name not in refusing]:
            chosen["cluster.cpu_partition"] = (taken[0], "")
        most = max_seconds.get(with_gpus[0])
        if most is not None and most < TrialConfig().time_limit_seconds:
            chosen["trial.time_limit"] = (slurm_time(most), f"MaxTime of partition {with_gpus[0]}")
    return summary or f"{len(nodes)} nodes without GPUs", chosen
