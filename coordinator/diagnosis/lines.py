"""Lines of a log of any size, in blocks: a line of 1 GB, binary bytes and ANSI codes are bounded. Called from: `log`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

CHUNK = 1 << 20  # bytes that a caller reads at once
MOST_LINE = 1 << 16  # bytes of a line that are kept: its beginning and its end
MOST_SHOWN = 400  # characters of a quoted line
_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|.)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# "ERROR 05-23 09:31:47 [core.py:396] ", "[rank1]: ", "3: " of srun --label, "(Worker pid=9) ", "stderr: ", times, "[Rank 0] "; glog's "[E1206 18:44:12.7 file.cpp:1]"
_PREFIX = re.compile(
    r"(?:\s*(?:\[[^\]\n]{0,80}\]:?|\([\w ]{1,40} ?pid=\d+[^)\n]{0,60}\)|\d{1,5}:|std(?:err|out):"
    r"|(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d|[\w./]+\.py:\d+\]|\d{4}[-/]\d\d[-/]\d\d[T ,]\d\d:\d\d:\d\d[\w.,:+-]*))+ ?"
)
_WARNS = re.compile(r"\[W(?:\d{3,4})? ")  # glog's, as of torch
_RANK = re.compile(r"(?i:rank|pid=) ?(\d+)|^(\d{1,5}):")


class Line(NamedTuple):
    """`source`: the rank or process that printed it, as far as its prefix says; `text`: without that prefix."""

    source: str
    text: str


def blocks(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Whole lines joined by newlines, and their numbers from 1. What carriage returns part has one number."""
    number, rest = 1, b""
    for chunk in chunks:
        data = rest + chunk.replace(b"\r\n", b"\n")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        whole, rest = data[:end], data[end:]
        if len(rest) > MOST_LINE:
            rest = rest[: MOST_LINE // 2] + b" ... " + rest[-MOST_LINE // 2 :]
        if whole:
            yield _numbered(whole[:-1], number)
            number += whole.count(b"\n")
    if rest:
        yield _numbered(rest, number)


def _numbered(block: bytes, first: int) -> tuple[bytes, Sequence[int]]:
    if b"\r" not in block:
        return block, range(first, first + block.count(b"\n") + 1)
    numbers: list[int] = []
    for number, line in enumerate(block.split(b"\n"), first):
        numbers += [number] * (line.count(b"\r") + 1)
    return block.replace(b"\r", b"\n"), numbers


def plain(raw: bytes) -> str:
    """A line as text that commands no terminal; of a long one its beginning and its end."""
    if len(raw) > 2 * MOST_SHOWN * 4:
        raw = raw[: MOST_SHOWN * 4] + b" ... " + raw[-MOST_SHOWN * 4 :]
    return _CONTROL.sub("", _ANSI.sub("", raw.decode(errors="replace"))).rstrip()


def parsed(raw: bytes) -> Line:
    text = plain(raw)
    prefix = _PREFIX.match(text)
    if prefix is None:
        return Line("", text)
    rank = _RANK.search(prefix[0])
    warns = "WARNING " if _WARNS.search(prefix[0]) else ""
    return Line((rank[1] or rank[2]) if rank else "", warns + text[prefix.end() :])
