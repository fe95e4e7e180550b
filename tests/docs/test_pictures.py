"""Laws of the pictures of the explanation: they load nothing, and say in words what they show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = [
    "exactness.svg",
    "machine.svg",
    "overview.svg",
    "phases.svg",
    "staging.svg",
    "time.svg",
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_explanation_loads_nothing(name):
    assert not re.search(r"url\(|@import|<image|<script|href", (DOCS / "pictures" / name).read_text())


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_explanation_says_in_words_what_it_shows(name):
    root = ET.parse(DOCS / "pictures" / name).getroot()  # noqa: S314 (our own file)
    assert root.get("role") == "img"
    assert len(root.findtext(f"{SVG}title") or "") > 20
    assert len(root.findtext(f"{SVG}desc") or "") > 80
