"""Planning instances: a JSON file of data sets with uniform documents, its plans on its own and other nodes; or one made from
a suite.

Rule: unknown keys and wrong values are refused with their location. Tokens of a suite come from its prepared request sets,
otherwise from the shipped table of data sets; a task in neither is refused by name. Called by `evalspan plan` and the
simulator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.decide.evaluation.records import TOKEN_BUDGET, cut_of, cut_on_disk
from coordinator.decide.planning.lower_bound import plan_bound
from coordinator.decide.planning.make_plan import BYTES_PER_PARAMETER, SHARD_OVERHEAD_SECONDS
from coordinator.decide.planning.model import UNLIMITED, Even, Lane, Plan, Problem, WorkSet
from coordinator.decide.planning.planner import PLANNERS
from coordinator.decide.verdicts.screening import likely_share
from coordinator.errors import OperatorError
from evaljobs.contract.names import Cut
from evaljobs.contract.specs import BatchIndex, RequestSetManifest, ScreenOptions, SuiteSpec, TaskEntry
from priors import sizes
from priors.estimate import Features, PriorHistory, predict_batches, predict_load, predict_metric
from priors.hardware import NOMINAL_RATES, memory_bytes, nominal_rates
from priors.table import Observation

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
LogSpread = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


class DataSet(BaseModel):
    """One data set. `labels`: choices scored per document, 0 for generation; None: looked up by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1)
    docs: int = Field(ge=1, le=10**9)
    gpu_seconds: Seconds
    metric_seconds: Seconds = 0.0
    metric: Literal["score", "execute"] = "score"
    metric_parallelism: int = Field(default=UNLIMITED, ge=1)
    sigma: LogSpread = 0.3
    labels: int | None = Field(default=None, ge=0, le=4000)

    def work(self) -> WorkSet:
        """Return the set with one document per batch."""
        return WorkSet(
            name=self.name,
            batch_seconds=Even(each=self.gpu_seconds / self.docs, number=self.docs),
            metric_seconds=self.metric_seconds,
            metric=self.metric,
            metric_parallelism=self.metric_parallelism,
            sigma=self.sigma,
        )


class Instance(BaseModel):
    """GPUs, CPU slots, fixed costs in seconds, and data sets. All policies pay only load and overhead."""

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
                raise ValueError(f"datasets[{index}]: the name {data_set.name!r} appears twice")
            seen.add(data_set.name)
        return self

    def lanes(self, gpus: int | None = None) -> list[Lane]:
        """Return one lane per GPU, nodes filled in order."""
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
    """Parse the instance in a JSON text. Raise ValueError that names the line (invalid JSON) or the field."""
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
    """Return the plan: each document is in exactly one shard of one GPU's lane, in execution order."""
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
    """Return a row per node count (by default powers of two up to four times the instance's) and a summary.

    CPU slots scale with nodes, like GPUs. `binding`: the term of the bound that limits the makespan.
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
        floor = plan_bound(resized.problem())
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
    """Return the instance's plan under the policy of this name in `PLANNERS`."""
    return PLANNERS[planner](instance.problem())


# --- of a suite ----------------------------------------------------------------------------------------------------

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
BATCH_SIZE = 16  # if the suite says "auto"
WORKING_SHARE = 0.1  # share of the weights' memory for activations and the key-value cache
BYTES_PER_SECOND = 3.1e9  # of a 25 Gb/s storage NIC


def parse_parameters(text: str) -> int:
    """Parse a model size such as "7b", "135M" or "7000000000" as a number of parameters. Raise OperatorError."""
    unit = UNITS.get(text[-1:].lower())
    try:
        count = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count < math.inf:
        raise OperatorError(f'--model-size is a number of parameters such as "7b" or "135M", not {text!r}')
    return int(count)


def check_hardware(hardware: str, history: Sequence[Observation]) -> None:
    """Raise OperatorError for a type with neither data-sheet figures nor a run."""
    seen = {one.hardware for one in history}
    if hardware != "cpu" and nominal_rates(hardware) is None and hardware not in seen:
        names = ", ".join(["cpu", *sorted(NOMINAL_RATES), *sorted(seen - NOMINAL_RATES.keys() - {"cpu"})])
        raise OperatorError(
            f"--hardware {hardware!r} is unknown; known types, also as part of a longer name: {names}. A type of your "
            "own is known once an evaluation ran on it with this work folder (`evalspan priors show`)"
        )


