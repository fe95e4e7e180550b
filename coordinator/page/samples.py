"""Samples of an evaluation as blocks of a page: what was asked, answered and scored, cut to a size.

Rule: reads lm-eval's sample files one line at a time. Every task gets an equal share of the page's bytes; what does
not fit is left out or cut, and the page says how many. Called by the command with files, or by tests with lines.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

MOST_TEXT = 4000  # characters of a prompt or an answer that a page shows
MOST_BYTES = 9_000_000  # of all blocks, compressed; base64 makes a third more
CHUNK = 200  # samples that are compressed together before a task's share is looked at
# a sample's columns in a block
COLUMNS = ("doc_id", "prompt", "choices", "answers", "filtered", "target", "values", "filter", "hash")


def blocks_of(
    tasks: Mapping[str, Iterable[str]], most_bytes: int = MOST_BYTES
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """(a row of the index per task, name of a block -> its gzip bytes). `tasks`: task -> lines of its sample file."""
    share = most_bytes // max(1, len(tasks))
    index, blocks = [], {}
    for number, (task, lines) in enumerate(tasks.items()):
        rows, counts = _fitting(lines, share)
        blocks[f"samples-{number}"] = rows
        index.append({"task": task, "block": f"samples-{number}", **counts})
    return index, blocks


def _fitting(lines: Iterable[str], share: int) -> tuple[bytes, dict[str, int]]:
    """(gzip of the first samples that fit, counts of their documents, of all, and of broken lines).

    A document has a line for each filter.
    """
    kept: list[list[Any]] = []
    chunk: list[list[Any]] = []
    documents: set[str] = set()
    size = broken = 0
    for line in filter(str.strip, lines):
        try:
            row = sample_row(json.loads(line))
        except (ValueError, AttributeError, TypeError):  # cut short, or no sample
            broken += 1
            continue
        documents.add(str(row[0]))
        if size > share:
            continue
        chunk.append(row)
        if len(chunk) == CHUNK:
            size += len(_packed(chunk))
            kept += chunk if size <= share else []
            chunk = []
    if size + len(_packed(chunk)) <= share:
        kept += chunk
    shown = len({str(row[0]) for row in kept})
    return _packed(kept), {"samples": shown, "of": len(documents), "broken": broken}


def _packed(rows: list[list[Any]]) -> bytes:
    return gzip.compress(
        json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"), mtime=0
    )


def sample_row(sample: Mapping[str, Any]) -> list[Any]:
    """A line of lm-eval's sample file as COLUMNS; texts beyond MOST_TEXT characters are cut and say so."""
    asked = [a for a in sample.get("arguments", {}).values() if isinstance(a, Mapping)]
    prompt = asked[0].get("arg_0", "") if asked else ""
    choices = [a.get("arg_1") for a in asked]
    choices = (
        [_text(c) for c in choices] if len(asked) > 1 and all(isinstance(c, str) for c in choices) else []
    )
    answers, filtered = (
        [_text(a[0] if isinstance(a, list) and len(a) == 1 else a) for a in sample.get(name, [])]
        for name in ("resps", "filtered_resps")
    )
    values = {str(m): _number(sample.get(m)) for m in sample.get("metrics", [])}
    return [
        sample.get("doc_id"), _text(prompt), choices, answers, filtered if filtered != answers else [],
        _text(sample.get("target", "")), values, sample.get("filter", ""), str(sample.get("doc_hash", ""))[:12],
    ]  # fmt: skip


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
