"""Finds request sets on disk: the lookup digest of a suite entry, and whether a whole set is there.

Rule: the digest covers all inputs that decide a prompt or a token and are visible without a build:
the entry, the suite's settings, its source key (`intake.source_keys`), tokenizer and config bytes,
model arguments, lm-eval's version.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from coordinator.evaluation.records import Inputs
from evaljobs.contract.paths import batch_index_file, entry_manifest, request_set_manifest, slug
from evaljobs.contract.specs import (
    CheckpointSpec,
    EntryManifest,
    ModelOptions,
    RequestSetManifest,
    SuiteSpec,
)

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def folder_name(
    suite: SuiteSpec, entry: int, checkpoint: CheckpointSpec, model: ModelOptions, inputs: Inputs
) -> str:
    """Name of the folder of this entry's request sets. Reads config and tokenizer files; OSError."""
    task = suite.tasks[entry]
    what = {
        "task": task.model_dump(mode="json"),
        "seed": suite.seed,
        "chat": suite.apply_chat_template,
        "system": suite.system_instruction,
        "multiturn": suite.fewshot_as_multiturn,
        "sources": inputs.entries[entry].model_dump(mode="json"),
        "model": [
            _digest(Path(checkpoint.source) / f.name)
            for f in checkpoint.files
            if not f.name.endswith(WEIGHTS)
        ],
        "engine": model.engine,
        "args": model.model_args,
        "lm_eval": inputs.lm_eval,
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{slug(task.name)[:48]}-{digest}"


def _digest(path: Path) -> list[str]:
    return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]


def found(folder: Path, batch_size: int | str) -> dict[str, str] | None:
    """Leaf task -> folder of a whole set with batches of this size; None where one must be built."""
    try:
        entry = EntryManifest.model_validate_json(entry_manifest(folder).read_bytes())
    except (OSError, ValidationError):
        return None
    sets = {task: str(folder / relative) for task, relative in entry.sets.items()}
    for place in sets.values():
        try:
            RequestSetManifest.model_validate_json(request_set_manifest(place).read_bytes())
        except (OSError, ValidationError):
            return None
        if isinstance(batch_size, int) and not batch_index_file(place, batch_size).exists():
            return None
    return sets
