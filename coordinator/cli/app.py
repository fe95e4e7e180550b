"""The typer application and the options that its commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scores of every checkpoint as soon as spare GPUs allow.",
)

CONFIG = Annotated[
    Path | None, typer.Option("--config", help="evalspan.toml (default: here, then ~/.config/evalspan).")
]
WORK_DIR = Annotated[
    Path | None, typer.Option("--work-dir", help="Folder that holds everything, on shared storage.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON (versioned) instead of tables.")]

EVALUATION = Annotated[str, typer.Argument(help="Evaluation id, its beginning, or the digest at its end.")]


def stdout() -> Console:
    """The console for results. rich handles NO_COLOR, pipes and narrow terminals."""
    return Console()
