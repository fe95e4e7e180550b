"""A planning instance: a JSON file of data sets with uniform documents, for `plan` and `simulate`.

Rule: an unknown key or a wrong value is refused with its place.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.planning.batch_sums import Even
from coordinator.planning.model import UNLIMITED, Lane, Problem, WorkSet

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
