"""The typer application and what all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator import machine
from coordinator.config import Config
from coordinator.errors import OperatorError
from coordinator.messages import Accepted, AnyEvent
from coordinator.setup import site_of
from coordinator.state import State
from coordinator.store import read_events
from evaljobs.paths import EvaluationPaths

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


def stdout() -> Console:
    """Where results go. NO_COLOR, pipes and narrow terminals are rich's business."""
    return Console()


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """The evaluation whose id begins with `prefix` (or has it as its digest), as its journal shows it now."""
    root = Path(config.work_dir)
    ids = sorted(p.parent.name for p in root.glob("*/journal.jsonl"))
    found = [i for i in ids if i.startswith(prefix) or i.endswith(f"-{prefix}")]
    if prefix in ids:
        found = [prefix]
    if len(found) != 1:
        known = ", ".join(ids[-5:]) or "none"
        what = "no evaluation" if not found else f"{len(found)} evaluations"
        raise OperatorError(f"{what} in {root} begin with {prefix!r} (there are: {known})")
    paths = EvaluationPaths(root / found[0])
    events = list(read_events(paths.journal))
    return replay(events, config), paths, events


def replay(events: list[AnyEvent], config: Config) -> State:
    """The state that a journal shows. Reads only."""
    if not events or not isinstance(events[0], Accepted):
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    site = site_of(config)
    state, _ = machine.start(events[0])
    for event in events[1:]:
        try:
            machine.step(state, site, event)
        except machine.IllegalEventError:
            continue  # the coordinator that wrote it passed over it too
    return state
