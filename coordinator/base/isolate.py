"""Runs steps of a loop so that an exception in one step does not end the loop.

Rule: the coordinator catches all exceptions only here, and in the hook, the trackers, news and `main`. An error caused by the
site or a person is logged as one line; any other error with its traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from coordinator.errors import EvalspanError, TakenOverError

T = TypeVar("T")


@contextmanager
def isolate_errors(failed: Callable[[Exception], object]) -> Iterator[None]:
    """Pass an exception of the block to `failed` and continue. TakenOverError is not caught: nothing may continue then."""
    try:
        yield
    except TakenOverError:
        raise
    except Exception as error:  # noqa: BLE001 (the one boundary of the daemon's loop)
        failed(error)


def traceback_of(error: Exception) -> Exception | None:
    """Return `exc_info` for the log: the error if our code is at fault; None if its one line says everything."""
    return None if isinstance(error, (OSError, EvalspanError)) else error


@lru_cache(maxsize=1000)
def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning once, not in each turn of the loop while the same lasts."""
    log.warning("%s", text)


class LoopGuard:
    """Calls steps by name. A step's error is logged once, and again when it changes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: dict[str, str] = {}  # name -> repr of its last error

    def __call__(self, name: str, step: Callable[..., T], *args: object) -> T | None:
        """Return `step(*args)`; None if it raised."""
        with isolate_errors(lambda error: self._failed(name, error)):
            result = step(*args)
            self._logged.pop(name, None)
            return result
        return None

    def _failed(self, name: str, error: Exception) -> None:
        if self._logged.get(name) != repr(error):
            self._logged[name] = repr(error)
            self._log.warning("%s: %s", name, error, exc_info=traceback_of(error))
