"""What a log says of failures: templates with counts, tracebacks kept whole, and the lines that rules find. Called from: `verdict`.

Rule: a line is looked at where it has a word of failure or progress, which one expression finds in a block of lines, or while a
traceback is open. A template is such a line without digits and letters of hexadecimal numbers. Memory is bounded by MOST_*:
a line of 1 GB, binary bytes and ANSI codes, too.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.diagnosis.rules import RAISED, Rule, find

MOST_TEMPLATES = 200_000
MOST_EXAMINED = 10_000  # lines that are compared with all rules; of the rest only the last LAST_EXAMINED
LAST_EXAMINED = 2_000
MOST_HITS = 2_000
SAME = 50  # lines of one template that are compared with the rules: digits may tell them apart, as of an Xid
MOST_FRAMES = 300  # lines of one traceback
LAST_PROGRESS = 3  # lines of progress that follow a failure which the program survived
_DROPPED = b"0123456789abcdefABCDEF"
# A line in lower case with none of these tells of no failure.
_TELLS = tuple(
    b"error exception traceback fail fatal kill cancel abort xid nvrm memory oom signal sigbus timeout timed quota space refused"
    b" closed reset denied unable cannot can't couldn argument option invalid assert fallen preempt limit pipe reachable"
    b" panic lost stale handling cause dumped ecc illegal symbol glibc gateway exceeded override route alloc interrupt lockup full"
    b" transport terminate exited mismatch completion syntax module network edquot found such watchdog link exhausted enospc inactive"
    b" uncorrect remap hang respon dead stall evict unplug resolve disconnect certificate incomplete unavail expired cast cached corrupt"
    b" eof magic compiled unknown missing deleted aborted runlimit prematurely resource died written".split()
)
_PROGRESS = (b"step", b"iter", b"epoch", b"loss", b"it/s", b"s/it", b"tokens/s", b"samples/s", b"%|")


def _any_of(words: Iterable[bytes]) -> bytes:
    """An expression that finds any of them, by their common beginnings: a flat one takes three times as long."""
    nexts: dict[bytes, list[bytes]] = {}
    for word in words:
        nexts.setdefault(word[:1], []).append(word[1:])
    if b"" in nexts:
        return b""
    return b"(?:" + b"|".join(re.escape(c) + _any_of(rest) for c, rest in nexts.items()) + b")"


_tells, _words = re.compile(_any_of(_TELLS)).search, re.compile(_any_of(_TELLS + _PROGRESS)).search
# lines that warn, or say that the program goes on
_SOFT = re.compile(
    r"(?i)(?<!nccl )(?<!:\d{3} )(?<!:\d{2} )\bwarn(?:ing)?\b(?!.*preempted)|\w+warning:|\bretry(?:ing)?\b|\bignor(?:ed|ing)\b|\bskipp(?:ed|ing)\b"
    r"|falling back|NCCL INFO \S+/Plugin|^W \S+:\d+\]|will (?:try|be)|thrown while requesting|failed call to cuinit|could not find cuda drivers"
)
_SUSPECT = re.compile(
    r"(?i)\b(?:\w*error|\w*exception|fatal|failed|failure|aborted?|killed|panic|segmentation fault|core dumped|SIG[A-Z]{3,5}|exitcode"
    r"|denied|refused|unreachable|unexpectedly|timed out|interrupted|not respond(?:ing)?|LOCKUP|stalled|scancel|died|Traceback)\b"
)
_BENIGN = re.compile(
    r"(?i)\b(?:0|no) (?:error|failure)s?\b|error[_ ](?:rate|bar)|std(?:err|_error)|INFO:[\w.]*error:|errors?\W{1,3}0\b|max_error"
)
_BEGINS = "Traceback (most recent call last)"
_ENDS = re.compile(r"[A-Za-z_][\w.]*(?::(?: |$)|$)")  # the line of a traceback that names the exception
_FRAME = re.compile(r'\s+File "([^"]+)"')


@dataclass(slots=True, kw_only=True, eq=False)
class Hit:
    """A line that a rule found. `frame`: the file of its traceback's last frame; `soft`: the program may have gone on;
    `dropped`: another exception of its chain counts.
    """

    rule: Rule
    log: str
    line: str
    number: int
    last: int  # number of its template's last line
    soft: bool = False
    dropped: bool = False
    frame: str = ""
    traceback: tuple[str, ...] = ()


@dataclass(slots=True)
class _Template:
    text: str
    first: int
    last: int
    suspect: bool
    count: int = 1
    progress: bool = False
    hit: Hit | None = None


@dataclass(slots=True)
class _Traceback:
    ignored: bool
    lines: list[bytes | str] = field(default_factory=list)  # bytes: as they are in the log

    def frame(self) -> str:
        found = (_FRAME.match(_text(line)) for line in reversed(self.lines))
        return next((frame[1] for frame in found if frame), "")


def _text(line: bytes | str) -> str:
    return plain(line) if isinstance(line, bytes) else line


def _around(text: str, rule: Rule) -> str:
    """Of a long line what the rule found, with what stands before and behind it."""
    found = rule.pattern.search(text)
    first = max(0, found.start() - MOST_SHOWN // 2) if found and len(text) > MOST_SHOWN else 0
    return text[first : first + MOST_SHOWN]


class Scan:
    """One log, read once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = 0
        self.hits: list[Hit] = []
        # numbers of the last lines that repeat and tell of progress
        self.progress: deque[int] = deque(maxlen=LAST_PROGRESS)
        self._special: dict[bytes, _Template] = {}
        self._late: deque[tuple[bytes, bytes, int]] = deque(maxlen=LAST_EXAMINED)
        self._examined = 0
        self._open: dict[str, _Traceback] = {}  # source -> its traceback
        # source -> its last exception, and how the next follows from it
        self._before: dict[str, tuple[Hit | None, str]] = {}
        self._ignoring: set[str] = set()

    def read(self, chunks: Iterable[bytes]) -> Scan:
        for block, numbers in blocks(chunks):
            lower, at, index = block.lower(), 0, 0  # of the next line
            while at <= len(block):
                if not self._open:
                    if (found := _words(lower, at)) is None:
                        break
                    start = block.rfind(b"\n", at, found.start()) + 1 or at
                    index, at = index + block.count(b"\n", at, start), start
                end = block.find(b"\n", at)
                end = len(block) if end < 0 else end
                raw = block[at:end]
                if "" in self._open and raw[:2] == b"  ":
                    self._frame(raw)
                else:
                    self._take(raw, numbers[index], lower, (at, end))
                at, index = end + 1, index + 1
            self.lines = numbers[-1] if numbers else self.lines
        for key, raw, number in self._late:
            self._match(key, parsed(raw), number)
        return self

    # --- lines -----------------------------------------------------------------------------------------------------------

    def _frame(self, raw: bytes) -> None:
        """A frame of the open traceback without a prefix: most lines of a log of tracebacks."""
        lines = self._open[""].lines
        lines.append(raw)
        if len(lines) > MOST_FRAMES:
            del self._open[""]

    def _take(self, raw: bytes, number: int, lower: bytes, span: tuple[int, int]) -> None:
        """A line, which is `lower[span]` in lower case."""
        key = raw.translate(None, _DROPPED)
        if (known := self._special.get(key)) is not None:
            self._again(known, key, raw, number)
        elif _tells(lower, *span):
            self._examine(key, raw, number)
        elif self._open and (line := parsed(raw)).source in self._open:
            self._line(line, number, key)
        elif len(self._special) < MOST_TEMPLATES and _words(lower, *span):
            self._special[key] = _Template("", number, number, suspect=False, progress=True)

    def _again(self, known: _Template, key: bytes, raw: bytes, number: int) -> None:
        known.last, known.count = number, known.count + 1
        if known.progress:
            self.progress.append(number)
        elif known.count <= SAME or self._open or _BEGINS in known.text:
            self._examine(key, raw, number)
        elif known.hit is not None:
            self._seen_again(known.hit, number)

    def _examine(self, key: bytes, raw: bytes, number: int) -> None:
        if self._examined > MOST_EXAMINED and not self._open and b"Traceback" not in raw:
            self._late.append((key, raw, number))
        else:
            self._line(parsed(raw), number, key)

    def _line(self, line: Line, number: int, key: bytes = b"") -> None:
        """A line in its place: of a traceback, between two of them, or alone."""
        source, text = line
        if _BEGINS in text:
            text = text[text.index(_BEGINS) :]  # behind a logger's words
        opened = self._open.get(source)
        if opened is not None and not text.startswith(_BEGINS):
            self._framed(opened, line, number, key)
            return
        if text.startswith(_BEGINS):
            self._open[source] = _Traceback(ignored=source in self._ignoring, lines=[text])
            self._ignoring.discard(source)
            self._keep(key, text, number)
        elif text[:1] in ("\u2502", "\u256d", "\u2570"):
            return  # a traceback in a box: the exception stands below it
        elif text.startswith(("The above exception was the direct", "During handling of the above")):
            hit = self._before.get(source, (None, ""))[0]
            self._before[source] = (hit, text[:3])
        elif text.startswith(("Exception ignored", "--- Logging error")):
            self._ignoring.add(source)
        elif key:
            self._examined += 1
            if (hit := self._match(key, line, number)) and hit.rule.precedence in RAISED:
                self._before[source] = (hit, "")

    def _framed(self, opened: _Traceback, line: Line, number: int, key: bytes) -> None:
        """A line of an open traceback, or one that another process printed meanwhile."""
        source, text = line
        opened.lines.append(text)
        ends = bool(text) and text[0] not in " \t|+" and _ENDS.match(text)
        if ends or len(opened.lines) > MOST_FRAMES:
            del self._open[source]
        if ends:
            self._close(source, opened, line, number, key)

    def _close(self, source: str, opened: _Traceback, line: Line, number: int, key: bytes) -> None:
        """A traceback is whole. Of two that follow from each other one counts: a cause before what it was raised from, and
        an exception before the one that was being handled.
        """
        before, link = self._before.pop(source, (None, ""))
        hit = None if opened.ignored else self._match(key, line, number, opened)
        if hit is not None and before is not None and link:
            raised = before.rule.precedence in RAISED and hit.rule.precedence in RAISED
            drop = (
                before
                if raised and link == "Dur" and hit.rule.precedence <= before.rule.precedence + 12
                else hit
            )
            if hit.rule.precedence < before.rule.precedence and not raised:
                drop = before
            drop.dropped = True
            hit = before if drop is hit else hit
        self._before[source] = (hit or before, "")

    def _match(self, key: bytes, line: Line, number: int, traceback: _Traceback | None = None) -> Hit | None:
        text = line.text
        known = self._keep(key, text, number)
        if known is not None and traceback is not None:
            known.suspect = True  # what raised it may have no word of failure in its name
        if known is not None and known.count > SAME:
            rule = known.hit.rule if known.hit else None
        else:
            rule = find(text)
        if rule is None:
            return None
        if known is not None and known.hit is not None and known.hit.rule is rule:
            self._seen_again(known.hit, number)
            return known.hit
        hit = Hit(
            rule=rule,
            log=self.name,
            line=_around(text, rule),
            number=number,
            last=number,
            soft=traceback is None and _SOFT.search(text) is not None,
            frame=traceback.frame() if traceback else "",
            traceback=tuple(map(_text, traceback.lines)) if traceback else (),
        )
        if len(self.hits) < MOST_HITS:
            self.hits.append(hit)
        else:
            self.hits[-1] = hit
        if known is not None:
            known.hit = hit
        return hit

    def _seen_again(self, hit: Hit, number: int) -> None:
        """A line of the same template: where the program went on after the one before, it counts from here."""
        if self.survived(hit.last):
            hit.number = number
        hit.last, hit.dropped = number, False

    def _keep(self, key: bytes, text: str, number: int) -> _Template | None:
        known = self._special.get(key)
        if known is None and key and len(self._special) < MOST_TEMPLATES:
            suspect = bool(_SUSPECT.search(text)) and not _BENIGN.search(text) and not _SOFT.search(text)
            known = self._special[key] = _Template(text[:MOST_SHOWN], number, number, suspect=suspect)
        return known

    # --- what is asked of it ----------------------------------------------------------------------------------------------

    def survived(self, number: int) -> bool:
        """Did the program make progress after this line?"""
        return len(self.progress) == LAST_PROGRESS and self.progress[0] > number

    def telling(self, most: int) -> list[tuple[int, str]]:
        """Lines that may tell of a failure which no rule knows: the rare and the late ones, in the order of the log."""
        found = [
            t for t in self._special.values() if t.suspect and t.hit is None and not self.survived(t.last)
        ]
        found.sort(key=lambda t: (t.count, -t.last))
        return sorted((t.first, t.text) for t in found[:most])


# --- lines of any size, in blocks ------------------------------------------------------------------------------------


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