def gpus_per_trial(model_parameters: int, hardware: str, gpus_per_node: int) -> int:
    """Return the GPUs that hold the model's weights plus WORKING_SHARE: the least power of two.

    1 if the type's memory is unknown. Raise OperatorError if no node has as many.
    """
    memory = memory_bytes(hardware)
    if memory is None:
        return 1
    size = model_parameters * BYTES_PER_PARAMETER
    count = 1
    while count * memory < size * (1 + WORKING_SHARE):
        count *= 2
    if count > gpus_per_node:
        raise OperatorError(
            f"weights of {size / 1e9:.0f} GB do not fit {gpus_per_node} GPUs of {memory / 1e9:.0f} GB, and a trial stays on one "
            "node: give more --gpus-per-node, other --hardware or a smaller --model-size"
        )
    return count


def cut_name(suite: SuiteSpec, entry: int) -> str:
    """Return the cut of an entry's batches as in file names, with BATCH_SIZE if a trial would find the suite's own."""
    size = suite.batch_size if isinstance(suite.batch_size, int) else BATCH_SIZE
    budget = suite.token_budget if isinstance(suite.token_budget, int) else TOKEN_BUDGET
    return cut_on_disk(cut_of(suite, entry, size, budget), size)


def instance_of_suite(
    suite: SuiteSpec,
    sets: Mapping[str, Mapping[str, tuple[RequestSetManifest, BatchIndex]]],
    history: Sequence[Observation],
    *,
    nodes: int,
    gpus_per_node: int,
    cpu_slots: int,
    model_parameters: int,
    hardware: str,
    engine: str,
    gpus_per_trial: int = 1,
) -> dict[str, Any]:
    """Return a JSON-able planning instance. `sets`: prepared entry -> {leaf task: its request set}.

    A trial on several GPUs counts as one GPU of the instance, at the speed of one.
    """
    if gpus_per_trial > gpus_per_node:
        raise OperatorError(
            f"[trial] gpus_per_trial is {gpus_per_trial}, and a node has {gpus_per_node} GPUs: give more --gpus-per-node"
        )
    learnt = PriorHistory(history)
    rows = []
    question = suite.screen or ScreenOptions()
    for at, task in enumerate(suite.tasks):
        cut_at = cut_name(suite, at)
        leaves = _tokens(task, sets.get(task.name), cut_at)
        # of its documents that are likely to be asked
        share = likely_share(sum(leaf[3] for leaf in leaves), question) if suite.mode == "screen" else 1.0
        for name, prefill, generated, documents, executes in leaves:
            features = Features(
                task=name,
                model_parameters=model_parameters,
                hardware=hardware,
                engine=engine,
                batch_size=Cut.parse(cut_at).batch_size,
                mode=suite.computes,
            )
            predicted = predict_batches(features, prefill, generated, learnt)
            metric = predict_metric(name, documents, executes, learnt)
            rows.append(
                {
                    "name": name,
                    "docs": documents,
                    "gpu_seconds": max(share * sum(predicted.seconds), 1e-3),
                    "metric_seconds": metric.seconds,
                    "metric": "execute" if executes else "score",
                    **({"metric_parallelism": metric.at_once} if metric.at_once is not None else {}),
                    "sigma": predicted.sigma,
                }
            )
    size = model_parameters * BYTES_PER_PARAMETER
    return {
        "schema_version": 1,
        "gpus": nodes * (gpus_per_node // gpus_per_trial),
        "gpus_per_node": gpus_per_node // gpus_per_trial,
        "cpu_slots": cpu_slots * nodes,
        "load_seconds": predict_load(size, hardware, learnt).seconds,
        "shard_overhead_seconds": SHARD_OVERHEAD_SECONDS,
        "staging_seconds": size / BYTES_PER_SECOND,
        "datasets": rows,
    }


def _tokens(
    task: TaskEntry, prepared: Mapping[str, tuple[RequestSetManifest, BatchIndex]] | None, cut: str
) -> list[tuple[str, Sequence[int], Sequence[int], int, bool]]:
    """Return (name, prefill tokens, capped generated tokens, documents, executes) of each leaf of an entry."""
    if prepared is not None:
        return [
            (name, index.prefill_tokens, index.generated_tokens, manifest.documents, manifest.executes)
            for name, (manifest, index) in prepared.items()
        ]
    known = sizes.known_size(task.name)
    if known is None:
        raise OperatorError(
            f"the size of {task.name} is unknown: run `evalspan prepare` for the suite and pass --tokenizer, so that its requests count"
        )
    limit = task.limit
    documents = known.documents
    if limit is not None:
        documents = max(1, min(documents, int(limit) if limit >= 1 else int(documents * limit)))
    # fast mode computes a prompt once for all of its labels
    shared = known.labels and Cut.parse(cut).token_budget is not None
    prefill = int(known.prompt_tokens) * (1 if shared else max(1, known.labels))
    generated = 0 if known.labels else int(known.max_generated_tokens)
    return [
        (
            task.name,
            [prefill] * documents,
            [generated] * documents,
            documents,
            known.kind in ("code", "judge"),
        )
    ]
