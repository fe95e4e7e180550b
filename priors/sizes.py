"""The shipped table of common data sets: documents, tokens, and metric seconds, by lm-eval task name.

Rule: the table is read once and never written; its `max_gen_tokens` is a cap, not a mean.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Kind = Literal["ppl", "gen", "code", "judge"]

TASKS = {
    "mmlu": "mmlu_5shot",
    "ceval-valid": "ceval_val_5shot",
    "cmmlu": "cmmlu_5shot",
    "agieval": "agieval_mc",
    "social_iqa": "siqa",
    "siqa": "siqa",
    "commonsense_qa": "commonsenseqa_8shot",
    "arc_easy": "arc_easy_test",
    "arc_challenge": "arc_challenge_test",
    "race": "race_high",
    "sglue_rte": "rte",
    "truthfulqa_mc1": "truthfulqa_mc",
    "truthfulqa_mc2": "truthfulqa_mc",
    "storycloze_2016": "storycloze",
    "wsc273": "wsc",
    "axb": "ax_b",
    "axg": "ax_g",
    "gsm8k": "gsm8k_5shot_lmeval",
    "gsm8k_cot": "gsm8k_4shot_oc",
    "hendrycks_math": "math_4shot",
    "bbh": "bbh_3shot_cot",
    "bbh_cot_fewshot": "bbh_3shot_cot",
    "triviaqa": "triviaqa_5shot_lmeval",
    "lambada_openai": "lambada",
    "lambada_standard": "lambada",
    "drop": "drop_3shot",
    "squadv2": "squad2",
    "tydiqa": "tydiqa_goldp",
    "mgsm_direct": "mgsm_8shot",
    "gpqa_diamond_zeroshot": "gpqa_diamond",
    "mmlu_pro": "mmlu_pro_5shot",
    "mbpp_plus": "mbpp_plus",
    "mbpp_instruct": "mbpp",
    "humaneval_instruct": "humaneval",
    "humaneval_64": "humaneval_x10",
    "strategyqa": "strategyqa_6shot",
    "mt_bench": "mtbench",
}
"""lm-eval's task name -> row of the table. Other names are looked up unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A row: mean prompt tokens per document, cap of generated tokens, metric seconds of the data set."""

    name: str
    kind: Kind
    documents: int
    choices: int
    prompt_tokens: float
    max_generated_tokens: float
    metric_seconds: float

    @property
    def labels(self) -> int:
        """Choices scored per document; 0 for generation."""
        return self.choices if self.kind == "ppl" else 0


@cache
def table() -> dict[str, Known]:
    """Every row, by the table's name."""
    text = files("priors").joinpath("data/dataset_sizes.csv").read_text(encoding="utf-8")
    rows: dict[str, Known] = {}
    for row in csv.DictReader(text.splitlines()):
        kind = row["kind"]
        if kind not in {"ppl", "gen", "code", "judge"}:
            raise ValueError(f"data/dataset_sizes.csv: {row['dataset']}: unknown kind {kind!r}")
        rows[row["dataset"]] = Known(
            name=row["dataset"],
            kind=kind,  # type: ignore[arg-type]  # checked above
            documents=int(row["docs"]),
            choices=int(row["choices"]),
            prompt_tokens=float(row["avg_prompt_tokens"]),
            max_generated_tokens=float(row["max_gen_tokens"]),
            metric_seconds=float(row["metric_seconds_estimate"]),
        )
    return rows


def known(task: str) -> Known | None:
    """The row of a task: by lm-eval's name, the table's name, or the name of the task's group."""
    parts = task.split("_")
    for length in range(len(parts), 0, -1):  # `mmlu_anatomy`, then `mmlu`
        name = "_".join(parts[:length])
        if row := table().get(TASKS.get(name, name)):
            return row
    return None
