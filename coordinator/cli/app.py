"""The typer application and the options that its commands share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.terminal import Console
from coordinator.errors import OperatorError

if TYPE_CHECKING:
    from coordinator.config.schema import Config

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scores of every checkpoint as soon as spare GPUs allow.",
)


def _version(asked: bool) -> None:
    if asked:
        from coordinator.base.version import version_text

        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print version and commit.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Options of `evalspan` itself."""


CONFIG = Annotated[
    Path | None, typer.Option("--config", help="evalspan.toml (default: here, then ~/.config/evalspan.toml).")
]
WORK_DIR = Annotated[
    Path | None,
    typer.Option(
        "--work-dir", help="Folder that holds everything, on shared storage (default: evalspan-work)."
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON (versioned) instead of tables.")]
VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="All of the accounting: by stage and GPU.")]
HTML = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page to look at in a browser: one file, which loads nothing."),
]

_EVALUATION = typer.Argument(help="Evaluation id, its beginning, or the digest at its end.")
EVALUATION = Annotated[str, _EVALUATION]
ONE_EVALUATION = Annotated[str | None, _EVALUATION]  # of a command that takes a series, too


def stdout() -> Console:
    """The console for results. rich handles NO_COLOR, pipes and narrow terminals."""
    return Console()


def say(text: str, style: str = "", *, err: bool = False) -> None:
    """Print text as it is: unwrapped, so that a path or an id can be copied. `err`: to standard error."""
    Console(stderr=err).print(text, style=style, soft_wrap=True, highlight=False, markup=False)


class AtTerminal:
    """Takes what `coordinator.api` says beside its results: to standard error, steps that take seconds as a spinner or a line."""

    def busy(self, what: str) -> AbstractContextManager[object]:
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            return console.status(what)
        say(what, err=True)
        return nullcontext()

    def say(self, text: str) -> None:
        say_aside(text)


def say_aside(text: str) -> None:
    """Print a line beside the results: to standard error, dim on a terminal."""
    say(text, "dim", err=True)


def show_json(data: Any) -> None:
    stdout().print_json(json.dumps(data, default=str))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """OperatorError where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror or error}") from error


def place_of(settings: Config, config: Path | None, work_dir: Path | None) -> str:
    """The work folder, that it is new, and where its path came from."""
    from evaljobs.contract.paths import WorkPaths

    new = "" if WorkPaths(settings.work_dir).lock.exists() else "new, "
    return f"{settings.work_dir} ({new}from {_source_of_folder(config, work_dir)})"


def settings_of(
    config: Path | None,
    work_dir: Path | None,
    more: Mapping[str, object] | None = None,
    *,
    makes: bool = True,
) -> Config:
    """`work_folder.load`, imported by the commands that read settings alone."""
    from coordinator.intake.work_folder import load

    return load(config, work_dir, more, makes=makes)


def settings_there(
    config: Path | None, work_dir: Path | None, more: Mapping[str, object] | None = None
) -> Config:
    """`settings_of` a command about evaluations that there are: OperatorError without a work folder."""
    settings = settings_of(config, work_dir, more, makes=False)
    if missing := no_work_folder(settings, config, work_dir):
        raise OperatorError(f"{missing}: name the one that you mean by --work-dir")
    return settings


def no_work_folder(settings: Config, config: Path | None, work_dir: Path | None) -> str:
    """That there is none, and where its path came from; "" where there is one."""
    import os

    place = settings.work_dir
    if os.path.lexists(place):
        return ""
    return f"there is no work folder {place} (from {_source_of_folder(config, work_dir)})"


def _source_of_folder(config: Path | None, work_dir: Path | None) -> str:
    """Where the work folder's path came from: an option, a variable, a file, or the default."""
    import os

    from coordinator.config.loading import source_of

    named = "--work-dir" if work_dir is not None else source_of(config, os.environ, "work_dir")
    return named or "the default, below the current folder"
