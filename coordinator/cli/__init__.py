"""The command line: thin. Each command reads arguments, calls one function of the coordinator, shows what came of it.

Exit codes: 0 all asked for is done; 1 the evaluation has failed entries, or items without a score; 2 bad input, refused before anything was
submitted; 3 a fault of ours; 130 cancelled.
"""

from __future__ import annotations

import sys

from rich.console import Console

from coordinator.cli import commands, doctor, evaluate, series, service, tools
from coordinator.cli.app import app
from coordinator.errors import BugError, EvalspanError, OperatorError

__all__ = ["app", "commands", "doctor", "evaluate", "main", "series", "service", "tools"]


def main() -> None:
    """Entry point `evalspan`: an operator's error is one line on stderr, never a traceback."""
    try:
        app(standalone_mode=True)
    except OperatorError as error:
        Console(stderr=True).print(
            f"evalspan: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(2)
    except BugError:
        raise
    except EvalspanError as error:
        Console(stderr=True).print(
            f"evalspan: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(3)
