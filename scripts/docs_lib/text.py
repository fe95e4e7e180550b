"""Markdown of the generated pages, and what comments and docstrings of the code say. Pure but for reading source files."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = "`scripts/docs reference` writes this page from the code."


def page(title: str, intro: str, *parts: str) -> str:
    """A page of the reference: each part is a section or a paragraph."""
    return "\n\n".join([f"# {title}", plain(f"{intro} {WRITTEN}"), *(part for part in parts if part)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    if not lines:
        return ""
    head = [list(heads), ["---"] * len(heads)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


def code(text: str) -> str:
    """Inline code; "" stays empty."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{' '.join(text.split())}{fence}" if text else ""


def plain(text: str) -> str:
    """Prose of a docstring or comment, with links to the pages that it names by their path in the repository."""
    said = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text))
    said = re.sub(r"\(docs/([\w/.-]+\.md(?:#[\w-]+)?)\)", r"([more](../\1))", said)
    return "\n\n".join(map(_wrapped, re.split(r"\n\s*\n", _outside_code(said))))


def _wrapped(paragraph: str) -> str:
    """Lines of at most 100 characters, with inline code on one; a list stays as it is."""
    if paragraph.startswith(("- ", "|", " ")):
        return paragraph
    held = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\xa0"), " ".join(paragraph.split()))
    return textwrap.fill(held, 100, break_long_words=False, break_on_hyphens=False).replace("\xa0", " ")


def _outside_code(text: str) -> str:
    """Without the meaning that Markdown gives to `*` and `<` in prose."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if i % 2 else re.sub(r"\*|<(?=[a-z])", r"\\\g<0>", part) for i, part in enumerate(parts)
    )


def literal(value: Any) -> str:
    """A default as one would type it, as inline code."""
    if value is None:
        return ""
    return code(json.dumps(value, ensure_ascii=False))


def first_upper(text: str) -> str:
    """As a sentence begins, but for names of files and lists of words."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+(?:-[a-z]+)*(?![\w.-])(?! \|)", text) else text


# --- comments of the code ----------------------------------------------------------------------------------------------


def field_notes(of: type) -> dict[str, str]:
    """Field -> its comment: behind it, or in the lines above it. Base classes included."""
    notes: dict[str, str] = {}
    for each in reversed(of.__mro__):
        if each.__module__.split(".")[0] in ("coordinator", "evaljobs", "priors"):
            notes |= _notes_of(inspect.getsource(each))
    return notes


def _notes_of(source: str) -> dict[str, str]:
    notes: dict[str, list[str]] = {}
    name, above = "", list[str]()
    for line in source.splitlines():
        if field := re.match(r" {4}(\w+)(?::| =) ", line):
            name, notes[field[1]], above = field[1], above, []
        if said := re.search(r"(?:^ {3}| ) # (?!noqa|type: |fmt: )(.*?)(?: +# noqa.*)?$", line):
            (above if line.startswith("    #") else notes.setdefault(name, [])).append(said[1])
        elif not line.strip():
            name, above = "", []
    return {field: " ".join(said) for field, said in notes.items() if field and said}
