"""Seams through which lm-eval's tasks run programs (`evaluate.load("code_eval")`) and ask a judge.

Rule: in all jobs `evaluate` is this module's object, installed before any task is loaded. So
reading a task runs no program and contacts no hub. Every other name goes to the real `evaluate`,
imported at that moment, since it takes seconds and loads torch. The scoring job supplies the
answers with `computing` and `answering`. Called from `run`, `requests.build` and `scoring`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evaljobs.errors import OperatorError
from evaljobs.judges.records import Ask, Reply

Compute = Callable[..., tuple[dict[str, Any], Any]]


def unrun(*, k: Any = (1, 10, 100), **_arguments: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """The answer while tasks are loaded: some of lm-eval's try the metric and drop its value."""
    ks = [k] if isinstance(k, int) else list(k)
    return {f"pass@{n}": 0.0 for n in ks}, {}


class CodeEvalSeam:
    """Stands for the hub's `code_eval` metric; `compute` goes to the sandbox."""

    name = "code_eval"

    def __init__(self) -> None:
        self._compute: Compute = unrun

    def compute(
        self,
        *,
        predictions: list[list[str]] | None = None,
        references: list[str] | None = None,
        **arguments: Any,
    ) -> tuple[dict[str, Any], Any]:
        """pass@k of `predictions` (programs per document) against `references` (one test each)."""
        return self._compute(predictions=predictions or [], references=references or [], **arguments)

    @contextlib.contextmanager
    def computing(self, compute: Compute) -> Iterator[None]:
        """Inside the block `compute` answers."""
        before, self._compute = self._compute, compute
        try:
            yield
        finally:
            self._compute = before


SEAM = CodeEvalSeam()

Answer = Callable[[Sequence[Ask]], list[Reply]]


class JudgeSeam:
    """The judge for a task: its `process_results` calls `ask` and scores the replies."""

    def __init__(self) -> None:
        self._answer: Answer | None = None

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """A reply for each ask, in order. OperatorError without a judge (plain `lm_eval`)."""
        if self._answer is None:
            raise OperatorError("a judge task is scored by `evalspan eval`, with [judge] in evalspan.toml")
        return self._answer(asks)

    @contextlib.contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Inside the block `answer` gives the replies."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before


JUDGES = JudgeSeam()


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
    """Stands for `evaluate` until a name other than `load("code_eval")` is used."""

    def __init__(self) -> None:
        super().__init__("evaluate")
        self.load = _load

    def __getattr__(self, name: str) -> Any:
        # importlib reads these from every module; they must not import the real `evaluate`
        if name in {"__spec__", "__file__", "__loader__", "__wrapped__", "_initializing"}:
            raise AttributeError(name)
        return getattr(_import_real(), name)


def install() -> None:
    """Install the seam; idempotent. Call it before any task is loaded."""
    if "evaluate" not in sys.modules:
        sys.modules["evaluate"] = _LazyEvaluate()
    elif not isinstance(sys.modules["evaluate"], _LazyEvaluate):
        _import_real()


def uses_seam(function: Any, seam: CodeEvalSeam | JudgeSeam = SEAM) -> bool:
    """Whether a task's function lives in a module that holds this seam, and so uses it."""
    return any(value is seam for value in getattr(function, "__globals__", {}).values())
