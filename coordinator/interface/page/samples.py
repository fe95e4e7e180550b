"""Samples of an evaluation as blocks of a page: requests, answers and scores, limited in size.

Rule: reads lm-eval's sample files one line at a time. Every task gets an equal share of the page's bytes, its wrong or
flipped samples first; what does not fit is omitted or shortened, and the page says how many. Called by the command with
files, or by tests with lines.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_TEXT = 4000  # characters of a prompt or an answer on a page
MOST_BYTES = 9_000_000  # of all blocks, compressed; base64 adds a third
CHUNK = 200  # samples compressed together before a task's share is checked
# columns of a sample in a block; `later`: messages of a conversation after the prompt
COLUMNS = (
    "doc_id",
    "prompt",
    "choices",
    "answers",
    "filtered",
    "target",
    "values",
    "filter",
    "hash",
    "later",
)
VALUES = COLUMNS.index("values")


@dataclass(frozen=True, slots=True)
class SampleKind:
    """Options for a task's samples. `flipped`: documents to keep first, None: wrong ones; `later`: the messages' field."""

    flipped: Collection[int] | None = None
    later: str = ""

    def first(self, row: list[Any]) -> bool:
        if self.flipped is not None:
            return row[0] in self.flipped
        value = next((v for v in row[VALUES].values() if isinstance(v, int | float)), None)
        return value is not None and value < 1


def blocks_of(
    tasks: Mapping[str, Iterable[str]],
    most_bytes: int = MOST_BYTES,
    kind_of: Callable[[str], SampleKind] = lambda _: SampleKind(),
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return (an index row per task, name of a block -> its gzip bytes). `tasks`: task -> lines of its sample file."""
    share = most_bytes // max(1, len(tasks))
    index, blocks = [], {}
    for number, (task, lines) in enumerate(tasks.items()):
        rows, counts = _fitting(lines, share, kind_of(task))
        blocks[f"samples-{number}"] = rows
        index.append({"task": task, "block": f"samples-{number}", **counts})
    return index, blocks


def _fitting(lines: Iterable[str], share: int, kind: SampleKind) -> tuple[bytes, dict[str, int]]:
    """Return (gzip of the samples that fit, counts of their documents, of all, and of broken lines).

    A document has one line per filter.
    """
    ranks: dict[bool, list[tuple[int, list[Any]]]] = {
        True: [],
        False: [],
    }  # whether it is kept first -> positions and rows
    broken = size = 0
    for place, line in enumerate(filter(str.strip, lines)):
        try:
            row = sample_row(json.loads(line), kind.later)
        except (ValueError, AttributeError, TypeError):  # truncated, or not a sample
            broken += 1
            continue
        ranks[kind.first(row)].append((place, row))
    chunks = [rank[i : i + CHUNK] for rank in ranks.values() for i in range(0, len(rank), CHUNK)]
    kept: list[tuple[int, list[Any]]] = []
    for chunk in chunks:
        size += len(_packed([row for _, row in chunk]))
        if size > share:
            break
        kept += chunk
    rows = [row for _, row in sorted(kept, key=lambda each: each[0])]
    documents, shown = ({str(row[0]) for _, row in found} for found in (ranks[True] + ranks[False], kept))
    return _packed(rows), {"samples": len(shown), "of": len(documents), "broken": broken}


def _packed(rows: list[list[Any]]) -> bytes:
    return gzip.compress(
        json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"), mtime=0
    )


def sample_row(sample: Mapping[str, Any], later: str = "") -> list[Any]:
    """Return a line of lm-eval's sample file as COLUMNS; texts beyond MOST_TEXT characters are shortened with a note.

    `later`: field of the document with the messages after the prompt; an answer is then a list, one text per turn.
    """
    asked = [a for a in sample.get("arguments", {}).values() if isinstance(a, Mapping)]
    prompt = asked[0].get("arg_0", "") if asked else ""
    choices = [a.get("arg_1") for a in asked]
    choices = (
        [_text(c) for c in choices] if len(asked) > 1 and all(isinstance(c, str) for c in choices) else []
    )
    answers, filtered = (
        [_turns(a[0] if isinstance(a, list) and len(a) == 1 else a, later) for a in sample.get(name, [])]
        for name in ("resps", "filtered_resps")
    )
    values = {str(m): _number(sample.get(m)) for m in sample.get("metrics", [])}
    document = sample.get("doc")
    messages = document.get(later, []) if later and isinstance(document, Mapping) else []
    return [
        sample.get("doc_id"), _text(prompt), choices, answers, filtered if filtered != answers else [],
        _text(sample.get("target", "")), values, sample.get("filter", ""), str(sample.get("doc_hash", ""))[:12],
        [_text(m) for m in ([messages] if isinstance(messages, str) else messages)],
    ]  # fmt: skip


def _turns(answer: Any, later: str) -> Any:
    return [_text(turn) for turn in answer] if later and isinstance(answer, list) else _text(answer)


def _text(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and str(value[1]) in ("True", "False"):
        value = f"{value[0]}{' (greedy)' if str(value[1]) == 'True' else ''}"  # a log-likelihood
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (
        text
        if len(text) <= MOST_TEXT
        else f"{text[:MOST_TEXT]} … ({len(text) - MOST_TEXT:,} characters left out)"
    )


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return None if value is None else _text(value)[:100]
