"""MT-Bench's first turns: questions, the judge's prompts, and what its replies count.

Rule: prompts, their choice and the order of answers are FastChat's (fastchat/llm_judge/common.py and gen_judgment.py;
Zheng et al. 2023, arXiv:2306.05685): questions on math, reasoning and coding show the judge a reference answer, and a
pair is judged twice with swapped order. As there, a document without a judgement counts in no mean; `judged` says how
many have one.

It does not know: which model judges, or how it is asked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from evaljobs.judges.records import Ask, Form, Reply
from evaljobs.seam import JUDGES

HERE = Path(__file__).resolve().parent
NEED_REFERENCE = ("math", "reasoning", "coding")  # NEED_REF_CATS
REFERENCES = "data/references.jsonl"


# --- documents -------------------------------------------------------------------------------------------------------


def questions(*, split: str, baseline: str | None = None, **_metadata: Any) -> dict[str, datasets.Dataset]:
    """One row a question; with `baseline` (a file of FastChat's model answers) only those that it answers.

    Rows: question_id, category, question, reference ("" where none is shown), baseline ("" without one).
    """
    references = _answers(REFERENCES)
    others = _answers(baseline) if baseline is not None else {}
    itself = baseline is not None and (HERE / baseline).resolve() == (HERE / REFERENCES).resolve()
    rows = []
    for row in _read("data/questions.jsonl"):
        number = int(row["question_id"])
        if baseline is not None and number not in others:
            continue
        # what is compared with the reference itself is not shown it: the judge would have only to find its copy
        shown = references.get(number, "") if row["category"] in NEED_REFERENCE and not itself else ""
        rows.append(
            {
                "question_id": number,
                "category": row["category"],
                "question": row["turns"][0],
                "reference": shown,
                "baseline": others.get(number, ""),
            }
        )
    return {split: datasets.Dataset.from_list(rows)}


def _answers(name: str) -> dict[int, str]:
    return {int(row["question_id"]): row["choices"][0]["turns"][0] for row in _read(name)}


def _read(name: str) -> list[dict[str, Any]]:
    with (HERE / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


# --- judgements ------------------------------------------------------------------------------------------------------


def single(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`judge_score`: the rating of the answer, 1 to 10; left out where there is no judgement."""
    ask = _ask("single", "rating", doc, answer=results[0])
    (reply,) = JUDGES.ask([ask])
    return _metrics("judge_score", [reply], lambda values: float(values[0]))


def pair(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`win_rate` against the baseline's answer: 1 won in both orders, 0 lost in both, else 0.5 (a tie, as FastChat counts)."""
    first = _ask("pair", "winner", doc, answer_a=results[0], answer_b=doc["baseline"])
    second = _ask("pair", "winner", doc, answer_a=doc["baseline"], answer_b=results[0])
    return _metrics("win_rate", JUDGES.ask([first, second]), _outcome)


def _outcome(winners: Sequence[Any]) -> float:
    if list(winners) == ["A", "B"]:
        return 1.0
    return 0.0 if list(winners) == ["B", "A"] else 0.5


def _metrics(name: str, replies: Sequence[Reply], value: Any) -> dict[str, float]:
    if any(reply.value is None for reply in replies):
        return {"judged": 0.0}
    return {name: value([reply.value for reply in replies]), "judged": 1.0}


def _ask(kind: str, form: Form, doc: dict[str, Any], **answers: str) -> Ask:
    name = {"single": ("single-v1", "single-math-v1"), "pair": ("pair-v2", "pair-math-v1")}[kind]
    prompt = _prompts()[name[1] if doc["reference"] else name[0]]
    texts = {"question": doc["question"], "ref_answer_1": doc["reference"], **answers}
    return Ask(system=prompt["system_prompt"], user=prompt["prompt_template"].format(**texts), form=form)


@functools.cache
def _prompts() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in _read("data/prompts.jsonl")}
