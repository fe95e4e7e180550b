"""The lm_eval version of the trial interpreter, which is part of request sets' names.

Rule: asked at first need and kept for this process; after a failure there is a pause before the
next try.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Mapping

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
            done = subprocess.run(
                [*self._command, "-c", question],
                capture_output=True,
                text=True,
                timeout=self._patience,
                check=False,
                env={**os.environ, **self._env},
            )
        except subprocess.TimeoutExpired as error:
            raise RetryError(
                f"the trial interpreter {interpreter} did not say in {error.timeout:g} s which lm_eval it has"
            ) from error
        except OSError as error:
            raise OperatorError(f"the trial interpreter {interpreter} cannot be run: {error}") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise OperatorError(
                f"the trial interpreter has no lm_eval ({last}): install `evalspan[hf]` there"
            )
        return done.stdout.strip()


def own_version() -> str:
    """lm_eval's version in the coordinator's own interpreter; OperatorError where it has none."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise OperatorError(
            f"{sys.executable} has no lm_eval: install `evalspan[hf]`, or name [trial] python"
        ) from error
