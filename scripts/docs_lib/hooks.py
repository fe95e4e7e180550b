"""Hooks of mkdocs: the site shows what a forge shows of the same pages. Named in mkdocs.yml.

Rule: pages are plain Markdown with links between files of the repository; what a site needs besides is made here. Pages and
files outside docs/ that a page links to become pages and texts of the folder `project` of the site. Python-Markdown wants an
empty line before a list or table, and four columns before a block within an item; tests/docs/test_site.py compares.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
UNSEARCHED = ("decisions.md", "project/changelog.md")  # history: a reader's question is answered elsewhere
LAST = ("architecture.md", "benchmarks.md")  # of what a search finds
ASSETS = ("worker-in-a-frame.js", "site.css")  # beside this module

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
# for the tests of a page's examples
COMMENT = re.compile(r"^ *<!-- example:.*?-->\n", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors by GitHub's rule; the script that lets search work from a folder comes from the site itself."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    config.extra["polyfills"] = ["assets/worker-in-a-frame.js?iframe-worker"]
    config.extra_css.append("assets/site.css")
    return config


def anchor(heading: str, separator: str) -> str:
    """A heading's name in links."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def place(path: Path) -> str:
    """Where a file of the repository is, as a name below docs/; README.md would become a folder's index."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"project/{name.lower()}" if path.suffix == ".md" else f"project/{name}.txt"


def source(uri: str) -> Path:
    """The file that a page of the site is made from."""
    return next((ROOT / name for name in TOP_PAGES if place(ROOT / name) == uri), ROOT / "docs" / uri)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder, and each file outside docs/ that a page links to."""
    texts = {place(ROOT / name): (ROOT / name).read_text(encoding="utf-8") for name in TOP_PAGES}
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()} | texts
    for uri, text in pages.items():
        for target in _outside(source(uri), text):
            texts.setdefault(place(target), shown(target))
    texts |= {f"assets/{name}": (Path(__file__).parent / name).read_text() for name in ASSETS}
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    return files


def shown(path: Path) -> str:
    """A file's text; of a folder, the names in it."""
    if path.is_dir():
        return "\n".join(sorted(one.name for one in path.iterdir() if one.name[0] not in "._")) + "\n"
    return path.read_text(encoding="utf-8")


def _outside(page: Path, text: str) -> Iterator[Path]:
    """Files of the repository outside docs/ that the page links to."""
    for link, _ in LINK.findall(FENCE.sub("", text)):
        target = _target(page, link)
        if target is not None and not target.is_relative_to(ROOT / "docs") and target.exists():
            yield target


def _target(page: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to; None: an address."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = Path(os.path.normpath(page.parent / link))
    return target if target.is_relative_to(ROOT) else None


def on_page_markdown(markdown: str, *, page: Page, **_others: Any) -> str:
    """The page's text for mkdocs: outside of blocks links lead to where the site has their targets, and comments go."""
    here = page.file.src_uri
    if here in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    if here in LAST:
        page.meta["search"] = {"boost": 0.2}

    def linked(match: re.Match[str]) -> str:
        target = _target(source(here), match[1])
        if target is None:
            return match[0]
        return posixpath.relpath(place(target), posixpath.dirname(here) or ".") + (match[2] or "")

    text, at = "", 0
    for block in FENCE.finditer(markdown):
        text += LINK.sub(linked, COMMENT.sub("", markdown[at : block.start()])) + block[0]
        at = block.end()
    return text + LINK.sub(linked, COMMENT.sub("", markdown[at:]))
