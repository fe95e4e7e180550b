"""Which request sets are on disk already: the lookup digest of a suite entry, and whether what lies there still holds.

Rule: the digest is over everything that the coordinator can see to decide a prompt or a token without building it:
the entry, the suite's settings, task folders, tokenizer and config bytes, model arguments, lm-eval's version. Local
data files that a task read are named in the set's manifest and compared here, so a changed file means a new build.
It does not know: how a request set is built.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from evaljobs.contract import (
    CheckpointFile,
    CheckpointSpec,
    EntryManifest,
    ModelOptions,
    RequestSetManifest,
    SuiteSpec,
)
from evaljobs.paths import batch_index_file, entry_manifest, request_set_manifest, slug

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def folder_name(
    suite: SuiteSpec, entry: int, checkpoint: CheckpointSpec, model: ModelOptions, lm_eval_version: str
) -> str:
    """Name of the folder that holds this entry's request sets. Reads config and tokenizer files; OSError if it cannot."""
    task = suite.tasks[entry]
    what = {
        "task": task.model_dump(mode="json"),
        "seed": suite.seed,
        "chat": suite.apply_chat_template,
        "system": suite.system_instruction,
        "multiturn": suite.fewshot_as_multiturn,
        "tasks": [_tree(Path(p)) for p in suite.include_path],
        "model": [
            _digest(Path(checkpoint.source) / f.name)
            for f in checkpoint.files
            if not f.name.endswith(WEIGHTS)
        ],
        "engine": model.engine,
        "args": model.model_args,
        "lm_eval": lm_eval_version,
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{slug(task.name)[:48]}-{digest}"


def _digest(path: Path) -> list[str]:
    return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]


def _tree(root: Path) -> list[list[str | int]]:
    """Every YAML and Python file below a task folder by content; of other files, size and time."""
    rows: list[list[str | int]] = []
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        name = str(path.relative_to(root))
        if path.suffix in (".yaml", ".yml", ".py"):
            rows.append([name, hashlib.sha256(path.read_bytes()).hexdigest()])
        else:
            stat = path.stat()
            rows.append([name, stat.st_size, stat.st_mtime_ns])
    return rows


def found(folder: Path, batch_size: int | str) -> dict[str, str] | None:
    """Leaf task -> folder where a whole, unchanged set with batches of this size lies; None where one must be built."""
    try:
        entry = EntryManifest.model_validate_json(entry_manifest(folder).read_bytes())
    except (OSError, ValidationError):
        return None
    sets = {task: str(folder / relative) for task, relative in entry.sets.items()}
    for place in sets.values():
        try:
            manifest = RequestSetManifest.model_validate_json(request_set_manifest(place).read_bytes())
        except (OSError, ValidationError):
            return None
        if not _unchanged(manifest.data_files):
            return None
        if isinstance(batch_size, int) and not batch_index_file(place, batch_size).exists():
            return None
    return sets


def _unchanged(files: Iterable[CheckpointFile]) -> bool:
    for file in files:
        try:
            stat = Path(file.name).stat()
        except OSError:
            return False
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            return False
    return True
