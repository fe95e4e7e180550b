"""The lm_eval version of the trial interpreter, which is part of request sets' names.

Rule: asked at first need and kept for this process; after a failure there is a pause before the
next try.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping

from coordinator.base.run_command import CommandError, run_command
from coordinator.errors import EvalspanError, OperatorError, RetryError


class LmEvalVersion:
    """Asks the trial interpreter for its lm_eval version, until it answers.

    After a failure the next attempt comes `rest` seconds plus ten times the question's duration
    later, since each attempt blocks the caller.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        env: Mapping[str, str],
        *,
        patience: float = 60.0,
        rest: float = 20.0,
    ) -> None:
        self._command = command
        self._env = env
        self._patience = patience
        self._rest = rest
        self._said = ""
        self._failed: EvalspanError | None = None
        self._rests_until = 0.0

    def __call__(self) -> str:
        """OperatorError where there is none, RetryError where there is no answer."""
        if self._said:
            return self._said
        began = time.monotonic()
        if self._failed is not None and began < self._rests_until:
            raise self._failed
        try:
            self._said = self._ask()
        except EvalspanError as error:
            now = time.monotonic()
            self._failed, self._rests_until = error, now + self._rest + 10 * (now - began)
            raise
        return self._said

    def _ask(self) -> str:
        question = "import importlib.metadata as m; print(m.version('lm_eval'))"
        interpreter = self._command[0]
        try:
            return run_command(
                [*self._command, "-c", question], seconds=self._patience, env={**os.environ, **self._env}
            ).strip()
        except CommandError as error:
            if error.timed_out:
                raise RetryError(
                    f"the trial interpreter {interpreter} did not say in {self._patience:g} s which lm_eval it has"
                ) from error
            if error.code is None:
                raise OperatorError(f"the trial interpreter {interpreter} {error}") from error
            raise OperatorError(
                f"the trial interpreter has no lm_eval ({error}): install `evalspan[hf]` there"
            ) from error


def own_version() -> str:
    """lm_eval's version in the coordinator's own interpreter; OperatorError where it has none."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise OperatorError(
            f"{sys.executable} has no lm_eval: install `evalspan[hf]`, or name [trial] python"
        ) from error
