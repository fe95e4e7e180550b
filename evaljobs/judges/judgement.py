"""Questions to a judge, its answers, how they are parsed, and where they are stored.

Rule: an ask is identified by its content and its judge, so equal asks are paid for once. Answers are parsed like in FastChat
(fastchat/llm_judge/common.py, run_judge_single and run_judge_pair; Zheng et al. 2023, arXiv:2306.05685). A judgement is a
file of the evaluation that paid for it; a hard link in the work folder's cache lets another evaluation with the same ask use
it. Called from `asking`, `scoring`, judge tasks, and the coordinator for the cost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from evaljobs.contract.archived_files import files_in, read_bytes
from evaljobs.contract.specs import SCHEMA_VERSION, JudgeConfig, Record
from evaljobs.contract.storage import make_folder, write_atomic

Form = Literal["rating", "winner"]

# like FastChat's `\d+\.?\d*`, which takes time quadratic in the digits of an answer
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

    `cost_millionths`: cost of the answer in millionths of the currency, 0 without an answer.
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
    """Return 64 hex digits over everything that decides an answer: judge, settings, messages, form."""
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
    """Return the rating or winner: the first `[[5]]`, otherwise `[5]`; or `[[A]]`, `[[B]]`, `[[C]]` in order.

    Unlike in FastChat, numbers outside 1 to 10 are not ratings, since `[2023]` would be one.
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


def reply_cost(judge: JudgeConfig, prompt_tokens: int, completion_tokens: int) -> int:
    """Return millionths of the prices' currency; prices are per million tokens."""
    return math.ceil(
        prompt_tokens * (judge.price_per_million_prompt_tokens or 0.0)
        + completion_tokens * (judge.price_per_million_completion_tokens or 0.0)
    )


def cost_at_most(judge: JudgeConfig, ask: Ask) -> int:
    """Return the maximum cost of one request: a token per byte (64 more for a template), longest answer."""
    letters = len(ask.system.encode(errors="replace")) + len(ask.user.encode(errors="replace"))
    return reply_cost(judge, letters + 64, judge.max_tokens)


# --- on disk ---------------------------------------------------------------------------------------------------------


def find_judgement(folder: Path, cache: Path, key: str) -> Judgement | None:
    """Return the judgement of an ask, possibly an error; copy an answer of another evaluation into `folder`."""
    own = _read(folder / f"{key}.json")
    if own is not None and own.answer is not None:
        return own
    shared = _read(_link(cache, key))
    if shared is None:
        return own
    write_judgement(folder, cache, shared)
    return shared


def write_judgement(folder: Path, cache: Path, judgement: Judgement) -> None:
    """Write a judgement durably. Raise OSError if the file system refuses."""
    own, link = folder / f"{judgement.key}.json", _link(cache, judgement.key)
    write_atomic(own, judgement.model_dump_json(indent=1).encode())
    if judgement.answer is not None:
        make_folder(link.parent)
        with contextlib.suppress(OSError):  # the link exists, or the file system has no links
            os.link(own, link)


def read_judgements(folder: Path) -> Iterator[Judgement]:
    """Yield all judgements of an evaluation's folder, errors included; unreadable files are skipped."""
    for file in files_in(folder, "*.json"):
        if (found := _read(file)) is not None:
            yield found


def _link(cache: Path, key: str) -> Path:
    return cache / key[:2] / f"{key}.json"


def _read(file: Path) -> Judgement | None:
    try:
        return Judgement.model_validate_json(read_bytes(file))
    except (OSError, ValidationError):
        return None
