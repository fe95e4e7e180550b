"""docs/reference: pages that are written from the code. `write` writes them again, `stale` names those that differ.

Rule: what a page says stands in the code: in types, docstrings, comments of fields, help texts. A module here reads one of
these sources; it holds headings and one sentence a page of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from docs_lib.reference.commands import commands_page
from docs_lib.reference.exits import exits_page
from docs_lib.reference.files import files_page
from docs_lib.reference.metrics import metrics_page
from docs_lib.reference.python_api import python_page
from docs_lib.reference.settings import settings_page
from docs_lib.reference.suite_file import suite_page
from docs_lib.reference.text import ROOT, page, table

FOLDER = ROOT / "docs" / "reference"
INTRO = """What can be set, typed, called and read, from the code."""


def index_page() -> str:
    """The pages, each with the first sentence of it."""
    rows = []
    for name, make in PAGES.items():
        if name != "index.md":
            title, _, text = make().removeprefix("# ").partition("\n\n")
            first = re.split(r"(?<=[.;]) (?=[A-Z`])", " ".join(text.partition("\n\n")[0].split()))[0]
            rows.append([f"[{title}]({name})", first])
    return page("Reference", INTRO, table(["page", "holds"], rows))


PAGES: Mapping[str, Callable[[], str]] = {
    "index.md": index_page,
    "settings.md": settings_page,
    "cli.md": commands_page,
    "exit-codes.md": exits_page,
    "suite-file.md": suite_page,
    "python.md": python_page,
    "files.md": files_page,
    "metrics.md": metrics_page,
}


def stale() -> list[str]:
    """Pages that say something else than the code does now, or that nothing writes."""
    there = {file.name for file in FOLDER.glob("*.md")}
    changed = [
        name
        for name, make in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != make()
    ]
    return sorted({*changed, *(there - PAGES.keys())})


def write() -> list[str]:
    """Write all pages; the names of those that changed."""
    changed = stale()
    FOLDER.mkdir(exist_ok=True)
    for name in changed:
        if name in PAGES:
            (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return changed
