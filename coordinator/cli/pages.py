"""`report --html | --trace`, `compare --html`, `serve`: pages and traces as files, and as a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.app import Where, command, option, say, writing
from coordinator.errors import OperatorError

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from coordinator.page.read import Contents


def write_page(file: Path, contents: Contents) -> None:
    """Write a page to a file. OperatorError where that cannot be."""
    from coordinator.page.html import page

    text = page(*contents)
    _save(file, text)
    say(f"wrote {file} ({len(text) / 1e6:.1f} MB): open it in a browser", err=True)


def write_trace(settings: Config, name: str, file: Path) -> None:
    """Write one evaluation's spans in Chrome's trace format. OperatorError where that cannot be."""
    from coordinator.page.read import evaluation_and_results
    from coordinator.page.trace import trace

    _save(file, json.dumps(trace(evaluation_and_results(settings, name)[0]), allow_nan=False))
    say(f"wrote {file}: open it in https://ui.perfetto.dev or chrome://tracing", err=True)


def _save(file: Path, text: str) -> None:
    from evaljobs.contract.storage import write_atomic

    if not file.parent.is_dir():
        raise OperatorError(f"{file}: the folder {file.parent} does not exist")
    with writing(file):
        write_atomic(file, text.encode("utf-8", "replace"))


@command()
class Serve(Where):
    """Show evaluations, trainings and comparisons in a browser, kept up to date; changes no evaluation.

    Examples:

    evalspan serve

    evalspan serve --port 8421

    ssh -L 8421:127.0.0.1:8421 LOGIN_NODE
    """

    port: int = option("On 127.0.0.1; 0: any free one.", min=0, max=65535, default=0)
    unix: Path | None = option("Or: a Unix socket, which only you can open.", "--unix")

    def run(self) -> None:
        from coordinator.config import loading

        try:
            from coordinator.page import server
        except ImportError as error:
            raise OperatorError(
                f"`evalspan serve` needs {error.name}: pip install 'evalspan[web]'"
            ) from error

        # makes and tries no folder
        settings = loading.load(self.config, os.environ, {"work_dir": self.work_dir})
        if self.unix is not None and self.port:
            raise OperatorError("--port and --unix: a socket of this user has no port; give one of them")
        if not settings.work_dir.is_dir():
            raise OperatorError(f"there is no work folder {settings.work_dir}: give --work-dir")
        server.run(settings, port=self.port, unix=self.unix, say=say)
