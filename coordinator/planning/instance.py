"""A planning instance: a JSON file of data sets with uniform documents, and its plans on its own and other nodes.

Rule: an unknown key or a wrong value is refused with its place. Called by `evalspan plan` and the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.planning.lower_bound import bound
from coordinator.planning.model import UNLIMITED, Even, Lane, Plan, Problem, WorkSet
from coordinator.planning.planner import PLANNERS

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


class DataSet(BaseModel):
    """One data set. `labels`: choices scored per document, 0 for generation; None: looked up by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1)
    docs: int = Field(ge=1, le=10**9)
    gpu_seconds: Seconds
    metric_seconds: Seconds = 0.0
    metric: Literal["score", "execute"] = "score"
    metric_parallelism: int = Field(default=UNLIMITED, ge=1)
    sigma: Spread = 0.3
    labels: int | None = Field(default=None, ge=0, le=4000)

    def work(self) -> WorkSet:
        """The set with one document per batch."""
        return WorkSet(
            name=self.name,
            batch_seconds=Even(each=self.gpu_seconds / self.docs, number=self.docs),
            metric_seconds=self.metric_seconds,
            metric=self.metric,
            metric_parallelism=self.metric_parallelism,
            sigma=self.sigma,
        )


class Instance(BaseModel):
    """GPUs, CPU slots, fixed costs in seconds, and data sets. All policies pay load and overhead only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: Literal[1]
    gpus: int = Field(ge=1, le=1_000_000)
    gpus_per_node: int = Field(ge=1)
    cpu_slots: int = Field(ge=1)
    load_seconds: Seconds
    shard_overhead_seconds: Seconds = 0.0
    storage_seconds_alone: Seconds = 0.0
    staging_seconds: Seconds = 0.0
    preprocess_seconds: Seconds = 0.0
    datasets: tuple[DataSet, ...] = Field(strict=False, min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Instance:
        seen: set[str] = set()
        for index, data_set in enumerate(self.datasets):
            if data_set.name in seen:
                raise ValueError(f"datasets[{index}]: the name {data_set.name!r} stands twice")
            seen.add(data_set.name)
        return self

    def lanes(self, gpus: int | None = None) -> list[Lane]:
        """One lane per GPU, nodes filled in order."""
        return [
            Lane(name=f"gpu{index}", node=f"node{index // self.gpus_per_node}")
            for index in range(self.gpus if gpus is None else gpus)
        ]

    def sets(self) -> list[WorkSet]:
        return [data_set.work() for data_set in self.datasets]

    def problem(self) -> Problem:
        return Problem(
            self.sets(),
            self.lanes(),
            load_seconds=self.load_seconds,
            shard_overhead_seconds=self.shard_overhead_seconds,
            cpu_slots=self.cpu_slots,
            stage_seconds=self.staging_seconds,
        )


def parse_instance(text: str) -> Instance:
    """The instance in a JSON text; ValueError naming the line (no JSON) or the field (no instance)."""
    try:
        return Instance.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(part if str(part).isprintable() else repr(part) for part in map(str, first["loc"]))
        raise ValueError(f"{place or 'instance'}: {first['msg']}") from error
    except RecursionError as error:
        raise ValueError("instance: nested too deeply") from error


def plan_instance(json_text: str) -> dict[str, Any]:
    """The plan: each document is in exactly one shard of one GPU's lane, in the order of its run."""
    instance = parse_instance(json_text)
    planned = plan_of(instance, "evalspan")
    return {
        "schema_version": 1,
        "lower_bound_seconds": planned.lower_bound_seconds,
        "planned_makespan_seconds": planned.makespan_seconds,
        "lanes": [
            {
                "gpu": gpu,
                "shards": [
                    {"dataset": shard.set, "start_doc": shard.first_batch, "end_doc": shard.end_batch}
                    for shard in lane.shards
                ],
            }
            for gpu, lane in enumerate(planned.lanes)
        ],
    }


def what_if(json_text: str, nodes: Sequence[int] | None = None) -> dict[str, Any]:
    """A row per node count (by default powers of two up to four times the instance's) and a summary.

    CPU slots grow with nodes, as GPUs do. `binding`: the term of the bound that limits the makespan.
    """
    instance = parse_instance(json_text)
    here = max(1, -(-instance.gpus // instance.gpus_per_node))
    if nodes is None:
        nodes = [1 << power for power in range((4 * here).bit_length())]
    if not nodes or min(nodes) < 1:
        raise ValueError("node counts start at 1")
    rows: list[dict[str, Any]] = []
    for count in nodes:
        gpus = count * instance.gpus_per_node
        slots = max(1, int(count * instance.cpu_slots / here))
        resized = instance.model_copy(update={"gpus": gpus, "cpu_slots": slots})
        floor = bound(resized.problem())
        rows.append(
            {
                "nodes": count,
                "gpus": gpus,
                "planned_makespan_seconds": plan_of(resized, "evalspan").makespan_seconds,
                "lower_bound_seconds": floor.seconds,
                "binding": floor.binding,
            }
        )
    return {"schema_version": 1, "rows": rows, "sentence": _sentence(rows)}


def _sentence(rows: Sequence[dict[str, Any]]) -> str:
    """`4 nodes: 26 min; 8 nodes: 15 min; with more than 4 nodes the limit is the tail of X, not GPU time`."""
    parts = [f"{_nodes(row['nodes'])}: {_duration(row['planned_makespan_seconds'])}" for row in rows]
    ordered = sorted(rows, key=lambda row: row["nodes"])
    for before, row in zip([None, *ordered], ordered, strict=False):
        if row["binding"] != "GPU time":
            least = f"more than {_nodes(before['nodes'])}" if before else f"{_nodes(row['nodes'])} or more"
            return "; ".join([*parts, f"with {least} the limit is {row['binding']}, not GPU time"])
    return "; ".join(parts)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def plan_of(instance: Instance, planner: str) -> Plan:
    """The instance planned by the policy of this name in `PLANNERS`."""
    return PLANNERS[planner](instance.problem())
