"""The shipped table of common data sets: documents, tokens, and metric seconds, by lm-eval task name.

Rule: the table is read once and never written; its `max_gen_tokens` is a cap, not a mean.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TaskSize(BaseModel):
    """A row: mean prompt tokens per document, cap of generated tokens, metric seconds of the data set."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(alias="dataset")
    tasks: str = Field(alias="lm_eval_tasks")  # lm-eval's names, if different
    kind: Literal["ppl", "gen", "code", "judge"]
    documents: int = Field(alias="docs")
    choices: int
    prompt_tokens: float = Field(alias="avg_prompt_tokens")
    max_generated_tokens: float = Field(alias="max_gen_tokens")
    metric_seconds: float = Field(alias="metric_seconds_estimate")

    @property
    def labels(self) -> int:
        """Choices scored per document; 0 for generation."""
        return self.choices if self.kind == "ppl" else 0


@cache
def size_table() -> dict[str, TaskSize]:
    """Return every row, by the table's name and by lm-eval's."""
    text = files("priors").joinpath("data/dataset_sizes.csv").read_text(encoding="utf-8")
    rows = [TaskSize.model_validate(row) for row in csv.DictReader(text.splitlines())]
    return {name: row for row in rows for name in (row.name, *row.tasks.split())}


def known_size(task: str) -> TaskSize | None:
    """Return the row of a task: by lm-eval's name, the table's name, or the name of the task's group."""
    parts = task.split("_")
    names = ("_".join(parts[:length]) for length in range(len(parts), 0, -1))  # `mmlu_anatomy`, then `mmlu`
    return next((row for name in names if (row := size_table().get(name))), None)
