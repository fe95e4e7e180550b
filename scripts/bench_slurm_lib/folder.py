"""What an evaluation of drawn sets finds on disk: a checkpoint, request sets, observations of earlier checkpoints.

Rule: files of the real formats, made without lm-eval. A batch is one request, of a document of its own, whose text is
its true seconds; the planner sees tokens that are in proportion to the predicted ones, and a history that says how long those took.
It does not know: Slurm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from bench_slurm_lib.portfolio import Set
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import Inputs
from coordinator.intake import request_sets
from coordinator.intake.checkpoint import inspect
from coordinator.planning.make_plan import BYTES_PER_PARAMETER
from evaljobs.contract.paths import batch_file, batch_index_file, entry_manifest, request_set_manifest
from evaljobs.contract.specs import (
    BatchIndex,
    CheckpointSpec,
    EntryManifest,
    ModelOptions,
    Record,
    RequestSetManifest,
    SuiteSpec,
    TaskEntry,
)
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.batches import Batch, Piece, encode_batch
from priors.table import Observation, append

ENGINE = "synthetic"
HARDWARE = "a100"
TOKENS_A_SECOND = 100_000
EARLIER = 3
"""Checkpoints that were evaluated before, each with exactly the predicted seconds."""


def write_checkpoint(folder: Path, megabytes: int) -> CheckpointSpec:
    """A checkpoint as the precursor takes it: weights of so many MB, a config, a tokenizer."""
    folder.mkdir(parents=True)
    size = megabytes << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + os.urandom(1 << 20) * megabytes
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return inspect(folder)


def suite_of(sets: Sequence[Set]) -> SuiteSpec:
    tasks = tuple(TaskEntry(name=one.name) for one in sets)
    return SuiteSpec(name="portfolio63", batch_size=1, tasks=tasks)


def write_request_sets(
    sets: Sequence[Set],
    suite: SuiteSpec,
    checkpoint: CheckpointSpec,
    model: ModelOptions,
    *,
    site: Site,
    inputs: Inputs,
) -> None:
    """Every entry's set where the coordinator will look for it."""
    for index, one in enumerate(sets):
        name = request_sets.folder_name(suite, index, checkpoint, model, inputs)
        _write_set(one, site.paths.request_sets / name)


def _write_set(one: Set, folder: Path) -> None:
    place = folder / "set"
    place.mkdir(parents=True)
    lines = [encode_batch(_batch(number, seconds)) for number, seconds in enumerate(one.seconds)]
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    batch_file(place, 1).write_bytes(b"".join(lines))
    index = BatchIndex(
        task=one.name,
        key=one.name,
        batch_size=1,
        offsets=tuple(offsets),
        requests=(1,) * len(lines),
        prefill_tokens=tuple(round(seconds * TOKENS_A_SECOND) for seconds in one.predicted),
        generated_tokens=(0,) * len(lines),
        documents=tuple((number,) for number in range(len(lines))),
    )
    manifest = RequestSetManifest(
        task=one.name,
        key=one.name,
        output_type="generate_until",
        executes=one.executes,
        documents=len(lines),
        requests=len(lines),
        prompt_tokens=sum(index.prefill_tokens),
        generation_cap_tokens=0,
    )
    _write(batch_index_file(place, 1), index)
    _write(request_set_manifest(place), manifest)
    _write(entry_manifest(folder), EntryManifest(entry=one.name, sets={one.name: "set"}))


def _batch(number: int, seconds: float) -> Batch:
    piece = Piece(kind="generate_until", index=number, document=number, context=f"{seconds:.6f}")
    return Batch(kind="generate_until", text=True, settings={}, pieces=[piece])


def _write(path: Path, record: Record) -> None:
    write_atomic(path, record.model_dump_json().encode())


def write_history(
    sets: Sequence[Set], checkpoint: CheckpointSpec, observations: Path, *, load_seconds: float
) -> None:
    """What the predicted seconds were learnt from."""
    append(
        observations,
        [
            Observation(
                task=one.name,
                key=one.name,
                model_parameters=checkpoint.bytes // BYTES_PER_PARAMETER,
                hardware=HARDWARE,
                engine=ENGINE,
                batch_size=1,
                prefill_tokens=sum(round(seconds * TOKENS_A_SECOND) for seconds in one.predicted),
                generated_tokens=0,
                documents=len(one.seconds),
                inference_seconds=sum(one.predicted),
                metric_seconds=one.metric_predicted,
                load_seconds=load_seconds,
                at=float(number),
            )
            for number in range(EARLIER)
            for one in sets
        ],
    )


def write_metrics(sets: Sequence[Set], folder: Path) -> None:
    """What the synthetic metrics read."""
    metrics = {
        one.name: {
            "seconds": one.metric_seconds,
            "docs": len(one.seconds),
            "executes": one.executes,
            "alone": one.alone,
        }
        for one in sets
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
