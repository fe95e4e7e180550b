"""Laws of the documentation as a site: it builds without a warning, shows each page as a forge does, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from support.examples.pages import ROOT, pages

if "EVERY_PAGE" not in os.environ:
    pytest.skip("scripts/check --deep builds the site", allow_module_level=True)
pytest.importorskip("mkdocs", reason="needs the extra docs: pip install -e '.[docs]'")
pytest.importorskip("material", reason="needs the extra docs: pip install -e '.[docs]'")

# what a reader sees as structure; the site's own elements (permalinks, copy buttons) have other names
STRUCTURE = {"ol", "ul", "li", "pre", "table", "tr", "th", "td", "img", "h1", "h2", "h3", "h4"}


class _Elements(HTMLParser):
    """Elements of a page: all, and those of its article."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.article: Counter[str] = Counter()
        self._inside = "<article" not in html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        self._inside = self._inside or tag == "article"
        if self._inside and tag in STRUCTURE:
            self.article[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._inside = False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once; a warning of mkdocs ends the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    unlisted = re.search(r"not included in the .nav.*", done.stderr, re.DOTALL)
    assert unlisted is None, unlisted and unlisted[0]
    return folder


def test_each_page_is_in_the_site_and_shown_as_a_forge_shows_it(site):
    """As many headings, lists' items, tables' cells and blocks as CommonMark reads in the page."""
    other = {}
    for name, page in pages().items():
        place = f"project/{name.lower()}" if page.parent == ROOT else name
        html = (site / place).with_suffix(".html").read_text()
        forge = _Elements(MarkdownIt().enable("table").render(page.read_text())).article
        if (shown := _Elements(html).article) != forge:
            other[name] = {tag: (forge[tag], shown[tag]) for tag in STRUCTURE if forge[tag] != shown[tag]}
    assert not other, "page → element → (Markdown, site)"


def test_nothing_is_loaded_from_another_host(site):
    """Scripts, styles, fonts and images are files of the site; a link that a reader may follow is no load."""
    lost = []
    for page in site.rglob("*.html"):
        for tag, attrs in _Elements(page.read_text()).all:
            loaded = attrs.get("src") or (attrs.get("href") if tag == "link" else None)
            if not loaded or loaded.startswith("data:"):
                continue
            address = urlsplit(loaded)
            file = (page.parent / address.path).resolve()
            root = page.name == "404.html" and (site / address.path.lstrip("/")).exists()
            if address.netloc or address.scheme or not (file.exists() or root):
                lost.append(f"{page.relative_to(site)}: {tag} {loaded}")
        # the theme fetches a library for these alone
        assert not re.search(r'class="[^"]*\bmermaid\b', page.read_text()), page
    for style in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        lost += [
            f"{style.name}: {url}"
            for url in re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^)'\"]+)", style.read_text())
        ]
    assert not lost


def test_links_to_files_outside_docs_are_in_the_site_and_comments_for_the_examples_are_not(site):
    linked = set(re.findall(r'href="(project/tests/[^"]+)"', (site / "security.html").read_text()))
    assert linked
    for link in linked:
        source = ROOT / link.removeprefix("project/").removesuffix(".txt")
        assert (site / link).read_text() == source.read_text()
    assert not [page.name for page in site.rglob("*.html") if "<!-- example:" in page.read_text()]
