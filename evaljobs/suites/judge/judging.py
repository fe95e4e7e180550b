"""MT-Bench: questions, the judge's prompts, and metrics of its replies.

Rule: prompts, their choice and the order of answers are FastChat's (fastchat/llm_judge/common.py
and gen_judgment.py; Zheng et al. 2023, arXiv:2306.05685). Each turn is judged separately, the
second one with the whole conversation in view. Questions on math, reasoning and coding show
reference answers. A pair is judged twice, in swapped order. As there, a turn without a judgement
counts in no mean; `judged` is the share of documents that have all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from evaljobs.errors import OperatorError
from evaljobs.judges.judgement import Ask, Form
from evaljobs.lmeval.conversations import turn_answers
from evaljobs.lmeval.hooks import JUDGES

HERE = Path(__file__).resolve().parent
NEED_REFERENCE = ("math", "reasoning", "coding")  # NEED_REF_CATS
REFERENCES = "data/references.jsonl"
TURNS = 2


def questions(*, split: str, baseline: str | None = None, **_metadata: Any) -> dict[str, datasets.Dataset]:
    """Return one row per conversation; with `baseline` (a file of FastChat's model answers) only those that it has.

    Rows: question_id, category, question_1, question_2; reference and baseline: both turns' answers, or none.
    """
    references = _answers(REFERENCES)
    others = _answers(baseline) if baseline is not None else {}
    itself = baseline is not None and (HERE / baseline).resolve() == (HERE / REFERENCES).resolve()
    rows = []
    for row in _read("data/questions.jsonl"):
        number = int(row["question_id"])
        if baseline is not None and number not in others:
            continue
        # a baseline that is the reference is not shown as such: the judge could find its copy
        shown = references.get(number, []) if row["category"] in NEED_REFERENCE and not itself else []
        rows.append(
            {
                "question_id": number,
                "category": row["category"],
                "question_1": row["turns"][0],
                "question_2": row["turns"][1],
                "reference": shown,
                "baseline": others.get(number, []),
            }
        )
    return {split: datasets.Dataset.from_list(rows)}


def _answers(name: str) -> dict[int, list[str]]:
    found = {int(row["question_id"]): row["choices"][0]["turns"] for row in _read(name)}
    short = [number for number, answers in found.items() if len(answers) != TURNS]
    if short:
        raise OperatorError(f"{name} has not {TURNS} turns of question {short[0]}: name a file that has")
    return found


def _read(name: str) -> list[dict[str, Any]]:
    with (HERE / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def single(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Return `judge_score`: mean of both turns' ratings, 1 to 10; `judge_score_turn1` and `…_turn2`: that turn's."""
    said = turn_answers(results[0])
    first = _ask("single", "rating", doc, turn=1, answer=said[0])
    second = _ask("single", "rating", doc, turn=2, answer_1=said[0], answer_2=said[1])
    ratings = [reply.value for reply in JUDGES.ask([first, second])]
    return _metrics("judge_score", [None if rating is None else float(rating) for rating in ratings])


def pair(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Return `win_rate` against the baseline's answers, mean of both turns: 1 won in both orders, 0 lost in both, otherwise
    0.5 (a tie, as FastChat counts); `win_rate_turn1` and `…_turn2`: that turn's.
    """
    own, other = turn_answers(results[0]), doc["baseline"]
    asks = [_compare(doc, turn, a, b) for turn in (1, 2) for a, b in ((own, other), (other, own))]
    winners = [reply.value for reply in JUDGES.ask(asks)]
    return _metrics("win_rate", [_outcome(winners[:2]), _outcome(winners[2:])])


def _compare(doc: Mapping[str, Any], turn: int, a: Sequence[str], b: Sequence[str]) -> Ask:
    if turn == 1:
        return _ask("pair", "winner", doc, turn=1, answer_a=a[0], answer_b=b[0])
    both = {"answer_a_1": a[0], "answer_a_2": a[1], "answer_b_1": b[0], "answer_b_2": b[1]}
    return _ask("pair", "winner", doc, turn=2, **both)


def _outcome(winners: Sequence[Any]) -> float | None:
    if None in winners:
        return None
    if list(winners) == ["A", "B"]:
        return 1.0
    return 0.0 if list(winners) == ["B", "A"] else 0.5


def _metrics(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return the mean of all turns' values if all have one, each available turn's, and whether all are."""
    known = {f"{name}_turn{turn}": value for turn, value in enumerate(values, 1) if value is not None}
    whole = len(known) == len(values)
    mean = {name: sum(known.values()) / len(known)} if whole else {}
    return {**mean, **known, "judged": float(whole)}


def _ask(kind: str, form: Form, doc: Mapping[str, Any], *, turn: int, **answers: str) -> Ask:
    general, math = {"single": ("single-v1", "single-math-v1"), "pair": ("pair-v2", "pair-math-v1")}[kind]
    name = (math if doc["reference"] else general) + ("-multi-turn" if turn > 1 else "")
    texts = {"question": doc["question_1"], "question_1": doc["question_1"], "question_2": doc["question_2"]}
    texts |= {f"ref_answer_{number}": text for number, text in enumerate(doc["reference"], 1)}
    prompt = _prompts()[name]
    return Ask(
        system=prompt["system_prompt"], user=prompt["prompt_template"].format(**texts, **answers), form=form
    )


@functools.cache
def _prompts() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in _read("data/prompts.jsonl")}
