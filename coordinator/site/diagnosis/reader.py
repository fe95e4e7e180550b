"""Logs read as logs: any line taken apart into who printed it, when, at which level, and the message. Called from: `log`.

Rule: no launcher, collector or logger is known by name. A prefix is made of kinds of parts (times, levels, hosts, brackets), and
of words that most lines of this log share; a JSON logger's message is the value that differs and has words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CHUNK = 1 << 20  # bytes that a caller reads at once
MOST_LINE = 1 << 16  # bytes of a line that are kept: its beginning and its end
MOST_SHOWN = 400  # characters of a quoted line
MOST_SAMPLE = 1000  # lines that a log's prefixes are learnt from
MIN_SHARED_LINES = 5  # different lines that share a word before it is a prefix, of a longer log 3 ...
MIN_SHARED_PORTION = 0.6  # ... and their part of all; MOST_SPACED where a space alone stands behind it
MIN_SPACED_PORTION = 0.95
TERMINAL_WIDTHS = range(60, 400)  # columns at which a terminal may have broken lines
USUAL_WIDTHS = (80, 100, 120, 132, 160, 200)  # two lines of it tell; of another, more
_BEGINS = re.compile(rb"Traceback|  File|[\w.]*(?:Error|Exception)\b|[a-z]\w*: |\s*$")  # a line of its own
_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|.)")
_DIGITS = re.compile(r"\d")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_CLOCK = r"\d\d:\d\d:\d\d(?:[.,:]\d+)?(?: ?(?:Z\b|UTC|[AP]M\b|[+-]\d\d:?\d\d))?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_TIME = (
    rf"(?:(?:\d{{4}}[-/.]\d\d[-/.]\d\d|\d\d[-/.]\d\d(?:[-/.]\d{{2,4}})?|\d\d?[ /-]{_MONTH}[ /-]\d{{4}})(?:[T ,_:]+{_CLOCK})?"
    rf"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?{_MONTH} {{1,2}}\d\d?,?(?: \d{{4}})?,? {_CLOCK}(?: \d{{4}}(?![-\d]))?|{_CLOCK}|\d{{10}}\.\d+)"
)
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN(?:ING)?|ERR(?:OR)?|SEVERE|CRITICAL|FATAL|debug|info|notice|warn(?:ing)?)"
_PLACE = r"[\w./<>-]+\.(?:py|cpp|cc|cu|c|h|hpp|go|rs):\d+"  # a line of source
_SEPARATED = r"(?:[ \t]*(?:[:|>\]]+|-{1,2}(?= |$)))? ?"
# Parts that a prefix begins with ...
_FIRST = re.compile(
    rf"\s*(?:(?P<time>[\[(]?\b{_TIME}[\])]?)(?![\w/])|\b(?P<letter>[TDIWEF])\d{{4}} {_CLOCK}|\[(?P<glog>[DIWEF])\d{{3,4}} [^\]\n]{{0,80}}\]"
    rf"|[\[(]?(?P<level>{_LEVEL})[\])]?(?=[\s:|\]-]) {{0,4}}"
    r"|\[(?!Errno|enforce)[^\]\n]{0,80}\]|<[\w.]{1,20}>1?|\([\w.: -]{0,40}\b(?:pid|rank|ip)=[^)\n]{0,80}\)"
    r"|std(?:err|out)(?: [FP]\b)?(?=[\s:|>])|\d{1,5}(?=[:>])|(?P<address>(?:\d{1,3}\.){3}\d{1,3})(?::\d+)?(?=[:\s])"
    r"|(?P<host>(?![\w.-]*\.(?:py|sh|cc?|cpp|cu|so|sbatch)\b)(?=[\w.-]*\d)[a-z][a-z\d_-]*(?:\.[a-z\d_-]+)*)(?:(?=: |:$)|(?::\d+){1,2}(?= ))|[\w.-]+(?= +\| )"
    rf"|{_PLACE}(?=[\]:\s])|kernel(?=: )|[TDIWEF](?= {_PLACE}\])|E(?= {{3}}))" + _SEPARATED
)
# ... and parts that stand only behind one: a host with its program, a logger, a process, a function and its line.
_NEXT = re.compile(
    r"(?:[\w.-]+ (?:[\w./-]+\[\d+\]|kernel)(?=: )|(?P<logger>[A-Za-z_][\w.]*)(?= [-|] )|(?<=[A-Z]:)(?![\w.]*(?:Error|Exception|Warning)\b)[a-z_][\w.]*(?=:)|[\w./-]+\[\d+\](?=: )"
    r"|(?P<named>[a-z_][a-z\d_]*\.[a-z\d_.]+)(?=: [A-Z])|\d+(?= )|[\w.<>]+:\w+:\d+|(?:Main|Spawn|Fork|Dummy)\w*(?:-\d+)?(?= )|-(?= ))"
    + _SEPARATED
)
_RANK = re.compile(r"(?i:\brank|default|pid=) ?(\d+)|\[\d+,(\d+)\]|^\s*(\d{1,5})[:>]")
_HEAD = re.compile(r"([ \t]*)([\w.@/+-]+)([ \t]*[|:>]+ ?| |$)")
_NO_HEAD = re.compile(r"(?i)step|iter|epoch|loss|file|\w*(?:error|exception|warning|traceback)")
_PAIRS = re.compile(r'([\w.@/-]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?:\s+|$)')
# keys of values that are no messages
_SAMPLES = re.compile(
    r"(?i)\w*(?:prompt|completion|generat\w+|question|answer|response|sample|target|prediction|reference|output|input|document|config|argument|arg|hparam|setting"
    r"|override|env(?:iron(?:ment)?)?)s?"
)
_NCCL = re.compile(r":\d+:\d+ \[\d+\] ")  # its warnings are errors
_SPOKEN = re.compile(
    r"(?i)@?(?:message|msg|event|log|text|body|error|err|reason|exception|exc|detail|level|lvl|severity|time|ts)(?:[_A-Z].*|payload|stamp)?$"
)
LEVELS = dict(zip("idtwef", ("INFO", "DEBUG", "TRACE", "WARNING", "ERROR", "ERROR"), strict=True))
LEVELS |= {name: name.upper() for name in ("trace", "debug", "info", "notice", "success", "warning", "error")}
LEVELS |= dict.fromkeys(("critical", "fatal", "err", "severe"), "ERROR") | {"warn": "WARNING"}


_TIMES = re.compile(rf"\b{_TIME}".encode())


def last_time(before: bytes) -> str:
    """The last time that stands in these lines, or ""."""
    found = _TIMES.findall(before)
    return found[-1].decode() if found else ""


class Line(NamedTuple):
    """`source`: the rank or host that printed it; `time`: as it stands there; `level`: such as WARNING or ERROR, or ""; `text`: the message
    with its own indentation.
    """

    source: str
    time: str
    level: str
    text: str


def line_blocks(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Whole lines joined by newlines, and their numbers from 1. What carriage returns part has one number."""
    number, rest = 1, b""
    width: int | None = None
    for chunk in chunks:
        data = rest + chunk.replace(b"\r\n", b"\n")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        whole, rest = data[:end], data[end:]
        if len(rest) > MOST_LINE:
            rest = rest[: MOST_LINE // 2] + b" ... " + rest[-MOST_LINE // 2 :]
        if whole:
            width = _width(whole) if width is None else width
            yield _numbered(whole[:-1], number, width)
            number += whole.count(b"\n")
    if rest:
        yield _numbered(rest, number, width or 0)


def _width(block: bytes) -> int:
    """Columns at which all longer lines were broken, mostly within a sentence; 0 where none was. Lines of one template are as
    long by nature.
    """
    lines = block.split(b"\n", MOST_SAMPLE)[:MOST_SAMPLE]
    longest = max(map(len, lines))
    full = [_DIGITS.sub("", plain_text(line)) for line in lines if len(line) == longest]
    enough = len(set(full)) == len(full) > (1 if longest in USUAL_WIDTHS else MIN_SHARED_LINES)
    within = sum(not line.endswith(tuple(".:;?!)]}>\"'")) for line in full)
    return longest if longest in TERMINAL_WIDTHS and enough and 2 * within > len(full) else 0


def _numbered(block: bytes, first: int, width: int) -> tuple[bytes, Sequence[int]]:
    if b"\r" not in block and not width:
        return block, range(first, first + block.count(b"\n") + 1)
    numbers: list[int] = []
    lines: list[bytes] = []
    broken = False
    for number, line in enumerate(block.split(b"\n"), first):
        if broken and line and not _BEGINS.match(line) and not _prefix(plain_text(line))[0]:
            lines[-1] += line
        else:
            parts = [part for part in line.split(b"\r") if part] or [b""]
            lines += parts
            numbers += [number] * len(parts)
        broken = len(line) == width > 0 and len(set(line[-6:])) > 1
    return b"\n".join(lines), numbers


def plain_text(raw: bytes) -> str:
    """A line as text that commands no terminal; of a long one its beginning and its end."""
    if len(raw) > 2 * MOST_SHOWN * 4:
        raw = raw[: MOST_SHOWN * 4] + b" ... " + raw[-MOST_SHOWN * 4 :]
    text = raw.decode(errors="replace")
    return (text if text.isprintable() else _CONTROL.sub("", _ANSI.sub("", text))).rstrip()


class Reader:
    """How the lines of one log are taken apart, as its first ones tell."""

    def __init__(self, block: bytes = b"") -> None:
        raw = block.split(b"\n")
        some = [plain_text(line) for line in raw[:: len(raw) // MOST_SAMPLE + 1] if line]
        # lines that differ in more than numbers
        sample = list({_DIGITS.sub("", text): text for text in some if text}.values())
        self._heads: list[re.Pattern[str]] = []
        self._ends: Counter[str] = Counter()
        self._glued = False  # no space stands between prefix and message
        self._margin = 0
        self._least = MIN_SHARED_LINES if len(some) < 20 else 3
        self._message = self._learnt_key(sample)
        texts = [message for text in sample for message in self._messages(text)]
        self._margin = min((len(text) - len(text.lstrip()) for text in texts if text), default=0)
        self._learn([text[self._margin :] for text in texts])
        self._message = self._message or self._learnt_key(sample)  # behind a prefix
        lines = [line for text in sample for line in self._lines(text)]
        self._glued = self._ends[":"] > self._ends[" "]
        levels = Counter(line.level for line in lines).most_common(1)
        self._usual = (
            levels[0][0]
            if levels and levels[0][1] > max(MIN_SHARED_LINES, MIN_SHARED_PORTION * len(lines))
            else ""
        )
        told = sum(bool(line.source) for line in lines) > MIN_SHARED_LINES
        self.is_log = told or bool(self._message) or any(line.time or line.level for line in lines)

    def read(self, raw: bytes) -> list[Line]:
        """A line's messages: several where a JSON logger put a traceback into one. A level that most lines have says nothing."""
        return [
            line._replace(level="") if line.level == self._usual else line
            for line in self._lines(plain_text(raw))
        ]

    def _lines(self, text: str, depth: int = 0) -> list[Line]:
        spoken = self._spoken(text)
        if spoken is None or depth > 1:
            return [self._taken_apart(text)]
        where, time, level, messages = spoken
        lines = [line for message in messages for line in message.split("\n")]
        inner = [made for line in lines for made in self._lines(line, depth + 1)]
        return [Line(i.source or where, i.time or time, i.level or level, i.text) for i in inner]

    def _learnt_key(self, sample: Sequence[str]) -> str:
        objects = [found for text in sample if (found := self._object(text))]
        return _message_key(objects) if 2 * len(objects) > len(sample) else ""

    def _messages(self, text: str) -> list[str]:
        spoken = self._spoken(text)
        return spoken[3] if spoken else [text]

    def _spoken(self, text: str) -> tuple[str, str, str, list[str]] | None:
        values = self._object(text) if "{" in text[:200] or "=" in text else None
        return _spoken(values, self._message) if values else None

    def _object(self, text: str) -> dict[str, Any] | None:
        """What a line of JSON, or of key=value pairs, holds."""
        start = text.find("{")
        if start >= 0 and text.endswith("}") and text[start + 1 :].lstrip()[:1] == '"':
            if start and start != len(text) - len(self._taken_apart(text).text):
                return None
            try:
                return dict(json.loads(text[start:]))
            except (ValueError, TypeError):
                return None
        pairs = _PAIRS.findall(text) if text[:1].islower() and '="' in text else ()
        if len(pairs) > 1 and text.startswith(pairs[0][0] + "="):
            return {name: _unquoted(value) for name, value in pairs}
        return None

    def _taken_apart(self, text: str) -> Line:
        margin = min(self._margin, len(text) - len(text.lstrip()))
        at, time, level, host = _prefix(text, margin)
        for head in self._heads:
            found = head.match(text, at)
            if found is None:
                break
            host = host or found[0].strip(" \t:|>")
            more, later, its, _ = _prefix(text, found.end(), inside=True)
            at, time, level = more, time or later, level or its
        self._ends[text[at - 1 : at]] += 1
        if self._glued and text[at - 2 : at] in (": ", "> ") and text[at : at + 1] == " ":
            at -= 1
        rank = _RANK.search(text, 0, at) if at else None
        source = next(filter(None, rank.groups()), "") if rank else host
        return Line(source, time, level, text[at:])

    def _learn(self, sample: Sequence[str]) -> None:
        """Words that most lines have in front, one after the other."""
        rest = [text[_prefix(text)[0] :] for text in sample]
        while len(self._heads) < 8:
            heads = [found for text in rest if (found := _HEAD.match(text)) and not _NO_HEAD.match(found[2])]
            if not heads:
                break
            shape = Counter(map(_shape, heads)).most_common(1)[0][0]
            spaced = shape[1].endswith("$)")
            head = re.compile(shape[0] + shape[1])
            behind = [text[found.end() :] for text in rest if (found := head.match(text))]
            if len(behind) < max(
                self._least, len(rest) * (MIN_SPACED_PORTION if spaced else MIN_SHARED_PORTION)
            ):
                break
            if (
                spaced
                and not self._heads
                and "\\d" not in shape[0]
                and not any(t[:1] in " \t" for t in behind)
            ):
                break
            self._heads.append(head)
            rest = [text[_prefix(text, inside=True)[0] :] for text in behind]


def _shape(head: re.Match[str]) -> tuple[str, str]:
    """An expression of such words, and of what stands behind them."""
    word = re.escape(head[2])
    if any(c.isdigit() or c == "-" for c in head[2]):
        word = r"[\w.@/+-]*[\d-][\w.@/+-]*"
    behind = re.escape(head[3].strip())
    return r"[ \t]*" + word, rf"[ \t]*{behind} ?" if behind else "(?: |$)"


def _prefix(text: str, at: int = 0, *, inside: bool = False) -> tuple[int, str, str, str]:
    """Where the message begins behind parts of known kinds, and the time, level and host among them."""
    time = level = host = ""
    while at < len(text):
        found = _FIRST.match(text, at) or (_NEXT.match(text, at) if inside else None)
        if found is None or found.end() == at:
            break
        parts = found.groupdict()
        if parts.get("named") and not level:
            break
        host = host or parts.get("host") or parts.get("address") or ""
        time = time or (parts.get("time") or "").strip("[]()")
        said = parts.get("level") or parts.get("letter") or parts.get("glog") or ""
        level = level or LEVELS.get(said.lower(), said.upper())
        if level == "WARNING" and _NCCL.search(text, 0, at):
            level = "ERROR"
        at, inside = found.end(), True
    return at, time, level, host


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value.strip('"')


def _is_words(value: Any) -> bool:
    return (
        isinstance(value, str)
        and any(c.isalpha() for c in value)
        and re.fullmatch(_TIME, value.strip("Z")) is None
        and value.lower() not in LEVELS
    )


def _message_key(objects: Sequence[Mapping[str, Any]]) -> str:
    """The key whose values differ most and have words."""
    words: Counter[str] = Counter()
    for key in {key for found in objects for key in found}:
        values = {str(found[key]) for found in objects if _is_words(found.get(key))}
        if not _SAMPLES.fullmatch(key):
            words[key] = sum(len(value) + 100 * (" " in value) for value in values)
    return max(words, key=words.__getitem__, default="")


def _spoken(values: Mapping[str, Any], key: str) -> tuple[str, str, str, list[str]] | None:
    """Who, when, at which level, and the messages of a logger's object; None of one that holds none, as a configuration."""
    inner = list(
        _reasons([v for k, v in values.items() if isinstance(v, dict | list) and not _SAMPLES.fullmatch(k)])
    )
    if not (key in values or any(map(_SPOKEN.match, values))):
        return ("", "", "", inner) if inner else None
    key = key if isinstance(values.get(key), str) else _message_key([values])
    texts = [v for k, v in values.items() if k != key and not _SAMPLES.fullmatch(k) and isinstance(v, str)]
    rank = next((str(v) for k, v in values.items() if k.lower().endswith("rank")), "")
    time = next((t for t in texts if re.match(_TIME, t)), "")
    level = next((LEVELS[t.lower()] for t in texts if t.lower() in LEVELS), "")
    more = [t for t in texts if _is_words(t) and " " in t]
    said = [
        _ANSI.sub("", text).rstrip("\n") for text in (values.get(key), *more, *inner) if isinstance(text, str)
    ]
    return (rank, time, level, said) if said else None


def _reasons(values: Iterable[Any]) -> Iterator[str]:
    """What nested values say under keys that name a reason, such as the status of a pod."""
    for value in values:
        if isinstance(value, dict):
            yield from (v for k, v in value.items() if _SPOKEN.match(k) and _is_words(v))
            yield from _reasons(value.values())
        elif isinstance(value, list):
            yield from _reasons(value)
