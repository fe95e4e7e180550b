"""docs/reference/cli.md: commands with arguments, options and help, from the typer application."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import typer
from docs_lib.reference.text import code, page, plain, table

from coordinator.cli import EVERY, GROUPS, MORE, app

INTRO = """Each command with its arguments and options. `evalspan COMMAND -h` prints the same. What the commands do together:
[the command line](../evaluating/command-line.md)."""
HELP = ("--help", "-h")
NAMES = {str: "text", int: "whole number", float: "number", bool: "", "Path": "path"}


def commands_page() -> str:
    root: Any = typer.main.get_command(app)
    own = ["## `evalspan`", plain(root.help), _options(root)]
    parts = list(own)
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            parts += _command(root.commands[name], name)
    return page("Commands", INTRO, *parts)


def _command(command: Any, name: str) -> Iterator[str]:
    yield f"### `evalspan {name}`"
    subcommands = getattr(command, "commands", {})
    yield from _help(command)
    if not subcommands:
        yield _usage(command, name)
        yield _options(command)
        yield _codes(name)
    for sub, each in subcommands.items():
        yield f"#### `evalspan {name} {sub}`"
        yield from _help(each)
        yield _usage(each, f"{name} {sub}")
        yield _options(each)


def _help(command: Any) -> Iterator[str]:
    """Its paragraphs; its examples as a list."""
    before, _, after = re.sub(
        r"(?m)(?:^|(?<= ))Examples?:$", "\0", _unmarked(inspect.cleandoc(command.help or ""))
    ).partition("\0")
    yield plain(before.strip())
    examples = [f"- {code(text)}" for text in re.split(r"\n\s*\n", after.strip()) if text]
    if examples:
        yield "Examples:"
    yield "\n".join(examples)


def _usage(command: Any, name: str) -> str:
    words = [f"evalspan {name}"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = (parameter.metavar or parameter.name).upper()
            many = "…" if parameter.nargs == -1 else ""
            words.append(f"{word}{many}" if parameter.required else f"[{word}{many}]")
    return f"Usage: `{' '.join([*words, '[OPTIONS]'])}`"


def _options(command: Any) -> str:
    rows = []
    for each in sorted(command.params, key=lambda p: p.param_type_name):
        if each.hidden or set(each.opts) & set(HELP):
            continue
        named = each.param_type_name == "option"
        names = [*each.opts, *each.secondary_opts] if named else [(each.metavar or each.name).upper()]
        rows.append(
            [", ".join(map(code, names)), _value(each), _default(each), plain(_unmarked(each.help or ""))]
        )
    return table(["argument or option", "value", "default", "what it does"], rows)


def _value(parameter: Any) -> str:
    """What is typed behind it."""
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    many = parameter.multiple or parameter.nargs == -1
    kind = next(iter(get_args(kind)), kind) if get_origin(kind) in (list, tuple) else kind
    if parameter.metavar and parameter.param_type_name == "option":
        said = code(parameter.metavar)
    else:
        said = NAMES.get(kind, NAMES.get(getattr(kind, "__name__", ""), "text"))
    low, high = parameter.min, parameter.max
    bounds = f"{'' if low is None else f' from {low:g}'}{'' if high is None else f' to {high:g}'}"
    return f"{said}{bounds}{', several times' if many else ''}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "must be given"
    value = parameter.default
    return "" if value in (None, False, "", (), []) else code(str(value))


def _codes(name: str) -> str:
    codes = {*EVERY, *MORE.get(name, {})}
    more = "".join(f"; {int(each)}: {said}" for each, said in MORE.get(name, {}).items())
    return f"[Exit codes](exit-codes.md): {', '.join(str(int(each)) for each in sorted(codes))}{more}."


def _unmarked(text: str) -> str:
    """Help without rich's escapes."""
    return text.replace("\\[", "[")
