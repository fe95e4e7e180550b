"""Rows of the quickstart tasks, read from the files beside this one.

Rule: paths are relative to this file, so the tasks work from any folder and installation, with
`lm_eval --include_path` as with evalspan. Nothing is written: no data set cache, no hub.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def load(*, data_files: dict[str, str], **_metadata: Any) -> dict[str, datasets.Dataset]:
    """Data set of a task: split name -> rows of a JSON-lines file, named relative to this folder.

    lm-eval hands over a task's `metadata` and `dataset_kwargs` (`custom_dataset`,
    lm_eval/api/task.py).
    """
    return {split: datasets.Dataset.from_list(_read(HERE / name)) for split, name in data_files.items()}


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def hellaswag(rows: datasets.Dataset) -> datasets.Dataset:
    """Query, choices and gold index as lm-eval's own `hellaswag` task makes them
    (tasks/hellaswag/utils.py).
    """
    return rows.map(_hellaswag)


def _hellaswag(row: dict[str, Any]) -> dict[str, Any]:
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {
        "query": _clean(f"{row['activity_label']}: {context}"),
        "choices": [_clean(ending) for ending in row["endings"]],
        "gold": int(row["label"]),
    }


def _clean(text: str) -> str:
    # WikiHow rows carry "[title]" marks and other bracketed remains.
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
