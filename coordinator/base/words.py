"""Text for messages and screens: lists of names, foreign text, and commands to type next. Pure."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# characters that command a terminal, end a line of a log, or turn the direction in which the rest of a line is shown
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
LARGE_SCORE = 1e6  # from which a score is shown with six digits


def first_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of others: "a, b and 3 more"; "" for none."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def one_line(text: object, most: int = 1000) -> str:
    """Return foreign text as one line of at most `most` characters, safe for terminals."""
    line = " ".join(str(text)[:most].split())
    return "".join(c if c.isprintable() else "?" for c in line)


def format_score(value: float, sign: str = "") -> str:
    """Format a score; one that four decimals would not fit, such as an untrained model's perplexity, by six digits."""
    return f"{value:{sign}.5e}" if abs(value) >= LARGE_SCORE else f"{value:{sign}.4f}"


def format_seconds(value: float | None) -> str:
    """Format a duration in s, min or h; a dash for None."""
    if value is None:
        return "-"
    value = max(value, 0.0)  # two clocks may differ by a moment
    if value < 100:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60}:{int(value) % 60:02d} min"
    return f"{int(value) // 3600}:{int(value) // 60 % 60:02d} h"


def format_estimate(left: float) -> str:
    """Format predicted seconds, without spurious digits."""
    return f"about {math.ceil(left)} s" if left < 100 else f"about {format_seconds(left)}"


def by_reason(errors: Mapping[str, str]) -> dict[str, str]:
    """Return joined names -> their common reason, so 60 cancelled tasks take one line. At most three names."""
    names: dict[str, list[str]] = {}
    for name, why in errors.items():
        names.setdefault(why, []).append(name)
    return {first_of(alike, 3): why for why, alike in names.items()}


def clock_time(at: float, now: float) -> str:
    """Format local time of day, with the date if it is not today. `at`, `now`: unix seconds."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b %H:%M" if then.tm_year == today.tm_year else "%Y-%m-%d", then)


def options_of(config: str | Path | None, work_dir: str | Path | None) -> list[str]:
    """Return the options with which this call found its settings and its work folder."""
    given = (("--config", config), ("--work-dir", work_dir))
    return [word for name, value in given if value is not None for word in (name, str(value))]


def typed_command(command: str, config: str | Path | None, work_dir: str | Path | None) -> str:
    """Return a command with the options of this call."""
    return shlex.join(["evalspan", command, *options_of(config, work_dir)])
