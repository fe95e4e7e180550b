"""Few-shot tasks over local rows, with lm-eval's own prompts: each with lm-eval's own shots and with fixed ones.

lm-eval's own sampler draws other examples for each document; a fixed sampler (`first_n`) takes the same for all. MMLU's
own sampler is fixed. lm-eval takes examples from the train splits of HellaSwag, ARC and WinoGrande, which are not at
hand here: examples come from the rows themselves, and of ARC-Challenge from those of ARC-Easy.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from lm_eval import tasks

ARC_TRAIN_ROWS = 1119  # of ARC-Challenge: as many examples to draw from
YAML = Path(tasks.__file__).parent
# task -> its shots, the files of its rows and of its examples, lm-eval's own YAML file
TASKS: dict[str, tuple[int, str, str, str]] = {
    "hellaswag": (5, "hellaswag_val", "hellaswag_val", "hellaswag/hellaswag.yaml"),
    "arc_challenge": (25, "arc_challenge_test", "arc_easy_test", "arc/arc_challenge.yaml"),
    "winogrande": (5, "winogrande_val", "winogrande_val", "winogrande/default.yaml"),
    "mmlu": (5, "mmlu_val", "mmlu_dev", "mmlu/default/_default_template_yaml"),
}
# ARC's rows here hold the question as its prompt, the choices and the number of the right one
ARC = 'doc_to_text: "{{query}}"\ndoc_to_choice: choices\ndoc_to_target: gold\nshould_decontaminate: false'
TASK = """\
include: {include}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {files}}}
training_split: null
validation_split: null
test_split: test
fewshot_split: train
num_fewshot: {shots}
fewshot_config: {{sampler: {sampler}}}
{fields}
"""
Rows = list[dict[str, Any]]


def names(task: str) -> dict[str, str]:
    """Sampler -> the name of the task or group that has it."""
    return {"first_n": f"few_{task}_fixed"} | ({} if task == "mmlu" else {"default": f"few_{task}_own"})


def write(data: Path, folder: Path, limit: int | None) -> None:
    """Rows and YAML files of all tasks. `data`: NAME.jsonl.gz; `limit`: rows of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, (shots, asked, shown, file) in TASKS.items():
        rows, examples = _rows(data / f"{asked}.jsonl.gz")[:limit], _rows(data / f"{shown}.jsonl.gz")
        if task == "arc_challenge":
            examples = examples[:ARC_TRAIN_ROWS]
        for sampler, name in names(task).items():
            how = {"shots": shots, "sampler": sampler, "include": YAML / file}
            if task != "mmlu":
                _write_task(folder, name, rows, examples, fields=ARC if "arc" in task else "", **how)
                continue
            subjects = sorted({row["subject"] for row in rows})  # a task of each, and their group
            (folder / f"{name}.yaml").write_text(
                json.dumps({"group": name, "task": [f"{name}_{each}" for each in subjects]})
            )
            for each in subjects:
                own, known = ([row for row in part if row["subject"] == each] for part in (rows, examples))
                told = f"The following are multiple choice questions (with answers) about {each.replace('_', ' ')}."
                said = f"description: {json.dumps(told + chr(10) * 2)}"
                _write_task(folder, f"{name}_{each}", own, known, fields=said, **how)


def _rows(place: Path) -> Rows:
    with gzip.open(place, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _write_task(folder: Path, name: str, rows: Rows, examples: Rows, **words: Any) -> None:
    files = {part: str(folder / f"{name}.{part}.jsonl") for part in ("test", "train")}
    for part, kept in (("test", rows), ("train", examples)):
        Path(files[part]).write_text("".join(json.dumps(row) + "\n" for row in kept))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, files=json.dumps(files), **words))
