"""Laws of the maps in docs/architecture.md and CONTRIBUTING.md: each file and each name in them is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"`([\w/]+(?:\.py|/))`(?:: | \()?((?:`[A-Za-z_][\w.]*`(?:, )?)*)")
NAME = re.compile(r"`([\w.]+)`")


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows below a table's head."""
    found = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    return [row for row in found if row[0].strip("-") and not re.fullmatch(r"-*", row[-1] or "x")]


def names_in(file: Path) -> set[str]:
    """What a module defines: functions, classes, constants, and `Class.member`."""

    def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield prefix + name
                case ast.ClassDef(name=name, body=members):
                    yield from (name, *defined(members, f"{name}."))
                    yield from defined(members)
                case ast.Assign(targets=targets):
                    yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return set(defined(ast.parse(file.read_text()).body))


def lost(text: str) -> list[str]:
    """Places and names of a text that are not there; a file without a folder lies in that of the file before it."""
    missing, folder = [], ROOT
    for place, names in PLACE.findall(text):
        file = ROOT / place if "/" in place else folder / place
        folder = file.parent
        if not file.exists():
            missing.append(place)
        elif file.suffix:
            missing += [f"{place}: {name}" for name in NAME.findall(names) if name not in names_in(file)]
    return missing


def test_each_place_that_an_architecture_row_names_is_there() -> None:
    """The index and the reading tour: `file: function or constant`, or a word on where else to look."""
    index = section(ARCHITECTURE, "Where is it decided?")
    assert lost(section(ARCHITECTURE, "Reading tour") + index) == []
    assert [question for question, place in rows(index)[1:] if "`" not in place and "](" not in place] == []


def test_each_place_that_contributing_names_is_there() -> None:
    """A file of the list that has NAME in it is one to be made."""
    listed = "\n".join(" ".join(row) for row in rows(section(CONTRIBUTING, "How to add")))
    assert [
        place for place in lost(listed + section(CONTRIBUTING, "Where things go")) if "NAME" not in place
    ] == []


def test_the_table_of_rooms_is_that_of_the_folders() -> None:
    """Each room once, and the file at which its reading starts."""
    named = []
    text = section(ARCHITECTURE, "Rooms")
    for house, table in zip(("coordinator", "evaljobs"), text.split("| room of `")[1:], strict=True):
        for rooms, _holds, start in rows("|" + table)[1:]:
            for place in (ROOT / house / room for room in re.findall(r"`([\w/.]+)`", rooms)):
                named += [place] * place.is_dir()
                assert place.exists(), place
                assert all((place / file).exists() for file in NAME.findall(start)), (place, start)
    there = [
        init.parent for house in ("coordinator", "evaljobs") for init in (ROOT / house).glob("*/__init__.py")
    ]
    assert sorted(named) == sorted(there)


def test_each_word_of_the_table_is_used_in_code() -> None:
    source = " ".join(
        file.read_text().lower()
        for room in ("coordinator", "evaljobs", "priors")
        for file in (ROOT / room).rglob("*.py")
    )
    words = [word for row in rows(section(ARCHITECTURE, "Words"))[1:] for word in row[0].lower().split(", ")]
    assert [word for word in words if word not in source] == []
