"""Blocks of a page of the documentation, and the table that says where each page's examples run.

Rule: pure but for reading the pages; a block that keeps no convention is a ValueError that names page and line.
Called from tests/docs and `scripts/docs check`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
TABLE = ROOT / "tests" / "docs" / "examples.toml"

COMMENT = re.compile(r"<!--\s*example:\s*(.*?)\s*-->", re.DOTALL)
TITLE = re.compile(r'(\w+) title="([^"]+)"')
# "run by PATH" and "not run: REASON" reach to the comment's end; the others are separated by ";"
MARK = re.compile(
    r'(?P<by>run by (?P<test>\S+))|not run: (?P<reason>.+)|shows "(?P<shows>[^"]+)"|exits (?P<exits>\d+)'
    r"|(?P<background>in the background)|(?P<added>added to the file)"
)
OTHER_SHELLS = {"bash", "shell", "console", "shell-session", "zsh"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its text, and what the comment before it says of its run. `line`: of its first line on the page."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    shows: tuple[str, ...] = ()
    sample: str = ""  # the ```text block that follows, unless it is marked as not run
    exits: int = 0
    background: bool = False
    added: bool = False
    run_by: str = ""
    not_run: str = ""

    @property
    def runnable(self):
        """Commands, code, or a file that the reader writes."""
        return self.language in {"sh", "python"} or bool(self.title)

    @property
    def run_here(self):
        return self.runnable and not (self.run_by or self.not_run)

    @property
    def place(self):
        return f"{_name(self.page)}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A page's row of the table. `words`: capitals on the page → what the run puts there, for a shell to read; `found`:
    capitals → a pattern, whose first group is looked for in the output so far, last match first; `needs`: modules that
    evalspan does not bring, without which the page is skipped; `small`: words for a run of the page in small.
    """

    on: str = "local"
    given: tuple[str, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    small: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def __post_init__(self):
        if self.on not in {"local", "slurm"}:
            raise ValueError(f'on = "{self.on}": say "local" or "slurm"')


def pages():
    """Each page by its name in the table: relative to docs/, or a file of the top folder."""
    found = {str(page.relative_to(DOCS)): page for page in DOCS.rglob("*.md")}
    return found | {page.name: page for page in ROOT.glob("*.md")}


def table():
    """Rows by page."""
    read = tomllib.loads(TABLE.read_text())
    return {name: Entry(**{**row, "given": tuple(row.get("given", ()))}) for name, row in read.items()}


def blocks(page):
    """The fenced blocks of a page, in order, each with its sample. ValueError: as of `_blocks`."""
    found = list(_blocks(page))
    for block, behind in pairwise([*found, None]):
        is_sample = behind and behind.language == "text" and not (behind.title or behind.not_run)
        yield replace(block, sample=behind.text) if is_sample else block


def _blocks(page):
    """ValueError: a block without a language, an indented code block, a mark that does not exist or that marks nothing."""
    comment = None
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        here = f"{_name(page)}:{token.map[0] + 1}" if token.map else _name(page)
        if token.type == "code_block":
            raise ValueError(f"{here}: an indented code block; write ```sh (commands) or ```text (output)")
        if token.type == "fence":
            yield _block(page, token, here, comment)
            comment = None
        elif comment is not None and token.type != "html_block":
            raise ValueError(f"{here}: the example's comment before this line stands before no block")
        elif token.type == "html_block" and (said := COMMENT.search(token.content)):
            comment = f"{comment}; {said[1]}" if comment else said[1]


def _name(page):
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def _block(page, token, here, comment):
    titled = TITLE.fullmatch(token.info.strip())
    language, title = titled.groups() if titled else (token.info.strip(), "")
    if not re.fullmatch(r"\w+", language):
        raise ValueError(
            f'{here}: a block needs one language, and for a file that the reader writes title="NAME"'
        )
    if language in OTHER_SHELLS:
        raise ValueError(f"{here}: write ```sh for commands, ```text for output, not ```{language}")
    marks = {
        "page": page,
        "line": token.map[0] + 2,
        "language": language,
        "title": title,
        "text": token.content,
    }
    return Block(**marks, **_marks(comment or "", here))


def _marks(comment, here):
    marks = {"shows": ()}
    rest = " ".join(comment.split())
    while rest:
        found = MARK.match(rest)
        if found is None:
            raise ValueError(f"{here}: no such mark of an example: {rest}")
        if found["by"]:
            marks["run_by"] = found["test"]
        elif found["reason"]:
            marks["not_run"] = found["reason"]
        elif found["shows"]:
            marks["shows"] += (found["shows"],)
        elif found["exits"]:
            marks["exits"] = int(found["exits"])
        else:
            marks["background" if found["background"] else "added"] = True
        rest = rest[found.end() :].lstrip("; ,")
    return marks
