"""Seams through which lm-eval's tasks run programs (`evaluate.load("code_eval")`) and ask a judge.

Rule: in all jobs `evaluate` is this module's object, installed before any task is loaded. So
reading a task runs no program and contacts no hub. Every other name goes to the real `evaluate`,
imported at that moment, since it takes seconds and loads torch. The scoring job supplies the
answers with `answering`. Called from `run`, `requests.build` and `scoring`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evaljobs.errors import OperatorError
from evaljobs.judges.judgement import Ask, Reply


def placeholder_scores(
    *, k: Any = (1, 10, 100), **_arguments: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return a dummy answer while tasks are loaded: some of lm-eval's try the metric and drop its value."""
    ks = [k] if isinstance(k, int) else list(k)
    return {f"pass@{n}": 0.0 for n in ks}, {}


class _Seam:
    """Replaces what a task's metric calls; within `answering` the given function is called."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    @contextlib.contextmanager
    def answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Let `answer` answer within the context."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before


class CodeEvalSeam(_Seam):
    """Replaces the hub's `code_eval` metric; `compute` goes to the sandbox."""

    name = "code_eval"

    def compute(
        self,
        *,
        predictions: list[list[str]] | None = None,
        references: list[str] | None = None,
        **arguments: Any,
    ) -> Any:
        """Return pass@k of `predictions` (programs per document) against `references` (one test each)."""
        return self._answer(predictions=predictions or [], references=references or [], **arguments)


class JudgeSeam(_Seam):
    """The judge for a task: its `process_results` calls `ask` and scores the replies."""

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """Return a reply for each ask, in order. Raise OperatorError without a judge (plain `lm_eval`)."""
        return list(self._answer(asks))


def _no_judge(_asks: Sequence[Ask]) -> list[Reply]:
    raise OperatorError("a judge task is scored by `evalspan eval`, with [judge] in evalspan.toml")


SEAM = CodeEvalSeam(placeholder_scores)
JUDGES = JudgeSeam(_no_judge)


def _load(path: str, *arguments: Any, **keywords: Any) -> Any:
    if path == SEAM.name:
        return SEAM
    return _real_load()(path, *arguments, **keywords)


def _real_load() -> Callable[..., Any]:
    return _import_real().__dict__["_evalspan_load"]  # type: ignore[no-any-return]


def _import_real() -> types.ModuleType:
    if isinstance(sys.modules.get("evaluate"), _LazyEvaluate):
        del sys.modules["evaluate"]
    module = importlib.import_module("evaluate")
    if "_evalspan_load" not in module.__dict__:
        module.__dict__["_evalspan_load"] = module.load
        module.load = _load  # type: ignore[attr-defined]
    return module


class _LazyEvaluate(types.ModuleType):
    """Replaces `evaluate` until a name other than `load("code_eval")` is used."""

    def __init__(self) -> None:
        super().__init__("evaluate")
        self.load = _load

    def __getattr__(self, name: str) -> Any:
        # importlib reads these from every module, which must not import the real `evaluate`
        if name in {"__spec__", "__file__", "__loader__", "__wrapped__", "_initializing"}:
            raise AttributeError(name)
        return getattr(_import_real(), name)


def install_seam() -> None:
    """Install the seam; idempotent. Call it before any task is loaded."""
    if "evaluate" not in sys.modules:
        sys.modules["evaluate"] = _LazyEvaluate()
    elif not isinstance(sys.modules["evaluate"], _LazyEvaluate):
        _import_real()


def uses_seam(function: Any, seam: CodeEvalSeam | JudgeSeam = SEAM) -> bool:
    """Return whether a task's function lives in a module that contains this seam, and thus uses it."""
    return any(value is seam for value in getattr(function, "__globals__", {}).values())
