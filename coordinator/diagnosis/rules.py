"""The table of rules: reasons with owner and advice, and the patterns that find them in a line. Called from: `log`, `verdict`.

Rule: rules that a person accepted stand before those of `rules.toml`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

Owner = Literal["node", "gpu", "network", "storage", "site", "user", "scheduler", "evalspan", "none"]
RAISED = range(
    40, 56
)  # precedences of what Python raises: the last frame of a traceback tells whose code it was
# "2026-11-27 10:00:00 ERROR trainer: KeyError: 'a'": an exception that a logger names
_NAMED = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): ")


class Reason(NamedTuple):
    """Who must act, whether a restart can help, and what to do."""

    owner: Owner
    recoverable: bool
    advice: str


@dataclass(frozen=True, slots=True)
class Rule:
    """`precedence`: the smaller began the failure. `example`: a line that the pattern finds; `source`: where such lines are."""

    reason: str
    precedence: int
    pattern: re.Pattern[str]
    source: str
    example: str
    owner: Owner


class Table(NamedTuple):
    reasons: dict[str, Reason]
    rules: tuple[Rule, ...]


_accepted: list[Rule] = []


@lru_cache(maxsize=1)
def table() -> Table:
    """The rules that were accepted, and the table of `rules.toml`."""
    return Table(_package().reasons, (*_accepted, *_package().rules))


@lru_cache(maxsize=1)
def _package() -> Table:
    data = tomllib.loads(files(__package__).joinpath("rules.toml").read_text("utf-8"))
    reasons = {name: Reason(**fields) for name, fields in data["reason"].items()}
    return Table(reasons, tuple(_rule(row, reasons) for row in data["rule"]))


def _rule(row: dict[str, Any], reasons: dict[str, Reason]) -> Rule:
    return Rule(**{"owner": reasons[row["reason"]].owner, **row, "pattern": re.compile(row["pattern"])})


def accept(text: str) -> None:
    """Take the rules of this TOML, and no longer those of an earlier one. ValueError where one is damaged, or misses its example."""
    try:
        rules = [_rule(row, table().reasons) for row in tomllib.loads(text).get("rule", ())]
    except (KeyError, TypeError, re.error) as error:
        raise ValueError(f"a rule is damaged: {type(error).__name__} {error}") from error
    if missed := [rule.pattern.pattern for rule in rules if not rule.pattern.search(rule.example)]:
        raise ValueError(f"{missed[0]!r} does not find its example")
    _accepted[:] = rules
    table.cache_clear()


def find(text: str) -> Rule | None:
    """The rule of a line without ANSI codes, time stamp and rank: the first of the table that matches."""
    found = next((rule for rule in table().rules if rule.pattern.search(text)), None)
    if found is None and (named := _NAMED.search(text)) and named.start():
        return find(text[named.start() :])
    return found
