"""GPU names of nodes whose Gres in Slurm has no type: jobs on the nodes report them, the work folder keeps them.

Rule: a name is only used for predictions. GPU requests and [nodes] gpu_types go by Gres alone. Called by the loop for each
listing of nodes, and at an evaluation's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from coordinator.decide.evaluation.state import State
from coordinator.site.cluster import NodeState
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import read_record, write_record


class GpuNames(StateRecord):
    """`gpu_names.json`: node -> name of its GPUs, e.g. "NVIDIA A100-SXM4-80GB"."""

    schema_version: int = 1
    names: Mapping[str, str]


def read_gpu_names(path: Path) -> Mapping[str, str]:
    """Read node -> GPU name; empty if the file is missing or of another version. Raise OSError if storage fails."""
    try:
        return read_record(path, GpuNames).names
    except (FileNotFoundError, ValidationError):
        return {}


def record_gpu_names(path: Path, state: State) -> None:
    """Add the names reported by an evaluation's jobs. Raise OSError if the disk refuses."""
    known = read_gpu_names(path)
    found = {n.name: n.gpu_name for n in state.nodes.by_name.values() if n.gpu_name}
    if not found.items() <= known.items():
        write_record(path, GpuNames(names={**known, **found}))


def with_types(nodes: Iterable[NodeState], names: Mapping[str, str]) -> list[NodeState]:
    """Return the nodes, with the GPU name as type if Gres has no type."""
    return [replace(n, gpu_type=n.gpu_type or names.get(n.name, "")) if n.gpus else n for n in nodes]
