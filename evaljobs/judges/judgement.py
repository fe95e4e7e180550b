"""Questions to a judge, its answers, and how they are read. Pure.

Rule: an ask is identified by its content and its judge, so equal asks are paid for once. Answers
are read as FastChat reads them (fastchat/llm_judge/common.py, run_judge_single and run_judge_pair;
Zheng et al. 2023, arXiv:2306.05685). Called from `asking`, `kept`, `scoring` and judge tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Literal

from evaljobs.contract.specs import SCHEMA_VERSION, JudgeConfig, Record

Form = Literal["rating", "winner"]

# as FastChat's `\d+\.?\d*`, which takes time quadratic in the digits of an answer
_RATING = re.compile(r"\[\[(\d+(?:\.\d*)?)\]\]")
_RATING_BACKUP = re.compile(r"\[(\d+(?:\.\d*)?)\]")
_WINNERS = (("[[A]]", "A"), ("[[B]]", "B"), ("[[C]]", "tie"))
LOWEST, HIGHEST = 1.0, 10.0  # ends of the rating scale in the prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question to the judge: system and user message, and the form in which the answer ends."""

    system: str
    user: str
    form: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A rating (1 to 10), a winner ("A", "B" or "tie"), or None with the reason."""

    value: float | str | None
    error: str = ""


class Judgement(Record):
    """An ask with its answer, as stored on disk. `answer=None`: none, with the reason in `error`.

    `cost_millionths`: cost of the answer in millionths of the currency, 0 without one.
    """

    schema_version: int = SCHEMA_VERSION
    key: str
    evaluation: str  # the evaluation that paid
    job: str
    url: str
    model: str
    temperature: float
    max_tokens: int
    form: Form
    system: str
    user: str
    answer: str | None
    error: str = ""
    prompt_tokens: int | None = None  # None: the endpoint sent no count
    completion_tokens: int | None = None
    cost_millionths: int = 0
    tries: int = 1
    seconds: float = 0.0
    answered_at: float = 0.0  # unix seconds


def ask_key(ask: Ask, judge: JudgeConfig) -> str:
    """64 hex digits over all that decides an answer: judge, settings, messages, form."""
    what = [
        "evalspan-ask-1",
        judge.url,
        judge.model,
        judge.temperature,
        judge.max_tokens,
        ask.form,
        ask.system,
        ask.user,
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def read_answer(form: Form, answer: str) -> Reply:
    """The rating or winner: the first `[[5]]`, else `[5]`; or `[[A]]`, `[[B]]`, `[[C]]` in order.

    Unlike FastChat, numbers outside 1 to 10 are no rating: `[2023]` would otherwise be one.
    """
    if form == "winner":
        winner = next((name for mark, name in _WINNERS if mark in answer), None)
        return Reply(value=winner, error="" if winner else f"the judge names no winner: {_end(answer)}")
    match = _RATING.search(answer) or _RATING_BACKUP.search(answer)
    if match is None:
        return Reply(value=None, error=f"the judge gives no rating: {_end(answer)}")
    rating = float(match[1])
    if not LOWEST <= rating <= HIGHEST:
        return Reply(value=None, error=f"the judge's rating {match[1][:20]} is not from 1 to 10")
    return Reply(value=rating)


def _end(answer: str) -> str:
    text = " ".join(answer.split())
    return repr(text[-80:]) if text else "its answer is empty"


def cost(judge: JudgeConfig, prompt_tokens: int, completion_tokens: int) -> int:
    """Millionths of the prices' currency: prices are per million tokens."""
    return math.ceil(
        prompt_tokens * (judge.price_per_million_prompt_tokens or 0.0)
        + completion_tokens * (judge.price_per_million_completion_tokens or 0.0)
    )


def cost_at_most(judge: JudgeConfig, ask: Ask) -> int:
    """Largest cost of one request: a token per byte (64 more for a template), longest answer."""
    letters = len(ask.system.encode(errors="replace")) + len(ask.user.encode(errors="replace"))
    return cost(judge, letters + 64, judge.max_tokens)
