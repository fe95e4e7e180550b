"""Pages of docs/reference that are written from the code: `python -m docs_lib.reference [--check]`.

Rule: what a page says stands in the code: in types, docstrings, comments of fields, help texts. Here are headings, and one
sentence a page of its own.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from docs_lib.text import ROOT, code, field_notes, first_upper, literal, page, plain, table
from typer.cli import get_docs_for_click

import evalspan
from coordinator import hook
from coordinator.errors import BugError, RetryError
from coordinator.intake.suites import SuiteSettings
from coordinator.interface.cli import COMMAND_EXIT_CODES, COMMON_EXIT_CODES, GROUPS, app
from coordinator.results.report.scores import ScoreValue
from coordinator.site.config.loading import OPTION_OF_SETTING
from coordinator.site.config.schema import Config, RoleConfig, settings_record
from coordinator.site.config.template import text_of
from coordinator.site.config.toml import as_toml
from evaljobs.contract.specs import Record, SuiteSpec, TaskEntry

FOLDER = ROOT / "docs" / "reference"

# --- settings ------------------------------------------------------------------------------------------------------------

SETTINGS = """Each section and key of `evalspan.toml`. `evalspan init` writes a file with all of them. Key `x` of section `[s]` can
also be set by the variable `EVALSPAN_S_X`, and some by an option ([precedence](../evaluating/command-line.md))."""


def settings_page() -> str:
    parts = ["## Keys at the top", _settings("", Config)]
    for name, field in Config.model_fields.items():
        if (model := settings_record(field)) is None:
            continue
        parts += [f"## `[{name}]`", _sentence(text_of((name,))), _settings(name, model)]
        if roles := [key for key, field in model.model_fields.items() if settings_record(field)]:
            parts += [
                f"### {', '.join(f'`[{name}.{role}]`' for role in roles)}",
                plain(RoleConfig.__doc__ or ""),
                "\n".join(f"- `[{name}.{role}]`: {text_of((name, role))}" for role in roles),
                f"Keys of each, here of `{roles[0]}`:",
                _settings(f"{name}.{roles[0]}", RoleConfig),
            ]
    return page("Settings", SETTINGS, *parts)


def _settings(section: str, model: type[Record]) -> str:
    shapes = model.model_json_schema()
    rows = []
    for key, field in model.model_fields.items():
        if settings_record(field):
            continue
        dotted = f"{section}.{key}".lstrip(".")
        shape = shapes["properties"][key]
        text, _, without = text_of(tuple(dotted.split("."))).partition("; default: ")
        default = without if field.default is None else literal(shape.get("default", field.default))
        said = _sentence(text)
        said += f" Example: {code(as_toml(field.examples[0]))}." if field.examples else ""
        said += f" Option: {code(OPTION_OF_SETTING[dotted])}." if dotted in OPTION_OF_SETTING else ""
        rows.append([code(key), words(shape, shapes.get("$defs", {})), default or "none", said])
    return table(["key", "type", "default", "what it does"], rows)


def _sentence(text: str) -> str:
    return plain((text if text.startswith(("true:", "false:")) else first_upper(text)).rstrip(".") + ".")


# --- types -------------------------------------------------------------------------------------------------------------


def words(shape: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """A type of JSON Schema in plain words, with its bounds."""
    if "$ref" in shape:
        target = known[shape["$ref"].rpartition("/")[2]]
        keys = ", ".join(f"{key} = {words(of, known)}" for key, of in target["properties"].items())
        return f"{{ {keys} }}"
    if "anyOf" in shape:
        return " or ".join(dict.fromkeys(words(s, known) for s in shape["anyOf"] if s.get("type") != "null"))
    if "const" in shape or "enum" in shape:
        return " or ".join(literal(value) for value in shape.get("enum", [shape.get("const")]))
    kind = shape.get("type", "")
    if kind in {"array", "object"}:
        inner = shape.get("items" if kind == "array" else "additionalProperties")
        if not isinstance(inner, dict):
            return "table"
        of = words(inner, known)
        least = f", at least {shape['minItems']}" if "minItems" in shape else ""
        return f"{'list' if kind == 'array' else 'table'} of {PLURALS.get(of, of)}{least}"
    name = "path" if shape.get("format") == "path" else KINDS.get(kind, "text")
    bounds = [f"{word} {shape[key]:g}" for key, word in BOUNDS.items() if shape.get(key) is not None]
    return " ".join([name, *([" and ".join(bounds)] if bounds else [])])


KINDS = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`"}
PLURALS = {"text": "texts", "path": "paths", "number": "numbers", "whole number": "whole numbers"}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


# --- suite file --------------------------------------------------------------------------------------------------------

SUITES = """Each key of a suite file, as `--suite FILE` and `[watch] suites` take it. How to write one, with examples:
[suites and tasks](../evaluating/suites.md#write-a-suite-file). A key that is not named here is refused with its line."""


def suite_page() -> str:
    notes = field_notes(SuiteSpec)
    return page(
        "Suite file",
        SUITES,
        "## Keys of the suite",
        _suite_keys(SuiteSpec, notes | {"task": notes["tasks"]}),
        "## Keys of a `[[task]]`",
        _suite_keys(TaskEntry, field_notes(TaskEntry)),
    )


def _suite_keys(model: type[Record], notes: Mapping[str, str]) -> str:
    shapes = model.model_json_schema()
    rows = []
    for name, shape in shapes["properties"].items():
        text, _, without = notes[name].partition("; None: ")
        if name in shapes.get("required", ()):
            default = "must be given"
        else:
            default = literal(shape.get("default")) or plain(without) or "none"
        kind = "tables" if name == "task" else words(shape, shapes.get("$defs", {}))
        rows.append([code(name), kind, default, plain(first_upper(text)) + "."])
    return table(["key", "type", "default", "meaning"], rows)


# --- commands ------------------------------------------------------------------------------------------------------------

COMMANDS = """Each command with its arguments and options, as `evalspan COMMAND -h` prints them. How to use them:
[the command line](../evaluating/command-line.md)."""
SHARED = f"""The section of a command names those that it takes. Every command can exit with
{", ".join(str(int(each)) for each in COMMON_EXIT_CODES)} ([meanings](../evaluating/command-line.md#exit-codes)); its section
lists other exit codes."""
OPTION = re.compile(r"^\* `-.*\n?", re.MULTILINE)


def commands_page() -> str:
    """What typer says of each command, and its exit codes. An option of four commands or more stands once."""
    root: Any = typer.main.get_command(app)
    said = {name: _command(root, name) for names in GROUPS.values() for name in names}
    uses = Counter(line for text in said.values() for line in dict.fromkeys(OPTION.findall(text)))
    shared = {line: _name(line) for line, count in uses.items() if count >= 4}
    parts = ["## Options of several commands", plain(SHARED), "".join(shared)]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            also = dict.fromkeys(shared[line] for line in OPTION.findall(said[name]) if line in shared)
            own = OPTION.sub(lambda line: "" if line[0] in shared else line[0], said[name])
            own = re.sub(r"\*\*Options\*\*:\s*(?=#|\*\*|\Z)", "", re.sub(r"\n{3,}", "\n\n", own))
            parts += [own.strip(), f"Also {', '.join(also)}." if also else "", _codes(name)]
    return page("Commands", COMMANDS, *(part.strip() for part in parts))


def _command(root: Any, name: str) -> str:
    how = {"ctx": typer.Context(root), "indent": 2, "name": name, "call_prefix": "evalspan"}
    said = get_docs_for_click(obj=root.commands[name], **how).replace("\\[", "[")  # rich's escape
    said = re.sub(r"\*\*Usage\*\*:\n\n```console\n\$ (.*)\n```", r"Usage: `\1`", said)
    said = re.sub(r"\* `(?:-h, )?--help`.*\n", "", said).replace(" range>`", ">`")
    return re.sub(r"(?m)^(evalspan .*)$", r"- `\1`", said)  # its examples


def _name(line: str) -> str:
    """The long name of the option that a line of the help describes."""
    return code("--" + line.partition("--")[2].split("`")[0].split()[0])


def _codes(name: str) -> str:
    more = "; ".join(f"{int(each)}: {said}" for each, said in COMMAND_EXIT_CODES.get(name, {}).items())
    return f"Exit codes: {more}." if more else ""


# --- python --------------------------------------------------------------------------------------------------------------

PYTHON = """Functions and records of `import evalspan`. How to use them, with examples: [evalspan from Python](../evaluating/python.md)
and [the training hook](../training/hook.md)."""


EVALUATIONS = """They need the packages of evalspan. All but `dataframe` also take `config` and `work_dir`, as on the command line,
and `settings`, a mapping from dotted keys to values: `{"cluster.kind": "slurm", "trial.model_args": {"dtype": "float32"}}`."""
SITE = {"config", "work_dir", "settings"}


def python_page() -> str:
    names = [name for name in evalspan.__all__ if inspect.isfunction(getattr(evalspan, name))]
    of_hook = [name for name in names if getattr(evalspan, name).__module__ == hook.__name__]
    calls = [name for name in names if name not in of_hook]
    records = [evalspan.Results, ScoreValue, evalspan.Submission, evalspan.Progress, SuiteSettings]
    errors = [evalspan.EvalspanError, evalspan.OperatorError, RetryError, BugError]
    parts = ["## Functions for evaluations", plain(EVALUATIONS)]
    for name in calls:
        parts += _function(name)
    parts += ["## Functions for training scripts", "They need the standard library alone."]
    for name in of_hook:
        parts += _function(name)
    parts.append("## Records")
    for record in records:
        parts += _record(record)
    parts += ["## Errors", table(["error", "meaning"], [[_of(e), plain(e.__doc__ or "")] for e in errors])]
    return page("Python", PYTHON, *parts)


def _of(error: type[Exception]) -> str:
    public = error.__name__ in evalspan.__all__
    base = error.__bases__[0].__name__
    return code(f"{'evalspan.' if public else ''}{error.__name__}({base})")


def _function(name: str) -> Iterator[str]:
    function: Callable[..., Any] = getattr(evalspan, name)
    whole = inspect.signature(function)
    of_site = SITE if SITE.issubset(whole.parameters) else ()
    shown = [each for name, each in whole.parameters.items() if name not in of_site]
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(whole.replace(parameters=shown)))
    kept = re.sub(
        r"(?<=[^,]) |, (?=\w+\])", lambda m: m[0].replace(" ", "\0"), signature
    )  # one line an argument
    called = textwrap.fill(f"evalspan.{name}{kept}", 100, subsequent_indent="    ", break_on_hyphens=False)
    yield f"### `evalspan.{name}`"
    yield "```text\n" + called.replace("\0", " ") + "\n```"
    yield plain(function.__doc__ or "")


