"""The command line: thin. Each command reads arguments, calls one function of the coordinator, shows what came of it.

Exit codes: 0 all asked for is done; 1 the evaluation has failed entries, or items without a score; 2 bad input, refused before anything was
submitted; 3 a fault of ours; 130 cancelled.
"""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from coordinator.cli import commands, doctor, evaluate, series, service, tools
from coordinator.cli.app import app
from coordinator.errors import BugError, EvalspanError, OperatorError

__all__ = ["app", "commands", "doctor", "evaluate", "main", "series", "service", "tools"]

log = logging.getLogger(__name__)

FAULT = "evalspan: a fault of ours; what follows, and the journal, belong in a bug report"


def main() -> None:
    """Entry point `evalspan`: an operator's error is one line on stderr, never a traceback; only a fault of ours is."""
    try:
        app(standalone_mode=True)
    except EvalspanError as error:
        if isinstance(error, BugError):
            log.exception(FAULT)
        else:
            Console(stderr=True).print(
                f"evalspan: {error}", style="red", highlight=False, markup=False, soft_wrap=True
            )
        sys.exit(2 if isinstance(error, OperatorError) else 3)
    except Exception:
        log.exception(FAULT)
        sys.exit(3)
