"""What a log says of failures: templates with counts, tracebacks kept whole, and the lines that rules find. Called from: `diagnose`.

Rule: a line is looked at where it has a word of failure or progress, which one expression finds in a block of lines, or while a
traceback is open. A template is such a line without digits and letters of hexadecimal numbers. Memory is bounded by MOST_*.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.site.diagnosis.quoted import CONTEXT_BYTES, before_dump, is_quoted, says_nothing
from coordinator.site.diagnosis.reader import (
    CHUNK,
    MOST_SHOWN,
    Line,
    Reader,
    last_time,
    line_blocks,
    plain_text,
)
from coordinator.site.diagnosis.rules import (
    EXCEPTION_PRECEDENCES,
    UNKNOWN_EXCEPTION,
    Rule,
    find_rule,
    rule_table,
)

MOST_TEMPLATES = 200_000
MOST_EXAMINED = 4_000  # lines that are compared with all rules; of the rest only the last LAST_EXAMINED
LAST_EXAMINED = 2_000
MOST_HITS = 2_000
SAME_TEMPLATE_LINES = (
    50  # lines of one template compared with the rules: digits may distinguish them, as for an Xid
)
MOST_FRAMES = 300  # lines of one traceback
MOST_TAIL = 40  # last lines that are kept
SURVIVED_WEIGHT = (
    3  # weight of the evidence behind a failure from which on the program survived it: table().weights
)
DATA = 34  # precedence of a data set that could not be read
BANNER_LINES = 3  # first lines of a log which, if they recur, indicate another attempt
_DROPPED = b"0123456789abcdefABCDEF"
# A line in lower case with none of these tells of no failure.
_TELLS = tuple(
    b"error exception traceback fail fatal kill cancel abort xid nvrm memory oom signal sigbus timeout timed quota space refused"
    b" closed reset denied unable cannot can't couldn argument option invalid assert fallen preempt limit pipe reachable"
    b" panic lost stale handling cause dumped ecc illegal symbol glibc gateway exceeded override route alloc interrupt lockup full"
    b" transport terminate exited mismatch completion syntax module network edquot found such watchdog link exhausted enospc inactive"
    b" uncorrect remap hang respon dead stall evict unplug resolve disconnect certificate incomplete unavail expired cast cached corrupt"
    b" eof magic compiled unknown missing deleted aborted runlimit prematurely resource died written notready"
    b" restart attempt requeue complete finished succe done exitcode train_runtime *****".split()
)
_PROGRESS = (b"step", b"iter", b"epoch", b"loss", b"it/s", b"s/it", b"tokens/s", b"samples/s", b"%|")


def _any_of(words: Iterable[bytes]) -> bytes:
    """Return an expression that finds any of them, factored by common prefixes: a flat one takes three times as long."""
    nexts: dict[bytes, list[bytes]] = {}
    for word in words:
        nexts.setdefault(word[:1], []).append(word[1:])
    if b"" in nexts:
        return b""
    return b"(?:" + b"|".join(re.escape(c) + _any_of(rest) for c, rest in nexts.items()) + b")"


_tells = re.compile(_any_of(_TELLS)).search
_words = re.compile(b"(%b)|%b" % (_any_of(_TELLS), _any_of(_PROGRESS))).search  # group 1: a word of failure
_progress = re.compile(_any_of(_PROGRESS)).search
_COUNTED = re.compile(
    r"(?i)(?:step|iter|epoch|loss|acc)\w*['\"]?[\s:=]{1,3}\d|\d%\||\b(?:it|tokens|samples)/s"
)
# lines that warn, or say that the program goes on
_SOFT = re.compile(
    r"(?i)\bwarn(?:ing)?\b(?<!nccl warn)(?! +\w+ +\d+[smhd]\b)|\w+warning:|\bretry(?:ing)?\b|\bignor(?:ed|ing)\b|\bskipp(?:ed|ing)\b"
    r"|falling back|resuming|resolved after|NCCL INFO \S+/Plugin|NET/OFI .*initialization failed|^W \S+:\d+\]|will (?:try|be)|thrown while requesting"
    r"|failed call to cuinit|could not (?:find cuda drivers|load dynamic library)|^HTTP Request: |^wandb: |wandb-production|api\.wandb\.ai|^dropped chunk"
)
# lines that say that it ends, as a warning, too
_FIRM = re.compile(r"(?i)preempted|terminated|KeyboardInterrupt")
_SUSPECT = re.compile(
    r"(?i)\b(?:\w*error|\w*exception|fatal|failed|failure|aborted?|killed|panic|segmentation fault|core dumped|SIG[A-Z]{3,5}|exitcode"
    r"|denied|refused|unreachable|unexpectedly|timed out|interrupted|not respond(?:ing)?|LOCKUP|stalled|scancel|died|Traceback)\b"
)
_BENIGN = re.compile(
    r"(?i)\b(?:0|no) (?:error|failure)s?\b|error[_ ](?:rate|bar)|std(?:err|_error)|INFO:[\w.]*error:|(?:errors?|exit ?code)\W{1,3}0\b|max_error|not a git repository"
)
_BEGINS = "Traceback (most recent call last)"
_ENDS = re.compile(r"[A-Za-z_][\w.]*(?::(?: |$)|$)")  # the line of a traceback that names the exception
_FRAME = re.compile(r'\s+File "([^"]+)"')
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::|$)")
_PIECES = re.compile(r"[^\W\d_][^\d\"\\\n]{10,60}")  # of a line of the banner, what no number changes


@dataclass(slots=True, kw_only=True, eq=False)
class Hit:
    """A line that a rule found. `frame`: the file of its traceback's last frame; `soft`: the program may have gone on;
    `dropped`: another exception of its chain counts; `time`: the last one that stands there or before.
    """

    rule: Rule
    log: str
    line: str
    number: int
    last: int  # number of its template's last line
    soft: bool = False
    dropped: bool = False
    frame: str = ""
    source: str = ""
    time: str = ""
    traceback: tuple[str, ...] = ()


@dataclass(slots=True)
class _Template:
    text: str
    suspect: bool
    first: int
    last: int
    count: int = 1
    progress: bool = False
    mark: str = ""
    hit: Hit | None = None


@dataclass(slots=True)
class _Traceback:
    ignored: bool
    lines: list[bytes | str] = field(default_factory=list)  # bytes: as they are in the log

    def frame(self) -> str:
        """The file of the last frame."""
        found = (_FRAME.search(_text(line)) for line in reversed(self.lines))
        return next((frame[1] for frame in found if frame), "")

    def reads_data(self) -> bool:
        """Whether a data set was read, rather than a model."""
        return "dataset" in self.frame() or any(
            "torch/utils/data/_utils/" in _text(line) for line in self.lines
        )


def _text(line: bytes | str) -> str:
    return plain_text(line) if isinstance(line, bytes) else line


def _around(text: str, rule: Rule) -> str:
    """Return what the rule found in a long line, with its surroundings."""
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
        self.progress: deque[int] = deque(maxlen=SURVIVED_WEIGHT)
        self.marks: dict[str, list[int]] = {"success": [], "start": []}  # kind -> numbers of its lines
        self.tail: deque[str] = deque(maxlen=MOST_TAIL)  # the last lines
        self._reader = Reader()
        self._banner: Sequence[bytes] = ()
        self._block, self._span, self._earlier = b"", (0, 0), b""
        self._special: dict[bytes, _Template] = {}
        self._late: deque[tuple[bytes, bytes, int]] = deque(maxlen=LAST_EXAMINED)
        self._examined = 0
        self._open: dict[str, _Traceback] = {}  # source -> its traceback
        self._frames = (b"  ", "")  # what frames of the last opened traceback begin with, and its source
        # source -> its last exception, and how the next follows from it
        self._before: dict[str, tuple[Hit | None, str]] = {}
        self._ignoring: set[str] = set()

    def read(self, chunks: Iterable[bytes]) -> Scan:
        for block, numbers in line_blocks(chunks):
            if not self.lines:
                self._reader = Reader(block[:CHUNK])
                self._banner = self._beginning(block[: 4 * CONTEXT_BYTES])
            self._block = block
            self._read_block(block, numbers)
            self._find_starts(block, numbers)
            self.lines = numbers[-1] if numbers else self.lines
            self._earlier = block[-CONTEXT_BYTES:]
            self.tail.extend(plain_text(raw) for raw in block[-4 * CONTEXT_BYTES :].split(b"\n")[-MOST_TAIL:])
        self._block = self._earlier = b""
        for key, raw, number in self._late:
            for line in self._reader.read(raw):
                self._match(key, line, number)
        return self

    @property
    def is_log(self) -> bool:
        """Whether it shows progress, times or levels, a success or a failure."""
        told = any(map(_COUNTED.search, self.tail))
        return bool(self.progress or told or self.hits or any(self.marks.values()) or self._reader.is_log)

    def _read_block(self, block: bytes, numbers: Sequence[int]) -> None:
        lower, at, index = block.lower(), 0, 0  # of the next line
        while at <= len(block):
            told, word = False, at  # a word of failure in the line; where such a word may begin
            if not self._open:
                if (found := _words(lower, at)) is None:
                    return
                told, word = found.lastindex == 1, found.end()
                start = block.rfind(b"\n", at, word) + 1 or at
                index, at = index + block.count(b"\n", at, start), start
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            raw = block[at:end]
            prefix, source = self._frames
            if source in self._open and raw.startswith(prefix):
                self._frame(source, raw)
            else:
                self._span = at, end
                self._take(raw, numbers[index], told, lower, (word, end))
            at, index = end + 1, index + 1

    # --- lines -----------------------------------------------------------------------------------------------------------

    def _frame(self, source: str, raw: bytes) -> None:
        """Add a frame of the open traceback with the same prefix: most lines of a log of tracebacks."""
        lines = self._open[source].lines
        lines.append(raw)
        if len(lines) > MOST_FRAMES:
            del self._open[source]

    def _take(self, raw: bytes, number: int, told: bool, lower: bytes, rest: tuple[int, int]) -> None:
        """Take a line. `told`: its first word indicates failure; `lower[rest]`: the text after that word, in lower case."""
        key = raw.translate(None, _DROPPED)
        if (known := self._special.get(key)) is not None:
            self._again(known, key, raw, number)
        elif (
            told
            or _tells(lower, *rest)
            or (self._open and any(line.source in self._open for line in self._reader.read(raw)))
        ):
            self._examine(key, raw, number)
        elif len(self._special) < MOST_TEMPLATES and (not self._open or _progress(raw.lower())):
            self._special[key] = _Template("", suspect=False, first=number, last=number, progress=True)

    def _again(self, known: _Template, key: bytes, raw: bytes, number: int) -> None:
        known.last, known.count = number, known.count + 1
        if known.mark:
            self.marks[known.mark].append(number)
        elif known.progress:
            self.progress.append(number)
        elif known.count <= SAME_TEMPLATE_LINES or self._open or _BEGINS in known.text:
            self._examine(key, raw, number)
        elif known.hit is not None:
            self._seen_again(known.hit, number)

    def _examine(self, key: bytes, raw: bytes, number: int) -> None:
        if self._examined > MOST_EXAMINED and not self._open and b"Traceback" not in raw:
            self._late.append((key, raw, number))
            return
        for index, line in enumerate(self._reader.read(raw)):
            self._line(line, number, key + b"\0%d" % index if index else key)

    def _line(self, line: Line, number: int, key: bytes) -> None:
        """Handle a line: in a traceback, between two, or alone."""
        source, text = line.source, before_dump(line.text)
        line = line._replace(text=text)
        if _BEGINS in text:
            if text.startswith("Original "):  # of another process, behind the exception that carries it
                self._before[source] = (self._before.get(source, (None, ""))[0], "Ori")
            text = text[text.index(_BEGINS) :]  # behind a logger's words
        opened = self._open.get(source)
        if opened is not None and not text.startswith(_BEGINS):
            self._framed(opened, line, number, key)
        elif text.startswith(_BEGINS):
            self._begin(line._replace(text=text), number, key)
        elif text[:1] in ("\u2502", "\u256d", "\u2570"):
            return  # a traceback in a box: the exception stands below it
        elif text.startswith(("The above exception was the direct", "During handling of the above")):
            hit = self._before.get(source, (None, ""))[0]
            self._before[source] = (hit, text[:3])
        elif text.startswith(("Exception ignored", "--- Logging error")):
            self._ignoring.add(source)
        else:
            self._examined += 1
            if (hit := self._match(key, line, number)) and hit.rule.precedence in EXCEPTION_PRECEDENCES:
                self._before[source] = (hit, "")

    def _begin(self, line: Line, number: int, key: bytes) -> None:
        """Begin a traceback."""
        source, known = line.source, self._special.get(key)
        quoted = (known is None or known.count <= SAME_TEMPLATE_LINES) and self._is_quoted(line.text)
        self._open[source] = _Traceback(ignored=quoted or source in self._ignoring, lines=[line.text])
        raw = self._block[slice(*self._span)]
        self._frames = (raw[: raw.find(_BEGINS.encode())] + b"  ", source)
        self._ignoring.discard(source)
        known = self._keep(key, line, number)
        if known is not None and known.count == 1:
            known.suspect = not self._open[source].ignored

    def _framed(self, opened: _Traceback, line: Line, number: int, key: bytes) -> None:
        """Handle a line of an open traceback, or one that another process printed meanwhile."""
        line = line._replace(text=line.text.removeprefix(" ") if line.text[:2] != "  " else line.text)
        source, text = line.source, line.text
        opened.lines.append(text)
        ends = bool(text) and text[0] not in " \t|+" and _ENDS.match(text) and not says_nothing(text)
        if ends or len(opened.lines) > MOST_FRAMES:
            del self._open[source]
        if ends:
            self._close(opened, line, number, key)

    def _close(self, opened: _Traceback, line: Line, number: int, key: bytes) -> None:
        """A traceback is whole. Of two that follow from each other one counts: a cause before what it was raised from, and
        an exception before the one that was being handled; never one that no rule knows before one that a rule knows.
        """
        before, link = self._before.pop(line.source, (None, ""))
        hit = None if opened.ignored else self._match(key, line, number, opened)
        if hit is not None and before is not None and before is not hit and link:
            its, former = hit.rule.precedence, before.rule.precedence
            raised = its in EXCEPTION_PRECEDENCES and former in EXCEPTION_PRECEDENCES
            later = link == "Ori" or (link == "Dur" and its <= former + 12 if raised else its < former)
            later = later and before.rule.reason != "Cancelled"
            drop = before if later and hit.rule is not UNKNOWN_EXCEPTION else hit
            drop.dropped = True
            hit = before if drop is hit else hit
        self._before[line.source] = (hit or before, "")

    def _match(self, key: bytes, line: Line, number: int, traceback: _Traceback | None = None) -> Hit | None:
        text = line.text
        known = self._keep(key, line, number)
        if known is not None and traceback is not None:
            known.suspect = True  # what raised it may have no word of failure in its name
        if known is not None and known.count > SAME_TEMPLATE_LINES:
            rule = known.hit.rule if known.hit else None
        else:
            rule = None if traceback is None and says_nothing(text) else find_rule(text)
        if rule is None and traceback is not None and _EXCEPTION.match(text):
            rule = None if rule_table().marks["following"].search(text) else UNKNOWN_EXCEPTION
        if rule is None:
            return None
        if traceback is not None and rule.reason in ("ModelLoadingError", "") and traceback.reads_data():
            rule = replace(rule, reason="DatasetLoadingError", precedence=DATA)
        if known is not None and known.hit is not None and known.hit.rule == rule:
            self._seen_again(known.hit, number)
            return known.hit
        if (known is None or known.count <= SAME_TEMPLATE_LINES) and self._is_quoted(text):
            return None
        hit = Hit(
            rule=rule,
            log=self.name,
            line=_around(text, rule),
            number=number,
            last=number,
            soft=traceback is None and self._is_soft(line),
            frame=traceback.frame() if traceback else "",
            source=line.source,
            time=line.time or last_time(self._surroundings()[0]),
            traceback=tuple(map(_text, traceback.lines)) if traceback else (),
        )
        if len(self.hits) < MOST_HITS:
            self.hits.append(hit)
        else:
            self.hits[-1] = hit
        if known is not None:
            known.hit = hit
        return hit

    def _is_soft(self, line: Line) -> bool:
        warns = line.level == "WARNING" or _SOFT.search(line.text) is not None
        return warns and not _FIRM.search(line.text)

    def _seen_again(self, hit: Hit, number: int) -> None:
        """Count a line of the same template again if the program went on after the previous one."""
        if self.survived(hit.last):
            hit.number = number
        hit.last, hit.dropped = number, False

    def _keep(self, key: bytes, line: Line, number: int) -> _Template | None:
        known = self._special.get(key)
        if known is None and len(self._special) < MOST_TEMPLATES:
            text, lower = line.text, line.text.lower().encode()
            silent = (
                says_nothing(text) or _BENIGN.search(text) or _SOFT.search(text) or line.level == "WARNING"
            )
            told = line.level == "ERROR" and any(map(str.isalpha, text))
            suspect = not silent and (told or bool(_SUSPECT.search(text)))
            suspect = suspect and not self._is_quoted(text)
            mark = "" if silent else rule_table().mark(text)
            known = _Template(text[:MOST_SHOWN], suspect=suspect, first=number, last=number, mark=mark)
            known.progress = not suspect and not _tells(lower) and _progress(lower) is not None
            self._special[key] = known
            if mark:
                self.marks[mark].append(number)
        return known

    # --- around a line -----------------------------------------------------------------------------------------------------

    def _surroundings(self) -> tuple[bytes, bytes]:
        start, end = self._span
        before = self._block[max(0, start - CONTEXT_BYTES) : max(0, start - 1)]
        return (self._earlier + b"\n" + before if start < CONTEXT_BYTES else before), self._block[
            end + 1 : end + CONTEXT_BYTES
        ]

    def _is_quoted(self, text: str) -> bool:
        return is_quoted(text, *self._surroundings(), lambda raw: self._reader.read(raw)[0].text)

    def _beginning(self, block: bytes) -> Sequence[bytes]:
        """What is constant of the first lines that say something: when they come again, something has started again."""
        made: list[bytes] = []
        for raw in block.split(b"\n")[:40]:
            text = self._reader.read(raw)[0].text
            if _SUSPECT.search(text):
                break
            pieces = [] if says_nothing(text) or _progress(raw.lower()) else _PIECES.findall(text)
            if pieces and (piece := max(pieces, key=len).encode()) not in made:
                made.append(piece)
        return made[:BANNER_LINES] if len(made) >= BANNER_LINES else ()

    def _find_starts(self, block: bytes, numbers: Sequence[int]) -> None:
        """Find where the banner recurs after a failure."""
        if not self.hits or not self._banner:
            return
        first, index, counted = self._banner[0], 0, 0
        at = block.find(first)
        while at >= 0 and len(self.marks["start"]) < MOST_HITS:
            index, counted = index + block.count(b"\n", counted, at), at
            near = block[at : at + 8 * CONTEXT_BYTES]
            if numbers[index] > self.hits[0].number and all(piece in near for piece in self._banner):
                self.marks["start"].append(numbers[index])
            at = block.find(first, at + 1)

    # --- queries -----------------------------------------------------------------------------------------------------------

    def survived(self, number: int, *, by_progress: bool = True) -> bool:
        """Is the evidence behind this line, of table().weights, enough to say that the program survived what it tells?"""
        counts = {"progress": sum(n > number for n in self.progress) if by_progress else 0}
        counts |= {kind: sum(n > number for n in found[-1:]) for kind, found in self.marks.items()}
        return sum(rule_table().weights[kind] * count for kind, count in counts.items()) >= SURVIVED_WEIGHT

    def telling(self, most: int) -> list[tuple[int, str]]:
        """Return lines that may show a failure unknown to all rules: rare and late ones, in log order."""
        found = [
            t for t in self._special.values() if t.suspect and t.hit is None and not self.survived(t.last)
        ]
        found.sort(key=lambda t: (t.count, -t.last))
        return sorted((t.first, t.text) for t in found[:most])