def _record(record: type) -> Iterator[str]:
    """Its fields, inherited ones first, and its own properties and methods that have a docstring."""
    public = "evalspan." if record.__name__ in evalspan.__all__ else ""
    yield f"### `{public}{record.__name__}`"
    yield plain(record.__doc__ or "")
    notes, rows = field_notes(record), []
    for base in [base for base in reversed(record.__mro__) if base.__module__.startswith("coordinator")]:
        for name, kind in inspect.get_annotations(base).items():
            if name != "model_config" and not name.startswith("_"):
                said = str(getattr(kind, "__forward_arg__", kind)).replace(" | ", " or ")
                rows.append([code(name), code(said), plain(first_upper(notes.get(name, "")))])
    for name, value in vars(record).items():
        method = value.fget if isinstance(value, property) else value
        if not name.startswith(("_", "model_")) and inspect.isfunction(method) and method.__doc__:
            rows.append([code(name if method is not value else f"{name}()"), "", plain(method.__doc__)])
    yield table(["field or method", "type", "meaning"], rows)


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "cli.md": commands_page,
    "suite-file.md": suite_page,
    "python.md": python_page,
}


def stale() -> dict[str, str]:
    """Pages that say something else than the code does now: name -> what the code says."""
    made = {name: make() for name, make in PAGES.items()}
    return {name: text for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text}


if __name__ == "__main__":
    check = sys.argv[1:] == ["--check"]
    changed = stale()
    for name, text in changed.items():
        if not check:
            (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}:", "out of date: type scripts/docs reference" if check else "written")
    sys.exit(1 if check and changed else 0)
