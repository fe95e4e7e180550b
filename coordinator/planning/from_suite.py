"""Makes a planning instance from a suite and a model's size, for `evalspan plan --suite`.

Rule: tokens come from the suite's prepared request sets, else from the shipped table of data sets.
A task in neither is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.errors import OperatorError
from coordinator.evaluation.records import TOKEN_BUDGET, cut_of, cut_on_disk
from coordinator.planning.make_plan import BYTES_PER_PARAMETER, SHARD_OVERHEAD_SECONDS
from evaljobs.contract.names import Cut
from evaljobs.contract.specs import BatchIndex, RequestSetManifest, SuiteSpec, TaskEntry
from priors import sizes
from priors.estimate import Features, Learnt, predict_batches, predict_load, predict_metric
from priors.hardware import NOMINAL, memory_bytes, nominal
from priors.table import Observation

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
BATCH_SIZE = 16  # where a suite's is "auto"
WORKING_SHARE = 0.1  # of the weights' memory, for activations and the key-value cache
BYTES_PER_SECOND = 3.1e9  # bytes per second of a 25 Gb/s storage NIC


def parameters(text: str) -> int:
    """Parameters of a model size such as "7b", "135M" or "7000000000"; else OperatorError."""
    unit = UNITS.get(text[-1:].lower())
    try:
        count = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count < math.inf:
        raise OperatorError(f'--model-size is a number of parameters such as "7b" or "135M", not {text!r}')
    return int(count)


def check_hardware(hardware: str, history: Sequence[Observation]) -> None:
    """OperatorError for a type without data-sheet figures and without a run of it."""
    seen = {one.hardware for one in history}
    if hardware != "cpu" and nominal(hardware) is None and hardware not in seen:
        names = ", ".join(["cpu", *sorted(NOMINAL), *sorted(seen - NOMINAL.keys() - {"cpu"})])
        raise OperatorError(
            f"nothing is known of --hardware {hardware!r}; known types, also as part of a longer name: {names}. A type of your "
            "own is known once an evaluation ran on it with this work folder (`evalspan priors show`)"
        )


def gpus_per_trial(model_parameters: int, hardware: str, gpus_per_node: int) -> int:
    """GPUs that hold the model's weights and WORKING_SHARE of them again: the least power of two.

    1 where the type's memory is unknown. OperatorError where no node has as many.
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


def cut(suite: SuiteSpec, entry: int) -> str:
    """The cut of an entry's batches as files are named, with BATCH_SIZE where the suite's own is found by a trial."""
    size = suite.batch_size if isinstance(suite.batch_size, int) else BATCH_SIZE
    budget = suite.token_budget if isinstance(suite.token_budget, int) else TOKEN_BUDGET
    return cut_on_disk(cut_of(suite, entry, size, budget), size)


def instance(
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
    """A planning instance (JSON-able). `sets`: prepared entry -> {leaf task: its request set}.

    A trial on several GPUs counts as one GPU of the instance, at one GPU's speed.
    """
    if gpus_per_trial > gpus_per_node:
        raise OperatorError(
            f"[trial] gpus_per_trial is {gpus_per_trial}, and a node has {gpus_per_node} GPUs: give more --gpus-per-node"
        )
    learnt = Learnt(history)
    rows = []
    for at, task in enumerate(suite.tasks):
        cut_at = cut(suite, at)
        for name, prefill, generated, documents, executes in _tokens(task, sets.get(task.name), cut_at):
            features = Features(
                task=name,
                model_parameters=model_parameters,
                hardware=hardware,
                engine=engine,
                batch_size=Cut.parse(cut_at).batch_size,
                mode=suite.mode or "exact",
            )
            predicted = predict_batches(features, prefill, generated, learnt)
            metric = predict_metric(name, documents, executes, learnt)
            rows.append(
                {
                    "name": name,
                    "docs": documents,
                    "gpu_seconds": max(sum(predicted.seconds), 1e-3),
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
    """(name, prefill tokens, capped generated tokens, documents, executes) of each leaf of an entry."""
    if prepared is not None:
        return [
            (name, index.prefill_tokens, index.generated_tokens, manifest.documents, manifest.executes)
            for name, (manifest, index) in prepared.items()
        ]
    known = sizes.known(task.name)
    if known is None:
        raise OperatorError(
            f"nothing is known of {task.name}: `evalspan prepare` the suite and give --tokenizer, so that its requests count"
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
