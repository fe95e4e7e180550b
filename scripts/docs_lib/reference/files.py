"""docs/reference/files.md: each file that evalspan writes, from comments "File PATTERN: what | who writes it | when it goes"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docs_lib.reference.text import ROOT, code, first_upper, page, plain, table

INTRO = """Each file and folder that evalspan writes, and when it goes. Words in capitals stand for any name, `…` for everything
below a folder. Who may read them: [permissions of the work
folder](../security.md#permissions-of-the-work-folder)."""
NOTE = re.compile(r"# File (\S+): (.*)")
MORE = re.compile(r"#(?: \s*(?!File )(.+))")
CAPITALS = re.compile(r"[A-Z]+(?:_[A-Z]+)*")
EVALUATION, WORK = "WORK_DIR/ID/", "WORK_DIR/"
SECTIONS = {
    EVALUATION: (
        "Files of an evaluation",
        "`ID` is its id. Archived: put into `files.zip` at its end, where there are more than 60.",
    ),
    WORK: ("Files that evaluations of a work folder share", ""),
    "CHECKPOINT/": ("Files in a checkpoint's folder", ""),
    "/dev/shm/": ("Node memory", "Below the first of `[stage] roots` that has room, by default `/dev/shm`."),
    "": ("Files elsewhere", "`./` is the current folder."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file, or everything below a folder. `goes`: when it is removed, and by what."""

    pattern: str
    what: str
    writer: str
    goes: str

    def matches(self, path: str) -> bool:
        """Is this file, below WORK_DIR/ or by its full path, one of these?"""
        parts = [
            re.escape(part)
            for part in re.split(f"({CAPITALS.pattern}|…)", self.pattern.replace("WORK_DIR", "work"))
        ]
        found = [".+" if part == "…" else "[^/]+" if CAPITALS.fullmatch(part) else part for part in parts]
        return re.fullmatch("".join(found), path) is not None


def files_page() -> str:
    left, parts = entries(), []
    for start, (title, what) in SECTIONS.items():
        mine = [each for each in left if each.pattern.startswith(start)]
        left = [each for each in left if each not in mine]
        parts += [f"## {title}", what, _table(mine)]
    return page("Files", INTRO, *parts)


def _table(found: Iterable[Entry]) -> str:
    rows = [
        [code(each.pattern), *(plain(first_upper(text)) for text in (each.what, each.writer, each.goes))]
        for each in sorted(found, key=lambda e: e.pattern)
    ]
    return table(["file", "holds", "written by", "goes"], rows)


def entries() -> list[Entry]:
    """All entries of the code, in no order. ValueError for a comment of another form."""
    files = [
        *(f for room in ("coordinator", "evaljobs", "priors") for f in sorted((ROOT / room).rglob("*.py")))
    ]
    return [each for file in [*files, *sorted((ROOT / "scripts").glob("*.sbatch"))] for each in _of(file)]


def _of(file: Path) -> Iterator[Entry]:
    pattern, text = "", ""
    for line in [*file.read_text(encoding="utf-8").splitlines(), ""]:
        line = line.strip()  # noqa: PLW2901 (the indentation says nothing)
        more = MORE.fullmatch(line)
        if pattern and more and not line.startswith("# Exit codes:"):
            text += f" {more[1]}"
            continue
        if pattern:
            what, writer, goes = text.split(" | ")
            yield Entry(pattern=pattern, what=what, writer=writer, goes=goes)
        note = NOTE.fullmatch(line)
        pattern, text = (note[1], note[2]) if note else ("", "")
