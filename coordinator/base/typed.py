"""Commands of evalspan as a person types them, for messages that say what to type next. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path


def options_of(config: str | Path | None, work_dir: str | Path | None) -> list[str]:
    """The options by which this call found its settings and its work folder."""
    given = (("--config", config), ("--work-dir", work_dir))
    return [word for name, value in given if value is not None for word in (name, str(value))]


def typed(command: str, config: str | Path | None, work_dir: str | Path | None) -> str:
    """A command with the options of this call."""
    return shlex.join(["evalspan", command, *options_of(config, work_dir)])
