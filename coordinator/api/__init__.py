"""evalspan from Python: evaluate, submit, wait, results, series. The command line uses the same functions.

Rule: a call prints nothing unless asked to, changes no signal handler beyond its duration, and works in any thread. Bad input
is an OperatorError in one line, raised before anything is submitted; every error of evalspan is an EvalspanError. Times are
in seconds, `at` in unix seconds. `import evalspan` exports these names.
"""

from __future__ import annotations

from coordinator.api.checking import check_suite, prepare_options
from coordinator.api.evaluating import evaluate, evaluate_async, prepare, rescore
from coordinator.api.reading import dataframe, results, series
from coordinator.api.submitting import pause, prioritize, resume, submit, wait, wait_async
from coordinator.errors import EvalspanError, OperatorError
from coordinator.runtime.finalize import Results
from coordinator.runtime.observers import Progress, RunObserver
from coordinator.runtime.submission import Submission

__all__ = [
    "EvalspanError",
    "OperatorError",
    "Progress",
    "Results",
    "RunObserver",
    "Submission",
    "check_suite",
    "dataframe",
    "evaluate",
    "evaluate_async",
    "pause",
    "prepare",
    "prepare_options",
    "prioritize",
    "rescore",
    "results",
    "resume",
    "series",
    "submit",
    "wait",
    "wait_async",
]
