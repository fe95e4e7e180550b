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

ARC_TRAIN_ROWS = 1119  # of ARC-Challenge: as many examples to draw from
PROMPTS = """\
from lm_eval.tasks.hellaswag.utils import process_docs
from lm_eval.tasks.winogrande.preprocess_winogrande import doc_to_choice, doc_to_target, doc_to_text
"""
QUERY = {"doc_to_text": "{{query}}", "doc_to_choice": "choices"}
LETTERS = "{{question.strip()}}\\nA. {{choices[0]}}\\nB. {{choices[1]}}\\nC. {{choices[2]}}\\nD. {{choices[3]}}\\nAnswer:"
# task -> its shots, the files of its rows and of its examples, and its fields as in lm-eval's own YAML file
TASKS: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "hellaswag": (
        5,
        "hellaswag_val",
        "hellaswag_val",
        {**QUERY, "process_docs": "!function prompts.process_docs", "doc_to_target": '"{{label}}"'},
    ),
    "arc_challenge": (25, "arc_challenge_test", "arc_easy_test", {**QUERY, "doc_to_target": "gold"}),
    "winogrande": (
        5,
        "winogrande_val",
        "winogrande_val",
        {f"doc_to_{what}": f"!function prompts.doc_to_{what}" for what in ("text", "target", "choice")},
    ),
    "mmlu": (5, "mmlu_val", "mmlu_dev", {"doc_to_text": LETTERS, "doc_to_target": "answer"}),
}


def names(task: str) -> dict[str, str]:
    """Sampler -> the name of the task or group that has it."""
    return {"first_n": f"few_{task}_fixed"} | ({} if task == "mmlu" else {"default": f"few_{task}_own"})


def write(data: Path, folder: Path, limit: int | None) -> None:
    """Rows, prompts and YAML files of all tasks. `data`: NAME.jsonl.gz; `limit`: rows of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.py").write_text(PROMPTS)
    for task, (shots, asked, shown, fields) in TASKS.items():
        rows = _rows(data / f"{asked}.jsonl.gz")
        examples = _rows(data / f"{shown}.jsonl.gz")
        if task == "mmlu":
            _write_mmlu(folder, rows[:limit], examples, shots)
            continue
        if task == "arc_challenge":
            examples = examples[:ARC_TRAIN_ROWS]
        for sampler, name in names(task).items():
            parts = {"test": rows[:limit], "train": examples}
            _write_task(folder, name, parts, _shots(shots, sampler), fields)


def _shots(number: int, sampler: str) -> str:
    return f"num_fewshot: {number}\nfewshot_config: {{sampler: {sampler}}}"


def _rows(place: Path) -> list[dict[str, Any]]:
    with gzip.open(place, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _write_mmlu(folder: Path, rows: list[dict[str, Any]], examples: list[dict[str, Any]], shots: int) -> None:
    """A task of each subject, and their group."""
    group = names("mmlu")["first_n"]
    subjects = sorted({row["subject"] for row in rows})
    for subject in subjects:
        told = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\\n\\n"
        fields = {**TASKS["mmlu"][3], "doc_to_choice": '["A", "B", "C", "D"]', "description": f'"{told}"'}
        fields["doc_to_text"] = f'"{LETTERS}"'
        parts = {
            name: [row for row in part if row["subject"] == subject]
            for name, part in (("test", rows), ("train", examples))
        }
        _write_task(folder, f"{group}_{subject}", parts, _shots(shots, "first_n"), fields)
    leaves = "\n".join(f"  - {group}_{subject}" for subject in subjects)
    (folder / f"{group}.yaml").write_text(f"group: {group}\ntask:\n{leaves}\n")


def _write_task(
    folder: Path, name: str, parts: dict[str, list[dict[str, Any]]], shots: str, fields: dict[str, str]
) -> None:
    """`parts`: rows by split; `shots`: what `num_fewshot` and `fewshot_config` say."""
    for part, kept in parts.items():
        (folder / f"{name}.{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    lines = [
        f"task: {name}",
        "dataset_path: json",
        "dataset_kwargs:",
        "  data_files:",
        *(f"    {part}: {folder / f'{name}.{part}.jsonl'}" for part in parts),
        "test_split: test",
        "fewshot_split: train",
        shots,
        "output_type: multiple_choice",
        *(f"{key}: {_quoted(value)}" for key, value in fields.items()),
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def _quoted(value: str) -> str:
    return f'"{value}"' if value.startswith("{{") else value
