"""The log of a process: lines on stderr without secrets. Called once by each program that logs.

Rule: a message is one line without control characters, since others may have written parts of it. Everything through Python's
root logger is scrubbed. Prints, and libraries with their own handlers, are not.
"""

from __future__ import annotations

import logging
import os

from evaljobs.secret_values import scrub_text

# control characters, which could command a terminal
CONTROL_REPLACEMENTS = {code: "?" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class ScrubbedFormatter(logging.Formatter):
    """Formats a record, including its traceback, with secrets removed."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = record.message.replace("\n", " ").translate(CONTROL_REPLACEMENTS)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return scrub_text(super().format(record), os.environ)


def begin_logging(form: str, handler: logging.Handler | None = None, *, level: int = logging.INFO) -> None:
    """Log to `handler` (None: stderr) from now on, unless the process logs already."""
    handler = handler or logging.StreamHandler()
    handler.setFormatter(ScrubbedFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
