"""The typer application, common options, and how commands find and replay an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.config.schema import Config
from coordinator.doctor.shared_storage import check_shared
from coordinator.errors import OperatorError
from coordinator.evaluation import step as machine
from coordinator.evaluation.events import Accepted, AnyEvent
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import IllegalEventError, State
from coordinator.intake.validate import check_tasks, prepare_command
from coordinator.runtime.journal import events_after, read_events
from coordinator.runtime.summary import read_ended
from coordinator.runtime.wiring import site_of
from evaljobs.contract.paths import EvaluationPaths

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
    """The console for results. rich handles NO_COLOR, pipes and narrow terminals."""
    return Console()


def check_suite(
    record: EvaluationRecord, settings: Config, suite: str, *, config: Path | None, work_dir: Path | None
) -> None:
    """Refuse a suite whose tasks or data jobs would not find.

    `suite`, `config`, `work_dir`: as typed. Shows a spinner: at first lm-eval reads thousands of
    files.
    """
    site = site_of(settings)
    named = record.checkpoint.source
    prepare = prepare_command(named, suite, config=config, work_dir=work_dir, convert=record.convert)
    with Console(stderr=True).status("asking lm-eval for the suite's tasks"):
        files = check_tasks(record.suite, site, prepare)
    if settings.cluster.kind == "slurm":
        check_shared([str(settings.work_dir), named, *record.suite.include_path, *files])


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or has it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay(events, config), paths, events


def find_folder(config: Config, prefix: str) -> EvaluationPaths:
    """The folder of that evaluation, unread. OperatorError unless exactly one id matches."""
    root = Path(config.work_dir)
    ids = sorted(p.parent.name for p in root.glob("*/journal.jsonl"))
    found = [i for i in ids if i.startswith(prefix) or i.endswith(f"-{prefix}")]
    if prefix in ids:
        found = [prefix]
    if len(found) != 1:
        known = ", ".join(ids[-5:]) or "none"
        what = "no evaluation" if not found else f"{len(found)} evaluations"
        verb = "begins" if not found else "begin"
        raise OperatorError(
            f"{what} in {root} {verb} with {prefix!r} (there are: {known}): `evalspan status` lists all"
        )
    return EvaluationPaths(root / found[0])


def replay(events: list[AnyEvent], config: Config) -> State:
    """The state that a journal's events lead to. Writes nothing."""
    if not events or not isinstance(events[0], Accepted):
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    state, _ = machine.start(events[0])
    _apply(state, events[1:], site_of(config))
    return state


def _apply(state: State, events: Iterable[AnyEvent], site: Site) -> None:
    """Apply further events of the journal to `state`."""
    for event in events:
        with contextlib.suppress(IllegalEventError):  # the coordinator that wrote it skipped it too
            machine.step(state, site, event, replaying=True)


class Follower:
    """Follows the journals of a work folder's evaluations. Reads each line once and writes nothing."""

    def __init__(self, config: Config, only: str | None = None) -> None:
        """`only`: the id of one evaluation."""
        self._root = Path(config.work_dir)
        self._site = site_of(config)
        self._only = only
        self._read: dict[Path, tuple[State, int]] = {}  # journal -> its state, bytes read
        self._skipped: dict[Path, int] = {}  # ended or unreadable journal -> size; skipped until it grows

    def states(self) -> list[State]:
        """States of evaluations that have not ended, oldest first."""
        for journal in self._root.glob(f"{self._only or '*'}/journal.jsonl"):
            # storage is away for a moment, or the journal is unreadable for this user
            with contextlib.suppress(OSError, OperatorError):
                self._look(journal, journal.stat().st_size)
        states = [state for state, _ in self._read.values() if state.ended_at is None]
        return sorted(states, key=lambda state: state.record.accepted_at)

    def _look(self, journal: Path, size: int) -> None:
        if self._skipped.get(journal) == size:
            return
        self._skipped.pop(journal, None)
        if journal not in self._read and read_ended(EvaluationPaths(journal.parent)) is not None:
            self._skipped[journal] = size
            return
        try:
            self._follow(journal, size)
        except OperatorError:
            self._skipped[journal] = size
            raise

    def _follow(self, journal: Path, size: int) -> None:
        known = self._read.get(journal)
        if known is not None and size == known[1]:
            return
        if known is None or size < known[1]:  # the writer truncated a failed write
            events, offset = events_after(journal, 0)
            if events and isinstance(events[0], Accepted):
                state, _ = machine.start(events[0])
                _apply(state, events[1:], self._site)
                self._read[journal] = state, offset
            return
        events, offset = events_after(journal, known[1])
        _apply(known[0], events, self._site)
        self._read[journal] = known[0], offset
