"""The typer application and the options that its commands share."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperCommand, TyperGroup

from coordinator.base.strict_json import replace_non_finite
from coordinator.base.words import typed_command
from coordinator.errors import EvalspanError, OperatorError
from coordinator.results.report.tables import UNBOUNDED
from evaljobs.contract.paths import WorkPaths
from evaljobs.log_lines import CONTROL_REPLACEMENTS

if TYPE_CHECKING:
    from coordinator.site.config.schema import Config

ASCII_REPLACEMENTS = str.maketrans({"±": "+-", "·": "-", "→": "->", "…": "..."})  # replacements without UTF-8
DELETING_COMMANDS = frozenset({"prune", "clean"})  # commands that hints never suggest
REMOVAL_ADVICE = "`evalspan cancel ID`, which stops one (`evalspan status --disk` shows what takes space)"
LIKELY_COMMANDS = {
    "run": "`evalspan eval`",
    "delete": REMOVAL_ADVICE,
    "remove": REMOVAL_ADVICE,
    "rm": REMOVAL_ADVICE,
}


class Commands(TyperGroup):
    """The group of all commands; unknown ones are refused with a suggestion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands and not args[0].startswith("-"):
            near = (
                f"`evalspan {name}`"
                for name in get_close_matches(args[0], self.commands.keys() - DELETING_COMMANDS)
            )
            meant = LIKELY_COMMANDS.get(args[0]) or " or ".join(near)
            said = f"did you mean {meant}?" if meant else "`evalspan -h` lists all commands"
            raise OperatorError(f"unknown command {args[0]!r}: {said}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
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


REQUIRED = inspect.Parameter.empty


# --- declarations of options ---------------------------------------------------------------------------------------------


def option(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Declare an option of a command as a class attribute. `default` REQUIRED: it must be given."""
    return default, typer.Option(*names, help=text, **more)


def argument(text: str, default: Any = REQUIRED) -> Any:
    """Declare a positional argument of a command as a class attribute."""
    return default, typer.Argument(help=text)


def flag(text: str, *names: str) -> Any:
    return option(text, *names, default=False)


class Command:
    """One call of a command: an attribute per option, with the typed value. `run` executes it.

    Its docstring is the help. Shared options come last.
    """

    def __init__(self, context: typer.Context | None = None, **typed: Any) -> None:
        self.__dict__ |= {name: made[0] for name, made in declared_options(type(self)).items()} | typed
        self.rest = context.args if context else []  # remaining words, if the command accepts them
        sources = {name: context and context.get_parameter_source(name) for name in typed}
        self.given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        for name in self.given:
            if isinstance(typed[name], float) and not math.isfinite(typed[name]):
                raise OperatorError(f"--{name.replace('_', '-')} is {typed[name]}: name a finite number")

    def run(self) -> None:
        raise NotImplementedError


def declared_options(command: type[Command]) -> dict[str, Any]:
    """Return option of a command -> its default, and typer's record of it."""
    bases = [*reversed(command.__mro__)]
    bases.sort(key=lambda base: base.__module__ == __name__)
    names = (name for base in bases for name in inspect.get_annotations(base))
    found = {name: getattr(command, name) for name in names}
    for name in found.keys() & COMPLETIONS.keys():
        found[name][1].autocompletion = COMPLETIONS[name]
    return found


parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
C = TypeVar("C", bound=type[Command])


def command(
    name: str = "", *, group: typer.Typer = app, cls: type[TyperCommand] | None = None, **more: Any
) -> Callable[[C], C]:
    """Register a class as one of `group`'s commands. `more`: as in typer."""

    def made(command: C) -> C:
        kinds = get_type_hints(command)

        def call(context: typer.Context, **typed: Any) -> None:
            command(context, **typed).run()

        parameters = [
            parameter("context", annotation=typer.Context),
            *(
                parameter(name, default=default, annotation=Annotated[kinds[name], info])
                for name, (default, info) in declared_options(command).items()
            ),
        ]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        call.__doc__ = command.__doc__
        group.command(name or command.__name__.lower(), cls=cls, **more)(call)
        return command

    return made


class SettingsCommand(Command):
    """A command that finds its settings and its work folder through these options."""

    config: Path | None = option("evalspan.toml (default: here, then ~/.config/evalspan.toml).", "--config")
    work_dir: Path | None = option(
        "Folder that holds everything, on shared storage (default: evalspan-work).", "--work-dir"
    )

    def settings(self, more: Mapping[str, object] | None = None, *, makes: bool = True) -> Config:
        """Call `work_folder.load_settings`, which only commands that read settings import."""
        from coordinator.intake.work_folder import load_settings

        return load_settings(self.config, self.work_dir, more, makes=makes)

    def there(self, more: Mapping[str, object] | None = None) -> Config:
        """Return the `settings` of a command about existing evaluations. Raise OperatorError without a work folder."""
        settings = self.settings(more, makes=False)
        if missing := self.missing(settings):
            raise OperatorError(f"{missing}: select one with --work-dir")
        return settings

    def missing(self, settings: Config) -> str:
        """Return a message that the work folder is missing, with the source of its path; "" if it exists."""
        if os.path.lexists(settings.work_dir):
            return ""
        return f"the work folder {settings.work_dir} does not exist (from {self._source()})"

    def place(self, settings: Config) -> str:
        """Describe the work folder, whether it is new, and the source of its path."""
        new = "" if WorkPaths(settings.work_dir).lock.exists() else "new, "
        return f"{settings.work_dir} ({new}from {self._source()})"

    def _source(self) -> str:
        """Return the source of the work folder's path: an option, a variable, a file, or the default."""
        from coordinator.site.config.loading import source_of

        named = "--work-dir" if self.work_dir is not None else source_of(self.config, os.environ, "work_dir")
        return named or "the default, below the current folder"

    def typed(self, command: str) -> str:
        return typed_command(command, self.config, self.work_dir)


class TableCommand(SettingsCommand):
    """A command that prints tables, or JSON."""

    as_json: bool = flag("Print JSON (versioned) instead of tables.", "--json")

    def refuse_csv_with_json(self, *, as_csv: bool) -> None:
        if as_csv and self.as_json:
            raise OperatorError("--csv and --json cannot be combined")


EVALUATION = "Evaluation id, its beginning, or the digest at its end."
VERBOSE = flag("Print the complete accounting, by stage and GPU.", "--verbose", "-v")
HTML = option("Write a self-contained HTML page.", "--html")


def complete_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return the evaluations of the work folder, for shell completion."""
    from coordinator.intake.work_folder import load_settings
    from coordinator.runtime.known_evaluations import known_ids

    with suppress(EvalspanError, OSError):
        work = load_settings(context.params["config"], context.params["work_dir"], makes=False).work_dir
        return [name for name in known_ids(work) if name.startswith(incomplete)]
    return []


def complete_suites(incomplete: str) -> list[str]:
    """Return the shipped suites, for shell completion; shells complete files themselves."""
    from coordinator.intake.suites import suite_names

    return [name for name in suite_names() if name.startswith(incomplete)]


COMPLETIONS = {  # attribute name, in any command -> its completion
    **dict.fromkeys(("evaluation", "evaluations", "first", "second"), complete_ids),
    "suite": complete_suites,
}


# --- output ---------------------------------------------------------------------------------------------------------------


class Console(RichConsole):
    """A rich console that escapes foreign text: only rich's own styles and controls reach the terminal.

    Names of checkpoints and tasks, errors of jobs, text from judges and logs of models may contain escape sequences: each
    control character is shown as "?". Without a terminal a record is one line, however long.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        if not self.is_terminal:
            self.width = UNBOUNDED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isprintable() and (segment.text.isascii() or not self.plain)):
                yield segment
                continue
            text = segment.text.translate(CONTROL_REPLACEMENTS)
            if self.plain:
                text = (
                    text.translate(ASCII_REPLACEMENTS).encode(self.encoding, "replace").decode(self.encoding)
                )
            yield Segment(text, segment.style)

    @property
    def plain(self) -> bool:
        """Whether the terminal lacks UTF-8."""
        return not self.encoding.startswith("utf")


def stdout_console() -> Console:
    """Return the console for results. rich handles NO_COLOR, pipes and narrow terminals."""
    return Console()


def print_text(text: str, style: str = "", *, err: bool = False) -> None:
    """Print text unwrapped, so that a path or an id can be copied. `err`: to standard error."""
    Console(stderr=err).print(text, style=style, soft_wrap=True, highlight=False, markup=False)


class TerminalMessages:
    """Prints messages of `coordinator.api` to standard error; steps that take seconds as a spinner or a line."""

    def busy(self, what: str) -> AbstractContextManager[object]:
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            return console.status(what)
        print_text(what, err=True)
        return nullcontext()

    def say(self, text: str) -> None:
        print_to_stderr(text)


def print_to_stderr(text: str) -> None:
    """Print a line to standard error, dim on a terminal."""
    print_text(text, "dim", err=True)


def show_json(data: Any) -> None:
    stdout_console().print_json(json.dumps(replace_non_finite(data), default=str))


def refuse_output(folder: Path) -> None:
    """Raise OperatorError if a folder neither exists nor can be made, before a command computes what to write there."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there):  # noqa: PTH112 (False in a private folder)
        raise OperatorError(f"{folder} cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise OperatorError(f"{folder} cannot be written: you may not write to {there}")


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror or error}") from error
