"""Combines the data and the code of a page into one file that needs no network.

Rule: data are JSON and base64 in script elements that browsers do not execute. A content security policy names the script and
the style by their digests, so that text from a model or a task can never run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from coordinator.base.strict_json import replace_non_finite

SCRIPTS = (
    "uplot.js", "base.js", "table.js", "curves.js", "heatmap.js", "summary.js", "lanes.js", "index.js", "nodes.js", "samples.js", "page.js",
)  # fmt: skip
STYLES = ("uplot.css", "page.css")
SAME_SERVER = "; connect-src 'self'"


def render_page(
    title: str, data: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None, *, live: bool = False
) -> str:
    """Return the page as text. `data`: JSON-able; non-finite numbers become null.

    `blocks`: name -> gzip bytes that the page unpacks on demand. `live`: the server's page, which polls its server for news;
    any other loads nothing.
    """
    script, style = _joined((*SCRIPTS, "live.js") if live else SCRIPTS), _joined(STYLES)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{live * SAME_SERVER}"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style></head><body>",
        "<noscript>This page needs JavaScript: it draws its charts in the browser, from data in this file.</noscript>",
        f'<script type="application/json" id="data">{as_json(data)}</script>',
        *(
            f'<script type="application/gzip" id="block-{html.escape(name)}">{base64.b64encode(content).decode()}</script>'
            for name, content in (blocks or {}).items()
        ),
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(parts)


def as_json(data: Any) -> str:
    """Return JSON that is safe inside a script element: no `<`, so no end tag and no comment."""
    return json.dumps(
        replace_non_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    ).replace("<", "\\u003c")


@cache
def _joined(names: tuple[str, ...]) -> str:
    folder = files("coordinator.interface.page") / "assets"
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    return "\n" + "\n".join(texts).replace("</script", "<\\/script") + "\n"


@cache  # of the code of all pages, 150 KB
def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
