"""Laws of the pictures: those drawn from code and plans are current, load nothing, and say in words what they show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from pictures import packing
from pictures.__main__ import DRAWN

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = [*DRAWN, "time.svg"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_picture_is_what_the_code_draws_today(name):
    """`scripts/draw-pictures` mends it; the page's figures then change with it."""
    assert (DOCS / "pictures" / name).read_text() == DRAWN[name]()


def test_packing_md_quotes_the_figures_of_its_picture():
    text = (DOCS / "explanation" / "packing.md").read_text()
    found = packing.figures()
    rows = [row for row in found.values() if isinstance(row, dict)]
    assert f"{found['lower bound']:,} s" in text
    for row in rows:
        assert f"| {row['seconds']:,} s | {row['over the bound']} | {row['model loads']} |" in text
        assert f"| {100 * row['busy']:.1f} % |" in text


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_explanation_loads_nothing(name):
    assert not re.search(r"url\(|@import|<image|<script|href", (DOCS / "pictures" / name).read_text())


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_explanation_says_in_words_what_it_shows(name):
    root = ET.parse(DOCS / "pictures" / name).getroot()  # noqa: S314 (our own file)
    assert root.get("role") == "img"
    assert len(root.findtext(f"{SVG}title") or "") > 20
    assert len(root.findtext(f"{SVG}desc") or "") > 80
