"""Rows of the quickstart tasks, read from the files beside this one.

Rule: paths are relative to this file, so the tasks work from any folder and installation, with
`lm_eval --include_path` as with evalspan. Nothing is written: no data set cache, no hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def load(*, data_files: dict[str, str], **_metadata: Any) -> dict[str, datasets.Dataset]:
    """Load the data set of a task: split name -> rows of a JSON-lines file, named relative to this folder.

    lm-eval passes a task's `metadata` and `dataset_kwargs` (`custom_dataset`, lm_eval/api/task.py).
    """
    return {split: datasets.Dataset.from_list(_read(HERE / name)) for split, name in data_files.items()}


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
